"""The connector in vLLM's scheduler: looks up, hands out loads, stages and commits.

The order of vLLM's calls and the rules for publishing are DESIGN sections 4 and 8: a chunk is
staged when its end <= min(scheduled end, known tokens); committed only after the output of the step
that copied it was processed and all ranks reported; a request that shares a block of a failed load
is tainted for life. No call waits beyond the client's budget per step. Lookups are in lookups.py.
"""

import logging
import threading
import time
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

from kvkeep.client import Call, Client
from kvkeep.connectors.vllm.identity import bypass_reason
from kvkeep.connectors.vllm.lookups import Lookups, Revocations
from kvkeep.connectors.vllm.meta import Handle, Load, LoadReport, StageCopy, StepMeta, WorkerMeta
from kvkeep.connectors.vllm.params import parse
from kvkeep.connectors.vllm.settings import Settings
from kvkeep.connectors.vllm.stats import DEVICE, KVKeepStats
from kvkeep.connectors.vllm.tracked import Loading, Staged, Tracked
from kvkeep.errors import ProtocolError, ServerAway
from kvkeep.types import NO_LEASE, ChunkHash, CommitOutcome, EndOutcome, StageOutcome
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

RETRY_STAGE_S = 0.25
PING_S = 1.0
RESET_WAIT_S = 2.0  # an operator waits, not a step
_RATE_TOKENS = 64  # a step with fewer scheduled tokens says nothing about prefill speed

_log = logging.getLogger("vllm.kvkeep")


