"""The fingerprint: everything that gives bytes their meaning changes it, and nothing is guessed."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.layout import REQUIRED, canonical, fingerprint
from kvkeep.errors import ConfigError

FIELDS: dict[str, object] = {
    "model": "org/model",
    "weights": b"\x01" * 32,
    "dtype": "bfloat16",
    "kv_dtype": "fp8",
    "quantization": None,
    "rope": {"theta": 1e6, "scaling": None},
    "tensors": [{"layers": 4, "shape": [2, 16, 8, 64], "kind": "full"}],
    "block_tokens": 16,
    "chunk_tokens": 256,
    "world_size": 1,
    "rank": 0,
    "parallel": {"tp": 1, "pp": 1, "cp": 1},
}
FROZEN = "c6f7849050258bfef200d33545d742909a1a33eb9c157f8e96ec78c574b2749d"


def test_the_sample_has_exactly_the_required_fields() -> None:
    assert set(FIELDS) == set(REQUIRED)


def test_golden_vector() -> None:
    assert fingerprint(FIELDS).hex() == FROZEN


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", ["another", 17, {"a": []}])
def test_every_required_field_changes_it(name: str, value: object) -> None:
    assert fingerprint({**FIELDS, name: value}) != fingerprint(FIELDS)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(name: str) -> None:
    rest = {key: value for key, value in FIELDS.items() if key != name}
    with pytest.raises(ConfigError, match=rf"\b{name}\b"):
        fingerprint(rest)


def test_a_deep_change_changes_it() -> None:
    tensors: object = [{"layers": 4, "shape": [2, 16, 8, 65], "kind": "full"}]
    assert fingerprint({**FIELDS, "tensors": tensors}) != fingerprint(FIELDS)


def test_unknown_fields_change_it() -> None:
    seen = [fingerprint(FIELDS)]
    others: tuple[object, ...] = (None, "", "avx2", 0, [])
    seen += [fingerprint({**FIELDS, "isa": value}) for value in others]
    seen.append(fingerprint({**FIELDS, "new": None}))
    assert len(set(seen)) == len(seen)


@given(st.permutations(list(FIELDS.items())))
def test_the_order_of_keys_does_not(items: list[tuple[str, object]]) -> None:
    assert fingerprint(dict(items)) == fingerprint(FIELDS)


def test_the_order_of_nested_keys_does_not_but_of_lists_does() -> None:
    assert canonical({"a": {"x": 1, "y": 2}}) == canonical({"a": {"y": 2, "x": 1}})
    assert canonical([1, 2]) != canonical([2, 1])
    assert canonical([1, 2]) == canonical((1, 2))


LOOKALIKES: tuple[object, ...] = (
    True, False, 1, 0, "1", "0", 1.0, 0.0, -0.0, b"1", b"", "", None, "None", "True", "T", "F",
    [], {}, [[]], [{}], {"": None}, {"": ""}, ["1"], [1], {"1": 1}, ["a", "b"], ["ab"], {"a": "b"},
    [["a"], "b"], [["a", "b"]], float("inf"), "inf", 2**70, float(2**70),
)  # fmt: skip


def test_values_that_look_alike_differ() -> None:
    for one, other in combinations(LOOKALIKES, 2):
        assert canonical(one) != canonical(other), (one, other)


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, range, {1: "a"}, {None: 1, "a": 2}])
def test_other_types_are_refused(value: object) -> None:
    for fields in (
        {**FIELDS, "rope": value},
        {**FIELDS, "rope": [value]},
        {**FIELDS, "x": {"y": value}},
    ):
        with pytest.raises(ConfigError):
            fingerprint(fields)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


def typed(value: object) -> object:
    """The value with its types, so that True, 1 and 1.0 are told apart, and 0.0 from -0.0."""
    if isinstance(value, dict):
        return {key: typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [typed(inner) for inner in value]
    return type(value).__name__, str(value)


@given(values, values)
def test_no_two_values_have_one_encoding(one: object, other: object) -> None:
    assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))
