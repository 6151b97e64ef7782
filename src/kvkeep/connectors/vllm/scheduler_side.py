"""The connector in vLLM's scheduler: looks up, hands out loads, stages and commits.

The order of vLLM's calls and the rules for publishing are DESIGN sections 4 and 8: a chunk is
staged when its end <= min(scheduled end, known tokens); committed only after the output of the step
that copied it was processed and all ranks reported; a request that shares a block of a failed load
is tainted for life. No call waits beyond the client's budget per step.
"""

import threading
import time
from array import array
from collections import deque
from typing import TYPE_CHECKING

from kvkeep.client import Client
from kvkeep.connectors.vllm.identity import bypass_reason
from kvkeep.connectors.vllm.meta import Handle, Load, LoadReport, StageCopy, StepMeta, WorkerMeta
from kvkeep.connectors.vllm.settings import Settings
from kvkeep.connectors.vllm.tracked import Loading, Staged, Tracked
from kvkeep.core.keys import root_hash
from kvkeep.types import NO_LEASE, ChunkHash, EndOutcome, Fingerprint, StageOutcome
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

LOOKUP_WAIT_S = 0.001  # in one call of get_num_new_matched_tokens
RETRY_STAGE_S = 0.25
PING_S = 1.0
_RATE_TOKENS = 64  # a step with fewer scheduled tokens says nothing about prefill speed


