"""The connector under the real vLLM with real weights; each test asserts on one child process."""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.models import make_gemma3, make_lora
from tests.engine.parent import scenario
from tests.servers import running_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


# ---- exactness


def test_external_hit_is_native_hit_bit_for_bit_in_bf16(socket: str) -> None:
    rows = scenario("exact", socket, dtype="bfloat16", sizes=[97, 256, 417, 80])
    for row in rows:
        assert row["cold_cached"] == 0
        assert row["external_cached"] == row["native_cached"] == row["possible"]
        assert row["external_is_native"]


def test_hit_is_cold_in_fp32(socket: str) -> None:
    rows = scenario("exact", socket, dtype="float32", sizes=[97, 256, 731, 500])
    for row in rows:
        assert row["external_cached"] == row["possible"]
        assert row["external_is_cold"]
        assert row["external_is_native"]


def test_a_new_process_takes_whole_chunks(socket: str) -> None:
    first = scenario("second_process", socket, prompt_tokens=1500)
    second = scenario("second_process", socket, prompt_tokens=1500)
    assert first["cached"] == 0
    assert second["cached"] == 1280
    assert first["tokens"] == second["tokens"]
    assert first["errors"] == second["errors"] == 0


# ---- publishing


@pytest.mark.parametrize(
    ("mode", "chats", "blocks"),
    [("sync", 3, None), ("async", 3, None), ("ngram", 2, None), ("async", 4, 34)],
)
def test_two_turn_chats(socket: str, mode: str, chats: int, blocks: int | None) -> None:
    answer = scenario("chats", socket, mode=mode, chats=chats, blocks=blocks)
    assert all(answer["same1"])
    assert all(answer["same2"])
    assert all(answer["same3"])
    assert answer["store"]["wrong"] == 0
    assert answer["still_staged"] == 0
    assert answer["errors"] == 0
    assert answer["scheduler"] == ("AsyncScheduler" if mode == "async" else "Scheduler")
    if blocks is None:
        # Turn two hits whole chunks of the prompt and of the tokens that were generated. With an
        # output that is processed late, a chunk that ends with the last tokens may be missing.
        late = answer["scheduler"] == "AsyncScheduler" or mode == "ngram"
        for cached, best in zip(answer["cached2"], answer["best2"], strict=True):
            assert best - 64 * late <= cached <= best
        assert answer["preemptions"] == 0
    else:
        assert answer["preemptions"] > 0
    if mode == "ngram":
        assert answer["accepted"] > 20


def test_requests_that_share_a_prefix(socket: str) -> None:
    answer = scenario("shared_prefix", socket)
    assert all(answer["same"])
    assert all(cached >= 640 - 64 for cached in answer["cached"])
    assert answer["leases"] == answer["errors"] == 0


@pytest.mark.parametrize(("mode", "budget"), [("sync", 2048), ("sync", 256), ("async", 256)])
def test_failed_load_publishes_nothing_wrong(socket: str, mode: str, budget: int) -> None:
    answer = scenario("failed_load", socket, mode=mode, budget=budget)
    for case in ("alone", "together"):
        row = answer[case]
        assert row["failed"] >= 1
        assert row["during"], row
        assert row["own_cache"], row
        assert row["kvkeep"], row
        assert row["one_by_one"], row
        assert row["store_after"]["wrong"] == row["store_end"]["wrong"] == 0
        assert row["store_end"]["stored"] > 0
        assert min(row["kvkeep_cached"]) > 0
    assert answer["still_staged"] == answer["errors"] == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_abort_in_flight(socket: str, mode: str) -> None:
    answer = scenario("abort_in_flight", socket, mode=mode)
    for case in ("working", "failing"):
        row = answer[case]
        assert row["store"]["wrong"] == 0
        assert row["same"]
        assert row["leases"] == row["reserved_bytes"] == row["staged"] == 0
    assert answer["errors"] == 0


# ---- the server's life


def test_server_absent_then_there(tmp_path: Path) -> None:
    answer = scenario("absent", tmp_path / "k.sock")
    assert answer["same"]
    assert answer["cached"] == [0, 0, 640]
    assert answer["errors"] == 0


def test_server_killed_and_restarted_five_times(tmp_path: Path) -> None:
    answer = scenario("killed", tmp_path / "k.sock", times=5)
    for row in answer["rows"]:
        assert all(row["same"])
        assert row["cached"] == [0, 640, 0]
        assert row["unmapped_s"] < 2
    assert answer["errors"] == 0


def test_server_stopped_under_load(tmp_path: Path) -> None:
    check_stopped(scenario("stopped", tmp_path / "k.sock", seconds=10))


@pytest.mark.prove
def test_server_stopped_for_a_minute_under_load(tmp_path: Path) -> None:
    check_stopped(scenario("stopped", tmp_path / "k.sock", seconds=60))


def check_stopped(answer: dict[str, Any]) -> None:
    """No wrong token, no step over its budget (2 ms) by more than 10 ms, and caching resumes."""
    assert answer["rounds"] >= 2
    assert answer["wrong"] == 0
    assert answer["state_while_stopped"] == "away"
    assert answer["longest_wait_ms"] <= 12
    assert answer["resumed_same"]
    assert all(cached == 256 for cached in answer["resumed_cached"])
    assert answer["errors"] == 0


def test_an_error_inside_kvkeep_does_not_fail_the_engine(tmp_path: Path) -> None:
    answer = scenario("internal_error", tmp_path / "k.sock")
    assert all(answer["same"])
    assert answer["errors"] == 1


# ---- policy


def test_load_failure_policy_fail_is_refused_with_what_to_type(socket: str) -> None:
    answer = scenario("wrong_policy", socket)
    assert 'kv_load_failure_policy is "fail"' in answer["error"]
    assert '"kv_load_failure_policy":"recompute"' in answer["error"]


def test_salts_separate(socket: str) -> None:
    answer = scenario("salts", socket)
    assert answer["cached"] == [0, 384, 0, 0, 384]
    assert answer["errors"] == 0


def test_several_groups_are_left_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = make_gemma3(tmp_path_factory.mktemp("gemma3"))
    with running_server(tmp_path) as server:
        answer = scenario("groups", server.socket, model=str(model))
    assert "3 KV groups" in answer["off"]
    assert answer["same"]
    assert answer["objects"] == answer["errors"] == 0


def test_lora_is_neither_looked_up_nor_stored(
    socket: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    adapter = make_lora(tmp_path_factory.mktemp("lora"))
    answer = scenario("adapters", socket, adapter=str(adapter))
    assert answer["cached"] == [0, 0, 0, 384]
    assert answer["tokens"][0] == answer["tokens"][2] != answer["tokens"][1]
    assert answer["tokens"][1] == answer["tokens"][3]
    assert answer["errors"] == 0
