"""Records of requests: sessions do not merge, an id is found by its beginning, names are safe."""

import pytest

from kvkeep.server.timeline import Timeline


def timeline(*ids: tuple[str, str]) -> Timeline:
    made = Timeline()
    for at, (session, request) in enumerate(ids):
        made.record(session, request, 0.0, float(at))
    return made


def test_equal_ids_of_two_sessions_stay_apart_and_the_newest_is_told() -> None:
    made = timeline(("a", "r"), ("b", "r"))
    made.record("a", "r", 0.0, 9.0).add(0.0, "of a")
    told = made.explain("r")
    assert (told["session"], told["timeline"]) == ("b", [])
    assert told["at"] == "1970-01-01T00:00:01.000+00:00"


def test_several_beginnings_name_the_newest_three() -> None:
    made = timeline(*[("s", f"1{letter}") for letter in "abcd"])
    with pytest.raises(KeyError) as caught:
        made.explain("1")
    said = caught.value.args[0]
    assert said.startswith("4 requests of the last 4 begin with '1': type more of it")
    assert "1d, 1c, 1b, ..." in said
    assert "1a" not in said


def test_an_unknown_request_says_why() -> None:
    with pytest.raises(KeyError, match=r"no request of the last 1 begins with 'x'.*not looked up"):
        timeline(("s", "r")).explain("x")


def test_a_long_id_is_found_by_all_of_it() -> None:
    assert timeline(("s", "r" * 300)).explain("r" * 300)["request"] == "r" * 256


def test_control_characters_are_kept_as_text() -> None:
    made = timeline()
    made.record("s\x1b", "r\n", 0.0, 0.0).add(0.0, "note\x07")
    told = made.explain("r\n")
    assert (told["session"], told["request"]) == (r"s\x1b", r"r\x0a")
    assert told["timeline"][0]["event"] == r"note\x07"


def test_tokens_are_told_by_where_they_came_from() -> None:
    """Chunks of 16 tokens: the device had the first 24, and 36 were loaded."""
    made = timeline(("s", "r"))
    record = made.record("s", "r", 0.0, 0.0)
    record.hit_chunks, record.chunk_tokens, record.tiers = 4, 16, bytes([1, 0, 2, 1])
    record.device_tokens, record.loaded_tokens = 24, 36
    told = made.explain("r", ("disk", "net"))
    assert told["hit_tokens"] == {"device": 24, "l1": 8, "l2": {"net": 16, "disk": 12}}
    assert [chunk["tier"] for chunk in told["chunks"]] == ["l2:disk", "l1", "l2:net", "l2:disk"]


def test_consecutive_events_of_a_kind_are_counted() -> None:
    made = timeline(("s", "r"))
    record = made.record("s", "r", 0.0, 0.0)
    for what in ("persisted to disk", "persisted to disk", "not in net: full", "persisted to disk"):
        record.count(1.0, what)
    told = [line["event"] for line in made.explain("r")["timeline"]]
    assert told == ["2 persisted to disk", "1 not in net: full", "1 persisted to disk"]


def test_what_is_known_is_not_made() -> None:
    made = timeline(("s", "r"))
    assert made.known("s", "r") is not None
    assert made.known("s", "q") is None
    with pytest.raises(KeyError):
        made.explain("q")
