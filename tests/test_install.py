"""What a user gets from `pip install .` in an empty environment: few packages, small, no torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parents[1]
INSTALLERS = {"pip", "setuptools", "wheel"}
MAX_PACKAGES = 26
MAX_BYTES = 60_000_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Installed(NamedTuple):
    """An environment that holds kvkeep and what came with it."""

    bin: Path
    site: Path
    packages: set[str]


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """One empty environment per run: installing is the slow part."""
    venv = tmp_path_factory.mktemp("install") / "venv"
    _run(sys.executable, "-m", "venv", venv)
    pip: list[str | Path] = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    _run(*pip, "install", "-qq", REPO)
    listed = json.loads(_run(*pip, "list", "--format=json"))
    sites = list((venv / "lib").glob("python3*/site-packages"))
    assert len(sites) == 1
    names = {entry["name"].lower().replace("_", "-") for entry in listed}
    return Installed(bin=venv / "bin", site=sites[0], packages=names - INSTALLERS)


def _size_bytes(site: Path) -> int:
    """Bytes of everything in `site` but the installers."""
    top = [p for p in site.iterdir() if p.name.split("-")[0] not in INSTALLERS]
    files = [p for entry in top for p in (entry, *entry.rglob("*")) if p.is_file()]
    return sum(p.stat().st_size for p in files)


def test_few_packages_and_no_torch(installed: Installed) -> None:
    assert "kvkeep" in installed.packages
    assert "torch" not in installed.packages
    assert len(installed.packages) <= MAX_PACKAGES, sorted(installed.packages)


def test_small(installed: Installed) -> None:
    size = _size_bytes(installed.site)
    assert 1_000_000 < size < MAX_BYTES  # the lower bound shows that something was measured


def test_the_walk_through_ships_with_the_package(installed: Installed) -> None:
    shipped = installed.site / "kvkeep" / "data" / "ARCHITECTURE.md"
    assert shipped.read_bytes() == (REPO / "docs" / "ARCHITECTURE.md").read_bytes()


def test_vllm_finds_the_connector(installed: Installed) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "print([p.value for p in entry_points(group='vllm.general_plugins')])"
    )
    assert "kvkeep.connectors.vllm.plugin:register" in _run(installed.bin / "python", "-c", code)


def test_the_command_answers(installed: Installed) -> None:
    text = _run(installed.bin / "kvkeep", "--help")
    assert "serve" in text
    assert "doctor" in text
