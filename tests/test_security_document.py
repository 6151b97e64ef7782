"""docs/SECURITY.md names tests, settings and commands that are there."""

import re
from pathlib import Path

from kvkeep.config import known_keys

REPO = Path(__file__).resolve().parents[1]
TEXT = (REPO / "docs" / "SECURITY.md").read_text()
SECTIONS = {key.partition(".")[0] for key in known_keys()}


def test_the_tests_that_it_names_are_there() -> None:
    named = set(re.findall(r"tests/[a-z0-9_/]+\.py", TEXT))
    assert len(named) >= 8
    assert [name for name in sorted(named) if not (REPO / name).exists()] == []


def test_the_settings_that_it_names_are_known() -> None:
    named = {key for key in re.findall(r"\b([a-z0-9]+\.[a-z0-9_]+)\b", TEXT) if is_setting(key)}
    assert {"l2.key_file", "http.token_file", "socket.group"} <= named
    assert sorted(named - known_keys().keys()) == []


def is_setting(text: str) -> bool:
    section, _, name = text.partition(".")
    return section in SECTIONS and name not in ("keys", "sock")


def test_the_threat_model_comes_first() -> None:
    assert TEXT.index("## Threat model") == TEXT.index("## ")
