"""The real vLLM, short of KV space and busy, while the server is killed and stopped.

Every answer is compared with that of a vLLM without kvkeep, which answers the same requests beside
it.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.parent import answer, scenario, start
from tests.engine.scenarios_chaos import NEW_TOKENS, REQUESTS


def strike(path: str, place: Path, strikes: int, seed: int) -> tuple[list[list[int]], Any]:
    """(what vLLM alone answers to each request, what happened under strikes)."""
    alone = start("without_kvkeep", path)
    try:
        struck = scenario("struck", path, place=str(place), strikes=strikes, seed=seed)
        return answer(alone), struck
    finally:
        if alone.poll() is None:
            alone.kill()
            alone.communicate()


def check(want: list[list[int]], got: Any, strikes: int) -> None:
    assert len(want) == REQUESTS
    assert got["failure"] == ""
    assert got["kills"] + got["stops"] == strikes
    assert got["kills"] > got["stops"] > 0
    assert len(got["answers"]) == got["rounds"] * REQUESTS, "a request has failed"
    assert {len(tokens) for _, tokens in got["answers"]} == {NEW_TOKENS}
    wrong = [number for number, tokens in got["answers"] if tokens != want[number]]
    assert wrong == [], f"{len(wrong)} of {len(got['answers'])} answers differ from vLLM's own"
    assert got["preemptions"] > 0, "the KV space was not too small"
    assert got["loaded_tokens"] > 0, "kvkeep had no part in it"
    assert got["errors"] == 0
    assert not any(got["left"].values()), got["left"]


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_server_struck_while_the_engine_serves(tmp_path: Path, short_path: str) -> None:
    want, got = strike(short_path, tmp_path / "l2", 6, seed=1)
    check(want, got, 6)


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_a_server_struck_twenty_times_while_the_engine_serves(
    tmp_path: Path, short_path: str
) -> None:
    want, got = strike(short_path, tmp_path / "l2", 20, seed=2)
    check(want, got, 20)
