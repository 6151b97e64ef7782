"""Composes one server: memory, core, service, sockets, HTTP; runs it until a signal.

The order matters: everything that can be refused is refused before a client can connect, and what
was opened is closed in reverse.
"""

import asyncio
import contextlib
import resource
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence

from kvkeep.backends import registry
from kvkeep.backends.checked import Store
from kvkeep.backends.encrypted import sealers
from kvkeep.backends.guarded import GuardSettings
from kvkeep.config import Config, L2Config
from kvkeep.core.directory import Directory, Limits
from kvkeep.core.eviction import POLICIES
from kvkeep.errors import MemoryRefused
from kvkeep.limits import (
    SMALLEST_OBJECT_BYTES,
    memory_budget,
    parse_amount,
    parse_nodes,
    resident_bytes,
    resolve_l1_size,
    server_budget,
)
from kvkeep.server import http
from kvkeep.server.endpoint import Endpoint
from kvkeep.server.garbage import Garbage
from kvkeep.server.io import Io
from kvkeep.server.logs import EventLog
from kvkeep.server.quota_book import QuotaBook
from kvkeep.server.quotas import Quotas
from kvkeep.server.rpc import ControlServer
from kvkeep.server.service import Service
from kvkeep.server.watchdog import Beat, Watchdog
from kvkeep.shm import GenerationTable, SharedArena
from kvkeep.types import Epoch, StorePolicy, printable

TICK_S = 0.25
LOOK_S = 2.0  # between looks whether the socket file is still there
_SMALLEST_OBJECT_BYTES = 4096
_END_READS_CHUNKS = 1_000  # about a millisecond


def serve(config: Config) -> None:
    """Run a server in this process until SIGTERM or SIGINT. Raises KVKeepError before it starts."""
    import uvloop

    memory = memory_budget()
    capacity = resolve_l1_size(config.l1.size, memory, hugepages=config.l1.hugepages)
    book = QuotaBook(config.quota)
    _raise_descriptor_limit()
    log = EventLog(config.log.level, as_json=config.log.format == "json")
    stores = registry.stores(
        config.l2.backends,
        settings=_guard(config.l2),
        log=log,
        sealer=sealers(config.l2.key_file, config.l2.encrypt_buffer_bytes),
    )
    budget = server_budget(
        memory,
        capacity,
        config.l1.max_objects,
        huge=config.l1.hugepages != "off",
        buffers={store.name: store.buffer_bytes for store in stores},
        used_bytes=resident_bytes(),
    )
    budget.check()
    endpoint = Endpoint(config.socket.path, config.socket.group)
    try:
        http_socket = http.bind(config.http) if config.http.enabled else None
        arena = SharedArena(
            capacity,
            hugepages=config.l1.hugepages != "off",
            numa=parse_nodes(config.l1.numa),
        )
        slots = min(config.l1.max_objects, capacity // SMALLEST_OBJECT_BYTES)
        table = GenerationTable(slots)
        io = Io(stores, arena.view, clock=time.monotonic, log=log)
        server = Server(config, log, endpoint, (arena, table), io=io)
        server.limit_tenants(book)
        server.service.overview.memory = budget.as_dict()
        log("memory", **budget.fields())
        uvloop.run(server.run(http_socket))
    finally:
        endpoint.close()


class Server:
    """One epoch: built after its sockets and memory exist."""

    def __init__(
        self,
        config: Config,
        log: EventLog,
        endpoint: Endpoint,
        memory: tuple[SharedArena, GenerationTable],
        *,
        io: Io,
    ) -> None:
        self._config = config
        self._log = log
        self._endpoint = endpoint
        self._arena, self._table = memory
        self._io = io
        self.watchdog = Watchdog(log, cpu_clock=time.thread_time if config.log.loop_cpu else None)
        self.service = Service(
            Directory(
                self._table.words,
                new_id=_random_id,
                limits=_limits(config, io.stores),
                policy=POLICIES[config.policy.eviction](),
            ),
            epoch=Epoch(_random_id()),
            capacity_bytes=self._arena.size_bytes,
            clock=time.monotonic,
            log=log,
            wall_clock=time.time,
            io=io,
            later=_later,
            watchdog=self.watchdog,
        )
        self._web = http.HttpServer(self.service, config.http)

    def limit_tenants(self, book: QuotaBook) -> None:
        """Keep every tenant to its limits, in L1 and in the backends that can."""
        for store in self._io.stores:
            if store.tenanted is not None:
                store.tenanted.limit_tenants(book)
        service = self.service
        quotas = Quotas(
            book, service.directory, apply=service.apply, stores=self._io.stores, log=self._log
        )
        quotas.start()
        service.overview.quotas = quotas

    async def run(self, http_socket: socket.socket | None) -> None:
        """Serve until a signal. Raises BackendError when a backend cannot be opened."""
        loop = asyncio.get_running_loop()
        await self._io.open()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        memory = (self._arena, self._table)
        control = ControlServer(
            self.service,
            self._endpoint.socket,
            memory,
            limits=self._config.limits,
            log=self._log,
        )
        control.start()
        self._log.adopt("uvicorn.error", "http")
        web = self._web
        garbage = Garbage()
        tasks = [loop.create_task(self._populate()), loop.create_task(self._tick(garbage))]
        web_task = loop.create_task(web.serve([http_socket])) if http_socket is not None else None
        if web_task is not None:
            web_task.add_done_callback(self.http_ended)
        self._log("serving", **self._description(http_socket))
        beat = Beat(self.watchdog, loop)
        await stop.wait()
        self._log("stopping")
        stop.clear()
        self.service.stop()
        control.end_engines()
        await self._drain(stop)
        control.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if web_task is not None:
            web_task.remove_done_callback(self.http_ended)
            web.should_exit = True
            await asyncio.gather(web_task, return_exceptions=True)
        await self._io.close()
        beat.stop()
        garbage.stop()
        self._log("stopped")

    async def _drain(self, stop: asyncio.Event) -> None:
        """Persist what L2 does not have yet; a second signal ends that, and so does a dead L2."""
        persister = self.service.directory.persister
        until_s = time.monotonic() + self._config.l2.drain_s
        said_s = 0.0
        while not persister.idle and not stop.is_set() and time.monotonic() < until_s:
            if not persister.running and not self._io.takes_puts():
                break
            if time.monotonic() - said_s >= 1.0:
                said_s = time.monotonic()
                self._log("draining", queued_bytes=persister.queued_bytes)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.05)
        if not persister.idle:
            self._log.warn("not_drained", queued_bytes=persister.queued_bytes)

    async def _populate(self) -> None:
        """Allocate the arena step by step; capacity grows as it goes."""
        loop = asyncio.get_running_loop()
        progress = Progress(self._log, self._arena.size_bytes)
        try:
            while self._arena.populated_bytes < self._arena.size_bytes:
                populated = await loop.run_in_executor(None, self._arena.populate_step)
                with self.watchdog.entry("grown"):
                    self.service.grown(populated)
                progress(populated)
        except MemoryRefused as error:
            self.service.problems["populate"] = str(error)
            self._log.warn("populate_failed", why=str(error))

    async def _tick(self, garbage: Garbage) -> None:
        look_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            with self.watchdog.entry("tick"):
                self.service.tick()
                chunks = len(self.service.directory.residents.index)
                garbage.collect(idle_s=self.service.idle_s, chunks=chunks)
                look_s += TICK_S
                if look_s >= LOOK_S:
                    look_s = 0.0
                    self.look_at_socket()

    def look_at_socket(self) -> None:
        """Notice that clients cannot find this server any more. Said once."""
        if "socket" in self.service.problems or self._endpoint.in_place():
            return
        path = printable(str(self._endpoint.path))
        self.service.problems["socket"] = (
            f"the socket file {path} is gone: restart the server "
            "(do not keep sockets where /tmp is cleaned)"
        )
        self._log.warn("socket_gone", socket=path)

    def http_ended(self, task: asyncio.Task[None]) -> None:
        """HTTP stopped although the server goes on."""
        error = None if task.cancelled() else task.exception()
        why = repr(error) if error else "it ended"
        self.service.problems["http"] = f"HTTP has stopped ({why}): restart the server"
        self._log.warn("http_ended", why=why)

    def _description(self, http_socket: socket.socket | None) -> dict[str, object]:
        address = http_socket.getsockname() if http_socket is not None else None
        return {
            "socket": self._endpoint.path,
            "http": f"http://{address[0]}:{address[1]}" if address else "off",
            "l1_bytes": self._arena.size_bytes,
            "l2": " ".join(store.url for store in self._io.stores) or "off",
            "epoch": f"{self.service.epoch:016x}",
        }


