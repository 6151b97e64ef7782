"""One real vLLM engine in this process, driven by JSON lines (`engine_messages`) from its parent.

The engine core runs in this process too, so that one process's CPU time is the engine's, and time
to first token is taken around the engine's own step loop. Standard output carries replies only:
whatever vLLM prints there goes to standard error, which the parent keeps in a log file.
"""

import os
import platform
import sys
import time
from importlib import metadata
from typing import Any, TextIO

import msgspec

from kvkeep import __version__
from kvkeep.bench import engine_messages as m
from kvkeep.client import Client

_MARK = "\N{SYMBOL FOR NULL}"  # where the document goes in the rendered chat
_POLL_S = 0.02


class Engine:
    """A vLLM engine with or without kvkeep."""

    def __init__(self, start: m.Start) -> None:
        from vllm import LLM

        with_kvkeep: dict[str, Any] = {}
        if start.socket is not None:
            with_kvkeep["kv_transfer_config"] = {
                "kv_connector": "KVKeepConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket": start.socket},
            }
        self.llm = LLM(
            start.model,
            dtype=start.dtype,
            enforce_eager=True,
            block_size=m.BLOCK_TOKENS,
            max_model_len=start.max_model_len,
            max_num_seqs=4,
            **with_kvkeep,
        )
        self.has_kvkeep = start.socket is not None

    def handle(self, command: m.Command) -> m.Reply:
        """Do one command."""
        match command:
            case m.Ask():
                return self.ask(command)
            case m.Pieces():
                return self._pieces(command)
            case m.Reset():
                done = self.llm.reset_prefix_cache()
                return m.Done() if done else m.Failed("vLLM did not empty its prefix cache")
            case m.Settle():
                return self._settle(command)
            case m.Start():
                return m.Failed("the engine has started already")

    def started(self) -> m.Started:
        """What was built."""
        versions = {"python": platform.python_version(), "kvkeep": __version__}
        versions |= {name: _version(name) for name in ("vllm", "torch", "transformers")}
        return m.Started(versions, len(self.llm.get_tokenizer()))

    def ask(self, ask: m.Ask) -> m.Answer:
        """Run one request to its end; the engine has no other."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(
            temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=ask.ignore_eos
        )
        ttft_s, last = 0.0, None
        cpu_s, started_s = time.process_time(), time.perf_counter()
        request = engine.add_request(ask.name, {"prompt_token_ids": ask.prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not ttft_s and output.outputs[0].token_ids:
                    ttft_s = time.perf_counter() - started_s
                last = output
        total_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        assert last is not None
        return m.Answer(
            request=str(request),
            prompt_tokens=len(ask.prompt),
            cached_tokens=last.num_cached_tokens or 0,
            ttft_s=ttft_s,
            total_s=total_s,
            cpu_s=cpu_s,
            token_ids=list(last.outputs[0].token_ids),
            text=last.outputs[0].text,
        )

    def _pieces(self, pieces: m.Pieces) -> m.Piece:
        tokenizer = self.llm.get_tokenizer()

        def ids(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False).input_ids)

        chat = [{"role": "user", "content": _MARK}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        head, _, tail = rendered.partition(_MARK)
        return m.Piece(
            ids(head),
            ids(pieces.document),
            [ids(f"\n\n{question}{tail}") for question in pieces.questions],
        )

    # ---- kvkeep inside this engine

    def _clients(self) -> list[Client]:
        """The connections of both sides of the connector; they live in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_side
        worker = get_kv_transfer_group().worker_side
        return [side.client for side in (scheduler, worker) if side is not None]

    def _settle(self, settle: m.Settle) -> m.Reply:
        """Look only: connecting is the connector's own work."""
        if not self.has_kvkeep:
            return m.Done()
        clients = self._clients()
        if len(clients) < 2:
            return m.Failed("kvkeep stays out of this engine; the engine's log says why")
        deadline_s = time.monotonic() + settle.timeout_s
        while not all(_settled(client, settle.not_epoch) for client in clients):
            if time.monotonic() > deadline_s:
                states = ", ".join(f"{c.state.value}: {c.why}" for c in clients)
                return m.Failed(f"the engine is not connected to kvkeep ({states})")
            time.sleep(_POLL_S)
        if clients[0].ready is None:
            return m.Failed("the engine lost kvkeep while it connected")
        return m.Done(clients[0].epoch)


def _settled(client: Client, not_epoch: int) -> bool:
    """Connected in a new epoch; the scheduler's session is ready, the worker's arena is mapped."""
    welcome = client.welcome
    if welcome is None or not client.up or welcome.epoch == not_epoch:
        return False
    if not welcome.has_arena:
        return client.ready is not None
    mapping = client.mapping
    return mapping is not None and mapping.touched_bytes >= welcome.arena_bytes


def _version(name: str) -> str:
    """Of an installed distribution; vLLM for CPU comes under a name of its own."""
    for candidate in (name, f"{name}-cpu"):
        try:
            return metadata.version(candidate)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _claim_stdout() -> TextIO:
    """Replies get the real standard output; everyone else's goes to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def main() -> int:
    """Serve the parent until it closes our input."""
    replies = _claim_stdout()
    decode = msgspec.json.Decoder(m.Command).decode

    def reply(message: m.Reply) -> None:
        replies.write(msgspec.json.encode(message).decode() + "\n")

    start = decode(sys.stdin.readline())
    if not isinstance(start, m.Start):
        reply(m.Failed("the first command starts the engine"))
        return 1
    engine = Engine(start)
    reply(engine.started())
    for line in sys.stdin:
        reply(engine.handle(decode(line)))
    engine.llm.llm_engine.engine_core.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
