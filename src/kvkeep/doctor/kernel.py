"""Kernel features, each one tried.

Nothing is inferred from a version number: containers and sandboxes refuse calls that the kernel
has, and distributions carry features back into older kernels.
"""

import errno
import fcntl
import mmap
import os
import platform
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.doctor.check import Check, Status

SO_PEERPIDFD = 77  # Linux 6.5; Python 3.11 has no name for it
F_ADD_SEALS = 1033
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
MADV_DONTFORK, MADV_POPULATE_WRITE = 10, 23


def check_kernel() -> Check:
    """kvkeep is for Linux; the features are tried one by one in `check_features`."""
    system, release = platform.system(), platform.release()
    if system != "Linux":
        return Check("kernel", Status.FAIL, f"{system} {release}", "run kvkeep on Linux")
    return Check("kernel", Status.OK, f"Linux {release} on {platform.machine()}")


@dataclass(frozen=True, slots=True)
class Feature:
    """A kernel feature, how to try it, and what its absence costs."""

    name: str
    probe: Callable[[], None]  # raises OSError or ValueError if the feature is not there
    if_absent: Status
    cost: str
    fix: str


def kernel_features() -> tuple[Feature, ...]:
    """Every kernel feature kvkeep uses."""
    return (
        Feature(
            "memfd_create with seals",
            lambda: _probe_seals(SEAL_SHRINK | SEAL_GROW | SEAL_SEAL),
            Status.FAIL,
            "the server cannot make its memory",
            "use Linux 3.17 or newer and a sandbox that allows memfd_create",
        ),
        Feature(
            "F_SEAL_FUTURE_WRITE",
            lambda: _probe_seals(SEAL_FUTURE_WRITE),
            Status.WARN,
            "a second lock on read-only mappings is missing",
            "use Linux 5.1 or newer",
        ),
        Feature(
            "pidfd_open",
            _probe_pidfd_open,
            Status.WARN,
            "a client cannot prove its own life where SO_PEERPIDFD is missing too",
            "use Linux 5.3 or newer and a sandbox that allows pidfd_open",
        ),
        Feature(
            "SO_PEERPIDFD",
            _probe_peer_pidfd,
            Status.WARN,
            "clients have to send a pidfd of their own",
            "use Linux 6.5 or newer",
        ),
        Feature(
            "MADV_POPULATE_WRITE",
            lambda: _probe_madvise(MADV_POPULATE_WRITE),
            Status.WARN,
            "populating the arena is slower",
            "use Linux 5.14 or newer",
        ),
        Feature(
            "MADV_DONTFORK",
            lambda: _probe_madvise(MADV_DONTFORK),
            Status.FAIL,
            "a forked child of an engine could write into the arena",
            "use a kernel or sandbox that has it",
        ),
    )


def check_features(features: Sequence[Feature] | None = None) -> list[Check]:
    """Try each feature; without both kinds of pidfd no client may write, which fails."""
    checks = [_try_feature(each) for each in (kernel_features() if features is None else features)]
    absent = {check.name for check in checks if check.status is not Status.OK}
    if {"pidfd_open", "SO_PEERPIDFD"} <= absent:
        checks.append(
            Check(
                "peer identity",
                Status.FAIL,
                "no pidfd of either kind: the server gives out no memory for writing",
                "use Linux 5.3 or newer and a sandbox that allows pidfd_open",
            )
        )
    return checks


def _try_feature(feature: Feature) -> Check:
    try:
        feature.probe()
    except (OSError, ValueError) as error:
        detail = f"not available ({error}): {feature.cost}"
        return Check(feature.name, feature.if_absent, detail, feature.fix)
    return Check(feature.name, Status.OK, "works")


def _probe_seals(seals: int) -> None:
    fd = os.memfd_create("kvkeep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
        if seals & SEAL_SHRINK:
            _expect_refused(fd)
    finally:
        os.close(fd)


def _expect_refused(fd: int) -> None:
    """A seal that is accepted and does nothing would be worse than none."""
    try:
        os.ftruncate(fd, 0)
    except PermissionError:
        return
    raise OSError(errno.ENOSYS, "the seals do not hold")


def _probe_pidfd_open() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _probe_peer_pidfd() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        (fd,) = struct.unpack("i", ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))
        os.close(fd)


def _probe_madvise(advice: int) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page.madvise(advice)