class SchedulerSide:
    """One per engine; called by vLLM's scheduler thread only."""

    def __init__(
        self, settings: Settings, client: Client, world: int, revocations: Revocations
    ) -> None:
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
        self._commits: deque[Call] = deque(maxlen=10_000)
        self._was_up: bool | None = None
        self.lookups = Lookups(settings, client, world, revocations)
        self.stats = self.lookups.stats

    # ---- 1. lookup

    def on_new_request(self, request: "Request") -> None:
        """Read the request's wishes, and send its lookup."""
        params = parse(getattr(request, "kv_transfer_params", None))
        tracked = Tracked(request, params, params.problem or bypass_reason(request))
        self.requests[request.request_id] = tracked
        if tracked.bypass:
            note = f"policy: {tracked.bypass}: neither looked up nor stored"
            self.client.notify(m.Note(tracked.id, note, request.num_prompt_tokens))
            if params.problem:
                _log.warning("kvkeep: request %s: kv_transfer_params: %s", tracked.id, note)
        elif params.no_lookup:
            note = "no_lookup: not looked up, as the request says"
            self.client.notify(m.Note(tracked.id, note, request.num_prompt_tokens))
        else:
            self.lookups.begin(tracked)

    def matched_tokens(self, request: "Request", local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the local hit that kvkeep will load; None: ask again next step."""
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return 0, False
        if tracked.bypass:
            tracked.local_tokens = local_tokens
            return 0, False
        return self.lookups.matched(tracked, local_tokens)

    # ---- 2. loads

    def allocated(self, request: "Request", block_ids: list[int], external_tokens: int) -> bool:
        """Blocks are there: hand the load to the workers with this step's metadata.

        False when there is nothing to load although vLLM expects a load.
        """
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return external_tokens <= 0
        if not tracked.admitted:
            tracked.admitted, tracked.device_tokens = True, tracked.local_tokens
            self.stats.hit(DEVICE, tracked.local_tokens)
        found = tracked.found
        if external_tokens <= 0 or found is None or found.lease == NO_LEASE:
            self.lookups.release(tracked, EndOutcome.UNUSED)
            return external_tokens <= 0
        tracked.found = None
        block = self.settings.block_tokens
        per_chunk = self._chunk // block
        first = tracked.local_tokens // block  # first block to load
        last = first + external_tokens // block
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
            [block * sum(b is not None for b in row) for row in blocks],
            self.lookups.tiers(found)[chunks.start : chunks.stop],
            tracked.local_tokens,
        )
        return True

    # ---- 3. the step

    def build_meta(self, output: "SchedulerOutput") -> StepMeta:
        """What the workers must copy in this step; also the end of this step's waiting budget."""
        self._step += 1
        starts = self._follow(output)
        scheduled = output.total_num_scheduled_tokens
        stages = self._stage(output, starts)
        taken = {r for r in output.preempted_req_ids or () if r in self.loading}
        meta = StepMeta(self._step, self.pending_loads, stages, scheduled, taken)
        self.pending_loads = []
        self._step_started[self._step] = (time.monotonic(), scheduled)
        self._keep_alive()
        self._count_commits()
        self.step_waits_s.append(self.client.waited_s)
        self.client.begin_step()
        self.lookups.begin_step(scheduled)
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
            if not tracked.may_store or now < tracked.retry_at_s:
                continue
            known = len(tracked.request.all_token_ids)
            end = min(start + output.num_scheduled_tokens.get(request_id, 0), known) // self._chunk
            root = (
                self.lookups.root(tracked.request.cache_salt) if tracked.next_chunk < end else None
            )
            if root is None:
                continue
            first = tracked.next_chunk
            hashes = list(tracked.chain(root, end, self._chunk)[first:])
            parent = tracked.hashes[first - 1] if first else root
            items.append(
                m.StageItem(tracked.id, parent, b"".join(hashes), tracked.request.cache_salt, first)
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
                outcome = next(outcomes)  # perhaps one that only a newer server knows
                if outcome == StageOutcome.GRANTED:
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
            call = self.client.call(lambda seq: m.Commit(seq, tuple(commits)), even_away=True)
            if call is not None:
                self._commits.append(call)
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
        tracked, bad = loading.tracked, report.broken | report.stale
        if report.broken:
            hashes = b"".join(loading.hashes[i] for i in sorted(report.broken))
            self.client.notify(m.Drop(hashes))
        outcome, good = EndOutcome.USED, min(bad, default=len(loading.hashes))
        if bad:
            gone = self.requests.get(request_id) is not tracked  # aborted: the copy was cancelled
            outcome = EndOutcome.UNUSED if gone else EndOutcome.FAILED
        for tier, count in zip(loading.tiers[:good], loading.chunk_tokens, strict=False):
            tracked.loaded_tokens[tier] = tracked.loaded_tokens.get(tier, 0) + count
            self.stats.hit(tier, count)
        failed = outcome is EndOutcome.FAILED
        self.stats.load(report.load_ms / 1e3, beside=report.beside, failed=failed)
        tokens, rate = sum(loading.chunk_tokens[:good]), self._prefill_s_per_token
        self.client.notify(
            m.End(
                loading.lease,
                tuple(report.ranks),
                outcome,
                request=request_id,
                device_tokens=loading.local_tokens,
                loaded_tokens=tokens,
                load_ms=report.load_ms,
                saved_ms=None if rate is None else tokens * rate * 1e3 - report.load_ms,
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

    def finished(self, request: "Request", block_ids: list[int]) -> dict[str, Any] | None:
        """The request ends. Its staged chunks go on by themselves; its reservation ends here.

        Returns what its answer tells about kvkeep; None for a request that had no part in it.
        """
        tracked = self.requests.pop(request.request_id, None)
        if tracked is None:
            return None
        self.lookups.forget(tracked)
        if tracked.tainted:
            self._forget_locally(set(block_ids))
        return tracked.told() if tracked.asked or tracked.params.given else None

    # ---- 5. the operator's acts

    def reset(self) -> bool:
        """Nothing of before is found again: True once the server has confirmed it.

        False without a server too: what it keeps in L2 would be found when it is back.
        """
        for tracked in self.requests.values():
            self.lookups.forget(tracked)
            tracked.unstored = tracked.unstored or tracked.admitted
        for entry in self.staged.values():
            entry.failed = True  # computed before; its copy may still run
        try:
            reply = self.client.ask(m.Forget, RESET_WAIT_S)
        except (ServerAway, ProtocolError) as error:
            _log.warning("kvkeep: reset: not confirmed: %s", error)
            return False
        if isinstance(reply, m.Forgotten):
            if not reply.done:
                _log.warning("kvkeep: reset: L2 could not forget yet; see kvkeep status")
            return reply.done
        _log.warning("kvkeep: reset: the server refused: %s", getattr(reply, "text", reply))
        return False

    def take_stats(self) -> KVKeepStats | None:
        """The counts since the last call, or None."""
        if self.client.up != self._was_up:
            self._was_up = self.client.up
            self.stats.data["server_up"] = int(self._was_up)
        if self.stats.is_empty():
            return None
        taken = KVKeepStats(data=self.stats.data)
        self.stats.reset()
        return taken

    def _count_commits(self) -> None:
        while self._commits and self._commits[0].done:
            reply = self._commits.popleft().reply
            if isinstance(reply, m.Committed):
                self.stats.count("stored_chunks", reply.outcomes.count(CommitOutcome.COMMITTED))

    def retire(self) -> None:
        """Stop asking the server; what was dispatched is still reported by the workers."""
        # Not in this thread: closing may wait for a handshake that is under way.
        threading.Thread(target=self.client.close, name="kvkeep-retire", daemon=True).start()


_TRY_AGAIN = (
    StageOutcome.NO_ROOM,
    StageOutcome.OVER_CAP,
    StageOutcome.NOT_READY,
    StageOutcome.OVER_QUOTA,
)


def _unpack(packed: bytes) -> list[int]:
    return array("Q", packed).tolist()


def _handles(column: m.Columns) -> list[Handle]:
    return list(
        zip(
            _unpack(column.slots), _unpack(column.offsets), _unpack(column.generations), strict=True
        )
    )
