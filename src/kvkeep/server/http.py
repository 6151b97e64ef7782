"""HTTP: /healthz, /readyz, /metrics and /status for whoever can reach it; POST /clear by token.

Listens on loopback unless the operator allows more: there is no encryption here. What changes state
needs the token of `http.token_file`, and without such a file nothing does. Such a request must also
name the server by an address, as localhost or as it is configured: a web page that has its own name
resolved to this machine (DNS rebinding) does none of these.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvkeep.backends.keyring import read_private
from kvkeep.config import HttpConfig
from kvkeep.errors import ConfigError, SocketError
from kvkeep.metrics import exposition
from kvkeep.server.service import Service
from kvkeep.types import PeerId, Role
from kvkeep.wire import messages as m

LEAST_TOKEN_CHARS = 16
ANSWER_WAIT_S = 30.0
_BACKLOG = 128
_TOKEN = re.compile(rb"[!-~]+")
_FORCE = {"": "", "0": "", "false": "", "1": "force", "true": "force"}
_L2_SHOWN = ("name", "state", "why", "stuck", "scanned")  # of each store, in readiness


def bind(config: HttpConfig) -> socket.socket:
    """The listening TCP socket; raises SocketError with the fix when it may not or cannot be."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((config.host, config.port))
        address = str(sock.getsockname()[0])
        if not config.remote and not ipaddress.ip_address(address).is_loopback:
            sock.close()
            raise SocketError(
                f'[http] host = "{config.host}" is open to the network, and HTTP here is neither '
                'encrypted nor asks readers who they are: set [http] host = "127.0.0.1", or '
                "[http] remote = true if that network is trusted"
            )
        sock.listen(_BACKLOG)  # two bound sockets may share a port; only one of them may listen
    except OSError as error:
        sock.close()
        raise SocketError(
            f"cannot listen on {config.host}:{config.port} for HTTP: {error.strerror}; choose "
            "another [http] port (0 takes any free one) or set [http] enabled = false"
        ) from error
    sock.set_inheritable(False)
    return sock


def read_token(config: HttpConfig) -> bytes | None:
    """What a request that changes state must show; None: none may. Raises ConfigError."""
    if not config.enabled or not config.token_file:
        return None
    token = read_private(config.token_file, "http.token_file").strip()
    if len(token) < LEAST_TOKEN_CHARS or _TOKEN.fullmatch(token) is None:
        raise ConfigError(
            f"http.token_file = {config.token_file} must hold one word of {LEAST_TOKEN_CHARS} or "
            "more letters, digits and signs: (umask 077; openssl rand -hex 32 > "
            f"{config.token_file})"
        )
    return token


def application(service: Service, config: HttpConfig) -> Starlette:
    """Routes over one service. Raises ConfigError when the token cannot be used."""
    token = read_token(config)

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        status = service.status()
        l1 = status["l1"]
        ready = l1["populated_bytes"] > 0 and not service.stopping
        body = {
            "ready": ready,
            "populated_bytes": l1["populated_bytes"],
            "capacity_bytes": l1["capacity_bytes"],
            "l2": [{key: store[key] for key in _L2_SHOWN} for store in status["l2"]],
            "problems": status["problems"],
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(exposition(service), media_type="text/plain; version=0.0.4")

    async def status(_: Request) -> Response:
        return JSONResponse(service.status())

    async def clear(request: Request) -> Response:
        refusal = _refusal(request, config, token)
        if refusal is not None:
            return refusal
        force = request.query_params.get("force", "").lower()
        if force not in _FORCE:
            return _error(400, "force is 'true' or 'false'")
        return await _asked(service, "clear", _FORCE[force])

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/status", status),
            Route("/clear", clear, methods=["POST"]),
        ]
    )


def _refusal(request: Request, config: HttpConfig, token: bytes | None) -> Response | None:
    """Why this request may not change anything; None when it may."""
    if not _names_us(request.headers.get("host", ""), config.host):
        fix = "ask by address, as localhost, or by the name in http.host"
        return _error(403, f"this server is not known by that Host: {fix}")
    if token is None:
        fix = "set http.token_file and restart, or use the kvkeep command line"
        return _error(403, f"this server changes nothing by HTTP: {fix}")
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(shown.strip().encode("latin-1"), token)
    if scheme.lower() != "bearer" or not right:
        answer = _error(401, "send the token of http.token_file: Authorization: Bearer TOKEN")
        answer.headers["www-authenticate"] = "Bearer"
        return answer
    return None


def _names_us(host: str, configured: str) -> bool:
    name = re.sub(r":[0-9]*$", "", host).lower()
    if name in ("localhost", configured.lower()):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class _Asker:
    """An operator's connection within this process, for one question."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[m.Answer | m.Failed] = (
            asyncio.get_running_loop().create_future()
        )

    def send(self, message: m.ServerMessage) -> None:
        """The service's answer."""
        if isinstance(message, m.Answer | m.Failed) and not self.answer.done():
            self.answer.set_result(message)


async def _asked(service: Service, what: str, argument: str) -> Response:
    """Ask as the command line would."""
    asker = _Asker()
    hello = m.Hello(m.VERSIONS, "", Role.OPERATOR, writes=False, wants_arena=False, client="http")
    welcome = service.hello(hello, asker, pid=None)
    if isinstance(welcome, m.Refused):
        return _error(503, welcome.text)
    peer = PeerId(welcome.peer)
    try:
        service.receive(peer, m.Query(1, what, argument))
        answer = await asyncio.wait_for(asker.answer, ANSWER_WAIT_S)
    except TimeoutError:
        return _error(504, f"no answer within {ANSWER_WAIT_S:g} s; it may still be done")
    finally:
        service.gone(peer, confirmed=True)
        service.closed(peer)
    if isinstance(answer, m.Failed):
        return _error(400, answer.text)
    return Response(answer.body, media_type="application/json")


def _error(code: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=code)


class HttpServer(uvicorn.Server):
    """uvicorn inside our loop: signals stay ours."""

    def __init__(self, service: Service, config: HttpConfig) -> None:
        super().__init__(
            uvicorn.Config(
                application(service, config),
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handling to server/run.py."""
        yield
