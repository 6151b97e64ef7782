"""Descriptors and processes: what a peer sends arrives closed-on-exec, and whose process it is."""

import gc
import os
import select
import socket
import subprocess
import sys

from kvkeep import shm


def test_descriptors_arrive_and_are_closed_on_exec() -> None:
    left, right = socket.socketpair()
    read_end, write_end = os.pipe()
    with left, right:
        socket.send_fds(left, [b"hello"], [read_end, write_end])
        data, fds = shm.receive_with_fds(right, 100)
    assert data == b"hello"
    assert len(fds) == 2
    assert not any(map(os.get_inheritable, fds))
    os.write(fds[1], b"x")
    assert os.read(fds[0], 1) == b"x"
    for fd in (*fds, read_end, write_end):
        os.close(fd)


def test_descriptors_beyond_the_bound_are_not_taken() -> None:
    left, right = socket.socketpair()
    with left, right:
        gc.collect()  # what other tests left is not counted
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(left, [b"x"], [0] * 40)
        _, fds = shm.receive_with_fds(right, 100, most=4)
        assert len(fds) <= 4
        assert len(os.listdir("/proc/self/fd")) == before + len(fds)
        for fd in fds:
            os.close(fd)


def test_a_pidfd_names_its_process_and_tells_its_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    try:
        assert shm.pid_of(pidfd) == child.pid
        assert not select.select([pidfd], [], [], 0)[0]
        child.kill()
        assert select.select([pidfd], [], [], 10)[0]
        child.wait(10)
    finally:
        os.close(pidfd)
        assert child.stdin is not None
        child.stdin.close()


def test_another_descriptor_is_no_process() -> None:
    read_end, write_end = os.pipe()
    try:
        assert shm.pid_of(read_end) is None
        assert shm.pid_of(10_000) is None
    finally:
        os.close(read_end)
        os.close(write_end)


def test_the_peer_of_a_socket_is_this_process() -> None:
    left, right = socket.socketpair()
    with left, right:
        pidfd = shm.peer_pidfd(left)
        kernel = tuple(map(int, os.uname().release.split(".")[:2]))
        assert (pidfd is not None) == (kernel >= (6, 5))
        if pidfd is not None:
            assert shm.pid_of(pidfd) == os.getpid()
            os.close(pidfd)
