"""Log lines: nothing that a client names reaches a terminal raw, and no library writes past us."""

import json
import logging

import pytest

from kvkeep.server.logs import EventLog
from kvkeep.types import printable

EVIL = "a\x1b[2J\nb\x7f\x9b"
SAFE = r"a\x1b[2J\x0ab\x7f\x9b"


def test_printable() -> None:
    assert printable(EVIL) == SAFE
    assert printable("plain Ünïcode 漢字") == "plain Ünïcode 漢字"


def test_text_lines_show_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    EventLog("info", as_json=False)("joined", session=EVIL)
    line = capsys.readouterr().err
    assert line.endswith(f"joined session={SAFE}\n")
    assert line.count("\n") == 1


def test_a_line_has_the_level_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog("warning", as_json=True)
    log("quiet")
    log("loud", level="warning", why="x")
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["event"], line["why"]) == ("warning", "loud", "x")


def test_lines_of_another_library_become_events(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog("info", as_json=True)
    log.adopt("some.library", "http")
    logger = logging.getLogger("some.library")
    logger.info("started")
    logger.warning("Bad %s", "request")
    try:
        raise ValueError("inner")
    except ValueError:
        logger.exception("it broke")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["event"], first["level"], first["what"]) == ("http", "warning", "Bad request")
    assert second["error"] == "ValueError('inner')"
