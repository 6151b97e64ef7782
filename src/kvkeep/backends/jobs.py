"""Work on payloads, such as a checksum: at once when it is little, else in threads.

A job gives a few bytes for one object. Jobs that are small go to a thread together, so that a hand
over costs less than the work.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

Job = Callable[[], bytes]
Batch = Callable[[], list[bytes]]
Offload = Callable[[Batch], Awaitable[list[bytes]]]
Sized = tuple[int, Job]  # how many bytes it works on


async def done(jobs: Sequence[Sized], *, inline_bytes: int, offload: Offload) -> list[bytes]:
    """What each job gives, in order; up to `inline_bytes` of work is done at once."""
    if sum(size_bytes for size_bytes, _ in jobs) <= inline_bytes:
        return [job() for _, job in jobs]
    results = await asyncio.gather(
        *(offload(partial(_all, part)) for part in _parts(jobs, inline_bytes))
    )
    return [result for part in results for result in part]


async def in_thread(batch: Batch) -> list[bytes]:
    """The default: one of the loop's own threads."""
    return await asyncio.get_running_loop().run_in_executor(None, batch)


def _all(jobs: Sequence[Job]) -> list[bytes]:
    return [job() for job in jobs]


def _parts(jobs: Sequence[Sized], least_bytes: int) -> Iterator[list[Job]]:
    """The jobs in order, in parts that are worth a thread of their own."""
    part: list[Job] = []
    size_bytes = 0
    for job_bytes, job in jobs:
        part.append(job)
        size_bytes += job_bytes
        if size_bytes >= least_bytes:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part
