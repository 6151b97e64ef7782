"""HTTP for probes and scrapes: /healthz, /readyz, /metrics, /status. Loopback, read-only."""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvkeep.config import HttpConfig
from kvkeep.errors import SocketError
from kvkeep.metrics import exposition
from kvkeep.server.service import Service

_BACKLOG = 128
_L2_SHOWN = ("name", "state", "why", "stuck", "scanned")  # of each store, in readiness


def bind(config: HttpConfig) -> socket.socket:
    """The listening TCP socket; raises SocketError with the fix when the port is taken."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((config.host, config.port))
        sock.listen(_BACKLOG)  # two bound sockets may share a port; only one of them may listen
    except OSError as error:
        sock.close()
        raise SocketError(
            f"cannot listen on {config.host}:{config.port} for HTTP: {error.strerror}; choose "
            "another [http] port (0 takes any free one) or set [http] enabled = false"
        ) from error
    sock.set_inheritable(False)
    return sock


def application(service: Service) -> Starlette:
    """Routes over one service."""

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

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/status", status),
        ]
    )


class HttpServer(uvicorn.Server):
    """uvicorn inside our loop: signals stay ours."""

    def __init__(self, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                application(service),
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