class SchedulerSide:
    """One per engine; called by vLLM's scheduler thread only."""

    def __init__(self, settings: Settings, client: Client, world: int) -> None:
        self.settings = settings
        self.client = client
        self.requests: dict[str, Tracked] = {}
        self.staged: dict[int, Staged] = {}
        self.loading: dict[str, Loading] = {}
        self.step_waits_s: deque[float] = deque(maxlen=100_000)
        self.block_cache: KVCacheManager | None = None
        self._world = world
        self._chunk = settings.chunk_tokens
        self.pending_loads: list[Load] = []
        self._stage_id = 0
        self._step = 0
        self._step_started: dict[int, tuple[float, int]] = {}  # step -> (time, scheduled tokens)
        self._prefill_s_per_token: float | None = None
        self._last_ping_s = 0.0
        self._roots: dict[tuple[bytes, str | None], ChunkHash] = {}

    # ---- 1. lookup

    def on_new_request(self, request: "Request") -> None:
        """Send the lookup at once, so that it overlaps the queue."""
        tracked = Tracked(request, bypass_reason(request))
        self.requests[request.request_id] = tracked
        if tracked.bypass:
            note = f"policy: {tracked.bypass}: neither looked up nor stored"
            self.client.notify(m.Note(tracked.id, note))
        else:
            self._ask(tracked, near=False)

    def matched_tokens(self, request: "Request", local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the local hit that kvkeep will load; None: ask again next step."""
        tracked = self.requests.get(request.request_id)
        if tracked is None or tracked.bypass:
            return 0, False
        tracked.local_tokens = local_tokens
        if tracked.lookup is None and tracked.found is None:
            self._ask(tracked, near=True)
        if not self._answered(tracked):
            return None, False
        if tracked.found_epoch != self.client.epoch:
            tracked.found = None  # its server is gone, and the reservation with it
        found = tracked.found
        if found is not None and found.lease == NO_LEASE and found.chunks:
            tracked.found = None  # there was no room to reserve when it arrived; now it counts
            self._ask(tracked, near=True)
            if not self._answered(tracked):
                return None, False
            found = tracked.found
        if found is None:
            return 0, False
        beyond = found.chunks * self._chunk - local_tokens
        if beyond <= 0:
            self._release(tracked, EndOutcome.UNUSED)
            tracked.found = m.Found(found.seq, NO_LEASE, 0, (), b"")  # answered: nothing to load
            return 0, False
        return beyond, True

    def _ask(self, tracked: Tracked, *, near: bool) -> None:
        root = self._root(tracked.request.cache_salt)
        chunks = (tracked.request.num_tokens - 1) // self._chunk
        skip = getattr(tracked.request, "skip_reading_prefix_cache", False)
        if root is None or chunks == 0 or skip or not self.settings.reads:
            return
        hashes = b"".join(tracked.chain(root, chunks, self._chunk))
        tracked.asked_chunks = chunks
        tracked.lookup = self.client.call(
            lambda seq: m.Lookup(
                seq,
                tracked.id,
                hashes,
                tracked.request.cache_salt,
                near,
                tracked.request.num_prompt_tokens,
            )
        )

    def _answered(self, tracked: Tracked) -> bool:
        """False while the answer may still come. Takes it when it is there."""
        call = tracked.lookup
        if call is None:
            return True
        if not call.done and not call.abandoned:
            self.client.wait(call, LOOKUP_WAIT_S)
        if not call.done and not call.abandoned:
            return False
        tracked.lookup = None
        if isinstance(call.reply, m.Found) and not call.abandoned:
            tracked.found, tracked.found_epoch = call.reply, call.epoch
        return True

    def _release(self, tracked: Tracked, outcome: EndOutcome) -> None:
        """End a reservation that no worker has seen."""
        found, tracked.found = tracked.found, None
        if found is not None and found.lease != NO_LEASE:
            ranks = tuple(range(self._world))
            self.client.notify(
                m.End(
                    found.lease,
                    ranks,
                    outcome,
                    request=tracked.id,
                    device_tokens=tracked.local_tokens,
                )
            )

    # ---- 2. loads

    def allocated(self, request: "Request", block_ids: list[int], external_tokens: int) -> bool:
        """Blocks are there: hand the load to the workers with this step's metadata.

        False when there is nothing to load although vLLM expects a load.
        """
        tracked = self.requests.get(request.request_id)
        found = tracked.found if tracked is not None else None
        if tracked is None or external_tokens <= 0 or found is None or found.lease == NO_LEASE:
            if tracked is not None:
                self._release(tracked, EndOutcome.UNUSED)
            return external_tokens <= 0
        tracked.found = None
        per_chunk = self._chunk // self.settings.block_tokens
        first = tracked.local_tokens // self.settings.block_tokens  # first block to load
        last = first + external_tokens // self.settings.block_tokens
        chunks = range(first // per_chunk, -(-last // per_chunk))
        blocks: list[list[int | None]] = [
            [
                block_ids[b] if first <= b < last else None
                for b in range(chunk * per_chunk, (chunk + 1) * per_chunk)
            ]
            for chunk in chunks
        ]
        handles = [_handles(column)[chunks.start : chunks.stop] for column in found.columns]
        self.pending_loads.append(Load(tracked.id, tracked.found_epoch, handles, blocks))
        self.loading[tracked.id] = Loading(
            found.lease,
            tracked,
            tracked.hashes[chunks.start : chunks.stop],
            external_tokens,
            tracked.local_tokens,
        )
        return True

    # ---- 3. the step

    def build_meta(self, output: "SchedulerOutput") -> StepMeta:
        """What the workers must copy in this step; also the end of this step's waiting budget."""
        self._step += 1
        starts = self._follow(output)
        meta = StepMeta(self._step, self.pending_loads, self._stage(output, starts))
        self.pending_loads = []
        scheduled = output.total_num_scheduled_tokens
        self._step_started[self._step] = (time.monotonic(), scheduled)
        self._keep_alive()
        self.step_waits_s.append(self.client.waited_s)
        self.client.begin_step()
        return meta

    def _follow(self, output: "SchedulerOutput") -> dict[str, int]:
        """Update block tables; returns where each scheduled request starts computing."""
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tracked = self.requests.get(new.req_id)
            if tracked is not None:
                tracked.blocks = list(new.block_ids[0])
                tracked.next_chunk = new.num_computed_tokens // self._chunk
                starts[new.req_id] = new.num_computed_tokens
        for request_id in output.preempted_req_ids or ():
            if request_id in self.requests:
                self.requests[request_id].blocks = []  # they belong to others now
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            tracked = self.requests.get(request_id)
            if tracked is None:
                continue
            start, fresh = cached.num_computed_tokens[i], cached.new_block_ids[i]
            starts[request_id] = start
            if request_id in cached.resumed_req_ids:
                tracked.blocks = list(fresh[0])
                tracked.next_chunk = min(tracked.next_chunk, start // self._chunk)
            elif fresh:
                tracked.blocks += fresh[0]
        return starts

    def _stage(self, output: "SchedulerOutput", starts: dict[str, int]) -> list[StageCopy]:
        """One stage call for every chunk whose tokens are known and computed by this step's end."""
        if not self.settings.writes:
            return []
        wanted: list[tuple[Tracked, list[ChunkHash]]] = []
        items: list[m.StageItem] = []
        now = time.monotonic()
        for request_id, start in starts.items():
            tracked = self.requests[request_id]
            if tracked.tainted or tracked.bypass or now < tracked.retry_at_s:
                continue
            known = len(tracked.request.all_token_ids)
            end = min(start + output.num_scheduled_tokens.get(request_id, 0), known) // self._chunk
            root = self._root(tracked.request.cache_salt) if tracked.next_chunk < end else None
            if root is None:
                continue
            first = tracked.next_chunk
            hashes = list(tracked.chain(root, end, self._chunk)[first:])
            parent = tracked.hashes[first - 1] if first else root
            items.append(
                m.StageItem(tracked.id, parent, b"".join(hashes), tracked.request.cache_salt)
            )
            wanted.append((tracked, hashes))
        if not items:
            return []
        call = self.client.call(lambda seq: m.Stage(seq, tuple(items)))
        if call is None:
            return []
        if not self.client.wait(call):
            self.client.abandon(call)  # a late grant is given back; the next step asks again
            return []
        if not isinstance(call.reply, m.Granted):
            return []
        return self._granted(wanted, call.reply, call.epoch)

    def _granted(
        self, wanted: list[tuple[Tracked, list[ChunkHash]]], reply: m.Granted, epoch: int
    ) -> list[StageCopy]:
        copies: list[StageCopy] = []
        handles = [_handles(column) for column in reply.columns]
        outcomes = iter(reply.outcomes)
        per_chunk = self._chunk // self.settings.block_tokens
        for tracked, hashes in wanted:
            stuck = False
            for _ in hashes:
                outcome = StageOutcome(next(outcomes))
                if outcome is StageOutcome.GRANTED:
                    index, chunk = len(copies), tracked.next_chunk
                    self._stage_id += 1
                    self.staged[self._stage_id] = Staged(reply.leases[index], tracked)
                    blocks = tracked.blocks[chunk * per_chunk : (chunk + 1) * per_chunk]
                    mine = [column[index] for column in handles]
                    copies.append(StageCopy(self._stage_id, epoch, mine, blocks))
                stuck = stuck or outcome in _TRY_AGAIN
                if stuck:
                    tracked.retry_at_s = time.monotonic() + RETRY_STAGE_S
                else:
                    tracked.next_chunk += 1
        return copies

    def _keep_alive(self) -> None:
        """Read what arrived, and once in a while tell the server our longest wait."""
        now = time.monotonic()
        if now - self._last_ping_s >= PING_S:
            self._last_ping_s = now
            longest_ms = max(self.client.max_step_wait_s, self.client.waited_s) * 1e3
            self.client.call(lambda seq: m.Ping(seq, longest_ms))
        self.client.pump()

    # ---- 4. after the step

    def step_done(self, report: WorkerMeta | None, invalid_blocks: set[int]) -> None:
        """The output of a step was processed: first taint, then count, then commit or abort."""
        if invalid_blocks:
            self._taint(invalid_blocks)
        if report is None:
            return
        self._measure(report.step)
        for request_id, load in report.loads.items():
            self._loaded(request_id, load)
        for stage, ranks in report.copied.items():
            self.staged[stage].reported += ranks
        for stage in report.failed:
            self.staged[stage].failed = True
        commits: list[int] = []
        aborts: list[int] = []
        for stage in [*report.copied]:
            entry = self.staged[stage]
            if entry.reported == self._world:
                del self.staged[stage]
                bad = entry.failed or entry.tracked.tainted
                (aborts if bad else commits).append(entry.lease)
        if commits:
            self.client.call(lambda seq: m.Commit(seq, tuple(commits)), even_away=True)
        if aborts:
            self.client.notify(m.Abort(tuple(aborts)))

    def _taint(self, invalid_blocks: set[int]) -> None:
        involved = {id(t): t for t in self.requests.values()}
        involved |= {id(s.tracked): s.tracked for s in self.staged.values()}
        for tracked in involved.values():
            first = next((i for i, b in enumerate(tracked.blocks) if b in invalid_blocks), None)
            if first is not None:
                tracked.tainted = True
                self._forget_locally(set(tracked.blocks[first:]))

    def _forget_locally(self, blocks: set[int]) -> None:
        """Garbage must not be found in vLLM's own prefix cache either."""
        if self.block_cache is not None:
            self.block_cache.evict_blocks(blocks)

    def _loaded(self, request_id: str, report: LoadReport) -> None:
        loading = self.loading.get(request_id)
        if loading is None or len(report.ranks) < self._world:
            return
        del self.loading[request_id]
        bad = report.broken | report.stale
        if report.broken:
            hashes = b"".join(loading.hashes[i] for i in sorted(report.broken))
            self.client.notify(m.Drop(hashes))
        tokens = loading.tokens
        if bad:
            lost = len(loading.hashes) - min(bad)
            tokens = max(0, tokens - lost * self._chunk)
        rate = self._prefill_s_per_token
        saved_ms = None if rate is None else tokens * rate * 1e3 - report.load_ms
        self.client.notify(
            m.End(
                loading.lease,
                tuple(report.ranks),
                EndOutcome.FAILED if bad else EndOutcome.USED,
                request=request_id,
                device_tokens=loading.local_tokens,
                loaded_tokens=tokens,
                load_ms=report.load_ms,
                saved_ms=saved_ms,
            )
        )

    def _measure(self, step: int) -> None:
        """Prefill speed, for the estimate of what a load saved."""
        started_s, tokens = self._step_started.pop(step, (0.0, 0))
        for old in [s for s in self._step_started if s < step]:
            del self._step_started[old]
        if tokens >= _RATE_TOKENS:
            rate = (time.monotonic() - started_s) / tokens
            before = self._prefill_s_per_token
            self._prefill_s_per_token = rate if before is None else 0.7 * before + 0.3 * rate

    def finished(self, request: "Request", block_ids: list[int]) -> None:
        """The request ends. Its staged chunks go on by themselves; its reservation ends here."""
        tracked = self.requests.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.lookup is not None:
            self.client.abandon(tracked.lookup)
        self._release(tracked, EndOutcome.UNUSED)
        if tracked.tainted:
            self._forget_locally(set(block_ids))

    def retire(self) -> None:
        """Stop asking the server; what was dispatched is still reported by the workers."""
        # Not in this thread: closing may wait for a handshake that is under way.
        threading.Thread(target=self.client.close, name="kvkeep-retire", daemon=True).start()

    def _root(self, salt: str | None) -> ChunkHash | None:
        """The root of this engine's keys under a salt; None until every rank is there."""
        ready = self.client.ready
        if ready is None:
            return None
        key = (ready.fingerprint, salt)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) > 4096:
                self._roots.clear()
            root = self._roots[key] = root_hash(Fingerprint(ready.fingerprint), salt)
        return root


_TRY_AGAIN = (StageOutcome.NO_ROOM, StageOutcome.OVER_CAP, StageOutcome.NOT_READY)


def _unpack(packed: bytes) -> list[int]:
    return array("Q", packed).tolist()


def _handles(column: m.Columns) -> list[Handle]:
    return list(
        zip(
            _unpack(column.slots), _unpack(column.offsets), _unpack(column.generations), strict=True
        )
    )
