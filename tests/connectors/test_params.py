"""What a request may say to kvkeep, and what is not understood."""

import pytest

from kvkeep.connectors.vllm.params import Params, parse


@pytest.mark.parametrize(
    ("said", "want"),
    [
        (None, Params()),
        ({}, Params()),
        ({"do_remote_prefill": True}, Params()),
        ({"kvkeep": {}}, Params(given=True)),
        ({"kvkeep": {"no_store": True}}, Params(given=True, no_store=True)),
        ({"kvkeep": {"no_lookup": True}}, Params(given=True, no_lookup=True)),
        ({"kvkeep": {"prefetch_deadline_ms": 0}}, Params(given=True, deadline_ms=0.0)),
        ({"kvkeep": {"prefetch_deadline_ms": 2.5}}, Params(given=True, deadline_ms=2.5)),
    ],
)
def test_what_is_understood(said: object, want: Params) -> None:
    assert parse(said) == want


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"no_stroe": True}, "unknown key 'no_stroe'; did you mean no_store?"),
        ({"xyz": True}, "unknown key 'xyz'; known are no_lookup, no_store, prefetch_deadline_ms"),
        ({7: True}, "unknown key '7'"),
        ({"no_store": 1}, "kvkeep.no_store must be true or false"),
        ({"no_lookup": "yes"}, "kvkeep.no_lookup must be true or false"),
        ({"prefetch_deadline_ms": True}, "must be a number of milliseconds"),
        ({"prefetch_deadline_ms": -1}, "from 0 to 600000"),
        ({"prefetch_deadline_ms": float("nan")}, "from 0 to 600000"),
        ({"prefetch_deadline_ms": 600_001}, "from 0 to 600000"),
        ({"prefetch_deadline_ms": "300"}, "must be a number of milliseconds"),
        ("no_store", "kvkeep is no object"),
    ],
)
def test_what_is_not_understood_names_the_key(wishes: object, words: str) -> None:
    params = parse({"kvkeep": wishes})
    assert params.given
    assert words in str(params.problem)


def test_null_is_nothing_said() -> None:
    assert parse({"kvkeep": None}) == parse({}) == parse(None)