class Progress:
    """A log line at each tenth of the way."""

    def __init__(self, log: Callable[..., None], total: int) -> None:
        self._log = log
        self._total = total
        self._said = 0

    def __call__(self, done: int) -> None:
        """Say it when another tenth is reached."""
        tenth = 10 * done // self._total
        if tenth > self._said:
            self._said = tenth
            name = "populated" if done == self._total else "populating"
            self._log(name, percent=100 * done // self._total, bytes=done)


def _limits(config: Config, backends: Sequence[Store]) -> Limits:
    return Limits(
        staging_fraction=config.l1.staging_fraction,
        session_staging_fraction=config.l1.session_staging_fraction,
        session_reserve_fraction=config.l1.session_reserve_fraction,
        in_progress_after_s=config.limits.inprogress_after_s,
        quarantine_s=config.limits.gpu_quarantine_s,
        backends=len(backends),
        lookup_wait_s=config.l2.lookup_wait_s,
        fetch_fraction=config.l2.fetch_fraction,
        fetch_bytes=config.l2.fetch_bytes,
        fetches_per_backend=config.l2.fetches,
        persists_per_backend=config.l2.persists,
        persist_queue_bytes=config.l2.persist_queue_bytes,
        persist_tries=config.l2.persist_tries,
        end_reads_chunks=_END_READS_CHUNKS,
        low_water_fraction=config.l2.low_water_fraction,
        store_policy=StorePolicy(config.l2.policy),
        default_quota=parse_amount(config.quota.default_l1),
    )


def _guard(l2: L2Config) -> GuardSettings:
    return GuardSettings(
        get_timeout_s=l2.get_timeout_s,
        put_timeout_s=l2.put_timeout_s,
        breaker_failures=l2.breaker_failures,
        breaker_open_s=l2.breaker_open_s,
        breaker_open_most_s=l2.breaker_open_most_s,
    )


def _raise_descriptor_limit() -> None:
    """Allow what the host allows: a connection takes two descriptors, socket and process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _later(action: Callable[[], None]) -> None:
    """Run it when the loop has served what is ready."""
    asyncio.get_running_loop().call_soon(action)


def _random_id() -> int:
    """A random non-zero 64-bit id."""
    return secrets.randbits(64) or 1
