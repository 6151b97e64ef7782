"""HTTP: who may reach it, and what it takes to change something."""

import hmac
import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from starlette.applications import Starlette
from tests.server.l2_world import World, chunks
from tests.servers import running_server

from kvkeep.backends.guarded import GuardSettings
from kvkeep.config import HttpConfig
from kvkeep.core.directory import Limits
from kvkeep.errors import ConfigError, SocketError
from kvkeep.server import http
from kvkeep.wire import messages as m

TOKEN = "correct-horse-battery-staple"
READS = ("/healthz", "/readyz", "/metrics", "/status")


class Answer(NamedTuple):
    """One HTTP answer."""

    code: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Its body, read."""
        return json.loads(self.body)


async def call(
    app: Starlette, method: str, path: str, *, host: str = "127.0.0.1:7438", token: str = ""
) -> Answer:
    """One request through the application, as a server hands it over."""
    headers = {"host": host} if host else {}
    if token:
        headers["authorization"] = token
    target, _, query = path.partition("?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": target,
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "headers": [(k.encode(), v.encode("latin-1")) for k, v in headers.items()],
        "scheme": "http",
        "root_path": "",
        "server": ("127.0.0.1", 7438),
        "client": ("127.0.0.1", 5),
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    await app(scope, receive, send)
    found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    body = b"".join(part.get("body", b"") for part in sent[1:])
    return Answer(sent[0]["status"], found, body)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.fixture
async def world() -> World:
    """A service with three resident chunks."""
    made = World([], Limits(), GuardSettings())
    await made.store(made.join("s"), chunks(3))
    return made


def resident(world: World) -> int:
    return len(world.directory.residents.index)


# ---- who may reach it


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_host_open_to_the_network_must_be_meant(host: str) -> None:
    with pytest.raises(SocketError, match=r"remote = true") as refusal:
        http.bind(HttpConfig(host=host, port=0))
    assert "127.0.0.1" in str(refusal.value)
    http.bind(HttpConfig(host=host, port=0, remote=True)).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_word(host: str) -> None:
    http.bind(HttpConfig(host=host, port=0)).close()


async def test_reading_needs_no_token_and_changes_nothing(world: World, token_file: Path) -> None:
    for config in (HttpConfig(), HttpConfig(token_file=str(token_file))):
        app = http.application(world.service, config)
        for path in READS:
            assert (await call(app, "GET", path, host="any.example")).code == 200
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                assert (await call(app, method, path, token=f"Bearer {TOKEN}")).code == 405
        assert (await call(app, "GET", "/clear", token=f"Bearer {TOKEN}")).code == 405
        assert (await call(app, "POST", "/other", token=f"Bearer {TOKEN}")).code == 404
    assert resident(world) == 3


# ---- the token


async def test_without_a_token_file_nothing_is_changed(world: World) -> None:
    app = http.application(world.service, HttpConfig())
    for token in ("", "Bearer ", f"Bearer {TOKEN}"):
        answer = await call(app, "POST", "/clear", token=token)
        assert answer.code == 403
        assert "http.token_file" in answer.json["error"]
    assert resident(world) == 3


@pytest.mark.parametrize(
    "token",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        "Bearer ü",
    ],
)
async def test_another_token_is_refused(world: World, token_file: Path, token: str) -> None:
    app = http.application(world.service, HttpConfig(token_file=str(token_file)))
    answer = await call(app, "POST", "/clear", token=token)
    assert (answer.code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert TOKEN not in answer.body.decode()
    assert resident(world) == 3


async def test_tokens_are_compared_in_constant_time(
    world: World, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[Any, Any]] = []

    def compare(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    app = http.application(world.service, HttpConfig(token_file=str(token_file)))
    assert (await call(app, "POST", "/clear", token=f"Bearer {TOKEN}")).code == 401
    assert compared == [(TOKEN.encode(), TOKEN.encode())]


async def test_the_token_clears(world: World, token_file: Path) -> None:
    app = http.application(world.service, HttpConfig(token_file=str(token_file)))
    before = dict(world.service.clients)
    answer = await call(app, "POST", "/clear", token=f"bearer {TOKEN}")
    assert (answer.code, answer.json["cleared_chunks"]) == (200, 3)
    assert resident(world) == 0
    assert world.service.clients == before  # nobody of ours is left behind
    assert len(world.directory.peers) == len(before)


async def test_force_takes_what_is_being_read(world: World, token_file: Path) -> None:
    app = http.application(world.service, HttpConfig(token_file=str(token_file)))
    reader = world.join("reader")
    await world.find(reader, chunks(3))
    for force in ("", "?force=false", "?force=perhaps", "?force=true"):
        assert not any(isinstance(message, m.Revoked) for message in reader[1].sent), force
        answer = await call(app, "POST", f"/clear{force}", token=f"Bearer {TOKEN}")
        assert answer.code == (400 if "perhaps" in force else 200)
    assert await reader[1].next(m.Revoked)


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:7438", 200),
        ("[::1]:7438", 200),
        ("localhost", 200),
        ("LocalHost:80", 200),
        ("10.1.2.3:7438", 200),
        ("cache.example:7438", 200),
        ("evil.example:7438", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
async def test_a_name_that_is_not_ours_is_refused(
    world: World, token_file: Path, host: str, code: int
) -> None:
    """A page whose own name was made to lead here (DNS rebinding) sends that name as Host."""
    config = HttpConfig(host="cache.example", token_file=str(token_file))
    app = http.application(world.service, config)
    answer = await call(app, "POST", "/clear", host=host, token=f"Bearer {TOKEN}")
    assert answer.code == code


@pytest.mark.parametrize("text", ["", "short", "two words of a token", "ü" * 20, "a\nb" * 9])
def test_a_token_that_is_none_is_refused(token_file: Path, text: str) -> None:
    token_file.write_text(text)
    with pytest.raises(ConfigError, match=r"http\.token_file.*umask 077") as refusal:
        http.read_token(HttpConfig(token_file=str(token_file)))
    assert not text or text not in str(refusal.value)


def test_a_token_file_that_others_may_read_is_refused(token_file: Path) -> None:
    token_file.chmod(0o644)
    config = HttpConfig(token_file=str(token_file))
    with pytest.raises(ConfigError, match=f"http.token_file.*chmod 600 {token_file}"):
        http.read_token(config)
    assert http.read_token(HttpConfig(enabled=False, token_file=str(token_file))) is None


@pytest.mark.slow
def test_a_real_server(tmp_path: Path, token_file: Path) -> None:
    settings = {"http.token_file": token_file}
    with running_server(tmp_path, settings=settings) as server:
        assert server.get("/status")[0] == 200
        assert post(server.url, "") == 401
        assert post(server.url, TOKEN) == 200
        assert post(server.url, TOKEN, host="evil.example") == 403


def post(url: str, token: str, host: str | None = None) -> int:
    request = Request(f"{url}/clear?force=true", method="POST", data=b"")
    request.add_header("Authorization", f"Bearer {token}")
    if host is not None:
        request.add_header("Host", host)
    try:
        with urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code
