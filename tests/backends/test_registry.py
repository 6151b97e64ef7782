"""From text to stores: what is read, what is refused, and that each refusal says what to write."""

import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType
from typing import Any

import pytest

from kvkeep.backends import registry
from kvkeep.backends.base import ENTRY_POINTS, Backend
from kvkeep.backends.breaker import State
from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.registry import BackendUrl, stores
from kvkeep.errors import ConfigError
from kvkeep.testing.faulty_backend import FaultyBackend

MODULE = "kvkeep_registry_plugin"


class Plugin(FaultyBackend):
    """What the plug-in's factory makes; it keeps what it read from the URL."""

    def __init__(self, url: BackendUrl) -> None:
        super().__init__(name=url.name, capacity_bytes=url.size("capacity"))
        self.url = url.public
        self.place = (url.host, url.port, url.path, url.user, url.password)
        self.readers = url.number("readers", 8, least=1, most=64)
        self.sync = url.flag("sync", False)
        self.mode = url.choice("mode", {"auto": 0, "on": 1}, 0)


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme `mem`, installed as a package would install it."""
    module = ModuleType(MODULE)
    module.from_url = Plugin  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    installed = EntryPoints(
        (
            EntryPoint("mem", f"{MODULE}:from_url", ENTRY_POINTS),
            EntryPoint("gone", "kvkeep_no_such_module:from_url", ENTRY_POINTS),
            EntryPoint("odd", f"{MODULE}:no_such_name", ENTRY_POINTS),
        )
    )

    def entry_points(*, group: str) -> EntryPoints:
        return installed.select(group=group)

    monkeypatch.setattr(registry, "entry_points", entry_points)


def quiet(event: str, **fields: Any) -> None:
    """No log."""


def built(text: str) -> Plugin:
    raw: Backend = registry.backend(BackendUrl(text))
    assert isinstance(raw, Plugin)
    return raw


def names(text: str) -> list[str]:
    return [store.name for store in stores(text, settings=GuardSettings(), log=quiet)]


@pytest.mark.parametrize("between", [" ", ",", ", ", "\n  ", " , "])
def test_a_list_keeps_its_order(between: str) -> None:
    assert names(f"mem://a?name=two{between}mem://b{between}mem://c?name=x.1-Y_") == [
        "two",
        "mem",
        "x.1-Y_",
    ]


@pytest.mark.parametrize("text", ["", "  ", ",", " , "])
def test_an_empty_list_is_no_store(text: str) -> None:
    assert names(text) == []


async def test_a_store_is_ready_to_use() -> None:
    (store,) = stores("mem://h/p?capacity=1MiB", settings=GuardSettings(), log=quiet)
    await store.open()
    assert store.health().state is State.CLOSED
    status = store.status()
    assert (status["name"], status["url"]) == ("mem", "mem://h/p?capacity=1MiB")
    assert status["capacity_bytes"] == 1 << 20
    await store.close()


def test_options_are_read_with_their_types() -> None:
    raw = built("mem://h:7/a%20b/c?capacity=1.5GiB&readers=3&sync=on&mode=ON&name=n")
    assert raw.usage().capacity_bytes == 3 << 29
    assert (raw.readers, raw.sync, raw.mode) == (3, True, 1)
    assert raw.place == ("h", 7, "/a b/c", "", "")


def test_what_is_not_given_has_its_default() -> None:
    raw = built("mem:///p")
    assert raw.usage().capacity_bytes is None
    assert (raw.readers, raw.sync, raw.mode, raw.name) == (8, False, 0, "mem")


def test_a_password_is_read_and_never_shown() -> None:
    raw = built("mem://me:s%40cret@host:1/x")
    assert raw.place == ("host", 1, "/x", "me", "s@cret")
    assert raw.url == "mem://host:1/x"
    bad_urls = ("mem://me:secret@h/x?oops=1", "mem://me:secret@h:port/", "//me:secret@h/")
    for bad in (*bad_urls, "mem:me:secret@h", "mem:/me:secret@h"):
        with pytest.raises(ConfigError) as error:
            built(bad)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mem://h?capcity=1", "capcity is not an option of mem; known are capacity, mode, name"),
        ("mem://h?=1", "is not an option"),
        ("nfs://h", "nfs is not a kind of L2; installed are fs, gone, mem, odd"),
        ("/var/lib/kvkeep", "has no scheme; write it as in fs:///var/lib/kvkeep"),
        (
            "mem:/p?name=x",
            "L2 URL mem:/p?name=x lacks '//' after its scheme; write mem:///p?name=x",
        ),
        ("mem:p", "write it as in fs:///var/lib/kvkeep"),
        ("mem://h?readers=0", "readers=0: write a whole number from 1 to 64"),
        ("mem://h?readers=65", "from 1 to 64"),
        ("mem://h?readers=-1", "from 1 to 64"),
        ("mem://h?readers=", "from 1 to 64"),
        ("mem://h?readers=٣", "from 1 to 64"),
        ("mem://h?capacity=lots", "capacity=lots: write a number of bytes"),
        ("mem://h?sync=maybe", "sync=maybe: write one of: 1, on"),
        ("mem://h?mode=off", "mode=off: write one of: auto, on"),
        ("mem://h?readers=1&readers=2", "readers is given twice"),
        ("mem://h?name=a/b", "'a/b' is not a name"),
        ("mem://h?name=", "'' is not a name"),
        ("mem://h?name=" + "n" * 65, "at most 64"),
        ("mem://h/#part", "write it as %23"),
        ("mem://h:nine/", "correct it"),
        ("mem://[::1", "correct it"),
        ("gone://h", "kvkeep_no_such_module:from_url cannot be loaded"),
        ("odd://h", "no_such_name"),
    ],
)
def test_a_refusal_names_the_thing_and_the_fix(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        built(text)
    assert says in str(error.value)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two have the name mem; give one another"):
        names("mem://a mem://b")


@pytest.mark.parametrize("text", ["mem://h?name=a b", "mem://h/a,b", "mem://h /my dir"])
def test_what_looks_like_two_urls_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ConfigError, match="separates URLs: inside of one write %20 or %2C"):
        names(text)
    assert names("mem://h/my%20dir%2C") == ["mem"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("mem://h/p", "mem://h/p"),
        ("mem://h/p?capacity=1GiB", "mem://H//./p/?capacity=2GiB"),
        ("fs:///a/b", "fs:////a/c/../b"),
        ("fs:///a/b c", "fs:///a/b%20c"),
    ],
)
def test_one_place_in_two_urls_is_refused(first: str, second: str) -> None:
    first = first.replace(" ", "%20")
    with pytest.raises(ConfigError) as error:
        names(f"{first} {second}&name=b" if "?" in second else f"{first} {second}?name=b")
    assert f"is the same place as {BackendUrl(first).public}" in str(error.value)
    assert BackendUrl(second).path in str(error.value) or second in str(error.value)


def test_what_differs_in_host_port_user_or_path_are_two_places() -> None:
    urls = ["mem://h/p", "mem://g/p", "mem://h:1/p", "mem://me@h/p", "mem://h/p/q"]
    assert len(names(" ".join(f"{url}?name=n{n}" for n, url in enumerate(urls)))) == len(urls)


def test_the_built_in_kind_needs_no_metadata() -> None:
    assert registry.backend(BackendUrl("fs:///nowhere/at/all")).name == "fs"
