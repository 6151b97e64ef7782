"""Test aid: lets vLLM's real asynchronous scheduler run on the CPU platform, which turns it off.

Only the switch and the stream objects are stubbed; scheduler, batch queue and runner are vLLM's.
"""

import contextlib
from typing import Any

import torch


class _NoStream:
    """Stands for a stream or an event where work is done when a call returns."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def allow_async_scheduling_on_cpu() -> None:
    """Keep `async_scheduling` as asked for, and stub what it needs from CUDA."""
    from vllm.platforms.cpu import CpuPlatform

    real = CpuPlatform.check_and_update_config.__func__

    def keep(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        real(cls, config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(keep)
    torch.cuda.Event = _NoStream
    torch.cuda.Stream = _NoStream
    torch.cuda.current_stream = lambda *_, **__: _NoStream()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
