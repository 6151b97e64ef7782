"""The control socket and the HTTP port: free, ours, closed to others, or served already.

Whoever may write in the socket's directory, or serves the socket, hands KV to every engine that
connects, so another user there is a failure unless `socket.group` says that it is meant.
"""

import errno
import fcntl
import grp
import os
import pwd
import shlex
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from kvkeep.config import HttpConfig, SocketConfig, socket_path_problem
from kvkeep.doctor.check import Check, Status
from kvkeep.doctor.served import Reply, find_served
from kvkeep.errors import ConfigError
from kvkeep.server.endpoint import unsafe
from kvkeep.server.http import read_token

_LOCAL_HOST = "set http.host to 127.0.0.1"


def check_directory(config: SocketConfig) -> Check:
    """The socket's directory: there or makeable, ours, closed to others, and writable."""
    name, path = "socket directory", config.path
    problem = socket_path_problem(path)
    if problem is not None:
        return Check(name, Status.FAIL, f"socket.path = {path!r}: {problem}", "change socket.path")
    folder = Path(path).parent
    try:
        info = folder.stat()
    except FileNotFoundError:
        return _check_makeable(name, folder)
    except NotADirectoryError:
        return _not_a_directory(name, folder)
    except OSError as error:
        fix = "run as the user that owns it, or choose another socket.path"
        return Check(name, Status.FAIL, f"{folder} cannot be read ({error.strerror})", fix)
    if not stat.S_ISDIR(info.st_mode):
        return _not_a_directory(name, folder)
    if folder.is_symlink():
        detail = f"{folder} is a link to {os.readlink(folder)}, and the server refuses links"
        return Check(name, Status.FAIL, detail, "name the directory itself in socket.path")
    return _check_rights(name, folder, info, config.group)


def _not_a_directory(name: str, folder: Path) -> Check:
    """Name the file that stands where a directory should be."""
    places = (folder, *folder.parents)
    file = next((each for each in places if os.path.lexists(each) and not each.is_dir()), folder)
    fix = f"remove or rename {file}, or choose another socket.path"
    return Check(name, Status.FAIL, f"{file} is a file, not a directory", fix)


def _check_makeable(name: str, folder: Path) -> Check:
    if folder.is_symlink():
        detail = f"{folder} is a link to {os.readlink(folder)}, which does not exist"
        return Check(name, Status.FAIL, detail, f"remove the link {folder}")
    parent = next(place for place in folder.parents if place.exists())
    if _may_write(parent):
        return Check(name, Status.OK, f"{folder} is made by `kvkeep serve`")
    detail = f"{folder} does not exist and {_user(os.geteuid())} may not write in {parent}"
    fix = (
        f"sudo install -d -m 0700 -o {_user(os.geteuid())} {shlex.quote(str(folder))}, "
        "or set XDG_RUNTIME_DIR or socket.path"
    )
    return Check(name, Status.FAIL, detail, fix)


def _check_rights(name: str, folder: Path, info: os.stat_result, group: str) -> Check:
    """0700 is the mode wanted; 0750 where a group may connect."""
    mode, place = stat.S_IMODE(info.st_mode), shlex.quote(str(folder))
    shown = f"{folder} (owner {_user(info.st_uid)}, mode {mode:04o})"
    gid = _group_id(group) if group else None
    if group and gid is None:
        fix = "create it or correct socket.group"
        return Check(name, Status.FAIL, f"socket.group = {group!r} is no group here", fix)
    is_mine = info.st_uid == os.geteuid()
    if not is_mine and not _shared_with_me(group):
        fix = f"run as {_user(info.st_uid)}, or choose a socket.path in a directory of your own"
        return Check(name, Status.FAIL, f"{shown} belongs to another user", fix)
    if mode & stat.S_ISVTX and mode & 0o022:  # /tmp and its like must stay as they are
        fix = f"choose a directory of its own, such as {folder}/kvkeep/kvkeep.sock"
        return Check(name, Status.FAIL, f"{shown} is shared by all users", fix)
    wanted = 0o750 if group else 0o700
    fix = f"chmod {wanted:o} {place}"
    if mode & 0o022:
        return Check(name, Status.FAIL, f"{shown} lets others replace the socket", fix)
    problem = unsafe(folder)
    if problem is not None:
        return Check(name, Status.FAIL, *problem)
    if is_mine and not _may_write(folder):
        return Check(name, Status.FAIL, f"{shown} is not writable", fix)
    if group and (info.st_gid != gid or not mode & stat.S_IXGRP):
        detail = f"{shown} cannot be entered by the group {group} of socket.group"
        return Check(name, Status.WARN, detail, f"chgrp {shlex.quote(group)} {place} && {fix}")
    if mode & 0o777 & ~wanted:
        return Check(name, Status.WARN, f"{shown} is open to others", fix)
    return Check(name, Status.OK, shown)


def check_socket(config: SocketConfig) -> Check:
    """Who, if anybody, is behind the socket."""
    name, path = "socket", config.path
    if socket_path_problem(path) is not None:
        return Check(name, Status.FAIL, f"{path!r} cannot be a socket", "change socket.path")
    try:
        info = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return _check_lock(name, path)
    except OSError as error:
        fix = "run as the server's user, or have socket.group name a group of yours"
        return Check(name, Status.FAIL, f"{path} cannot be reached ({error.strerror})", fix)
    owner = _user(info.st_uid)
    if not stat.S_ISSOCK(info.st_mode):
        fix = f"remove or rename {shlex.quote(path)}, or choose another socket.path"
        return Check(name, Status.FAIL, f"{path} is no socket (owner {owner})", fix)
    if info.st_uid != os.geteuid() and not _shared_with_me(config.group):
        fix = f"run as {owner}, or choose another socket.path"
        return Check(name, Status.FAIL, f"{path} belongs to another user, {owner}", fix)
    return _check_listener(name, path, config.group)


def _check_listener(name: str, path: str, group: str) -> Check:
    served = find_served(path)
    by = f"{path} is served by process {served.pid}"
    # The file's owner is not always the one who listens: root can bind for others.
    if served.pid and served.uid not in (os.geteuid(), 0) and not _shared_with_me(group):
        fix = f"run as {_user(served.uid)}, or choose another socket.path"
        detail = f"{path} is served by another user, {_user(served.uid)}"
        return Check(name, Status.FAIL, detail, fix)
    match served.answer:
        case Reply.NOBODY:
            detail = f"{path} is left over; nobody serves it and `kvkeep serve` replaces it"
            return Check(name, Status.OK, detail)
        case Reply.FULL:
            fix = "look at that server: it is stopped or overloaded"
            return Check(name, Status.WARN, f"{path} is served, but does not accept", fix)
        case Reply.UNREACHABLE:
            fix = "run as the server's user, or have socket.group name a group of yours"
            return Check(name, Status.FAIL, f"cannot connect to {path} ({served.why})", fix)
        case Reply.SILENT:
            fix = f"look at process {served.pid}: it is stopped, overloaded or no kvkeep server"
            return Check(name, Status.WARN, f"{by} but does not answer: {served.why}", fix)
    detail = f"{by} of {_user(served.uid)}; a second server cannot start"
    return Check(name, Status.OK, detail)


def _check_lock(name: str, path: str) -> Check:
    """Without a socket file a server may still run: somebody removed the file under it."""
    holder = _lock_holder(f"{path}.lock")
    if holder is None or os.path.lexists(path):  # there by now: a server has just started
        return Check(name, Status.OK, f"{path} is free; no server is running there")
    detail = f"process {holder} holds {path} but its socket file is gone: restart it"
    return Check(name, Status.FAIL, detail, f"kill {holder}, then `kvkeep serve` again")


def _lock_holder(lock_path: str) -> str | None:
    """The process that `kvkeep serve` named in its lock, while the lock is held."""
    try:
        lock = os.open(lock_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.read(lock, 32).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(lock)
    return None


def is_somebody_serving(path: str) -> bool:
    """True if a process accepts connections at `path`."""
    if socket_path_problem(path) is not None:
        return False
    return find_served(path).answer not in (Reply.NOBODY, Reply.UNREACHABLE)


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def _shared_with_me(group: str) -> bool:
    """A group may connect and this user is in it: the server is another user's on purpose."""
    gid = _group_id(group) if group else None
    if gid is None:
        return False
    return os.geteuid() == 0 or gid in (os.getegid(), *os.getgroups())


def _group_id(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return int(group) if group.isascii() and group.isdigit() else None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # containers run with ids that have no name
        return f"uid {uid}"


def check_http(config: HttpConfig, *, is_serving: Callable[[], bool]) -> Check:
    """Whether the port is free; a running server explains one that is taken."""
    name, place = "HTTP", f"{config.host}:{config.port}"
    if not config.enabled:
        return Check(name, Status.OK, "off (http.enabled = false)")
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
            server.listen(1)
    except UnicodeError:  # a label of the name is empty or too long
        return Check(name, Status.FAIL, f"{place} is no host name", _LOCAL_HOST)
    except OSError as error:
        return _http_problem(name, place, error, is_serving=is_serving)
    if not _is_loopback(str(address[0])):
        detail = f"{place} is open to the network, and readers are not asked who they are"
        fix = "set http.host to 127.0.0.1"
        if not config.remote:
            return Check(name, Status.FAIL, detail, f"{fix}, or http.remote to true if it is meant")
        return Check(name, Status.WARN, detail, f"{fix}, or close the port to what is not trusted")
    try:
        read_token(config)
    except ConfigError as error:
        detail, _, fix = str(error).partition(": ")
        return Check(name, Status.FAIL, detail, fix)
    return Check(name, Status.OK, f"{place} is free")


def _http_problem(
    name: str, place: str, error: OSError, *, is_serving: Callable[[], bool]
) -> Check:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        detail = f"{place} is no address of this machine ({error.strerror})"
        return Check(name, Status.FAIL, detail, _LOCAL_HOST)
    if error.errno != errno.EADDRINUSE:
        detail = f"{place} cannot be opened ({error.strerror})"
        return Check(name, Status.FAIL, detail, "set http.port to a free port above 1023")
    if is_serving():
        return Check(name, Status.OK, f"{place} is in use, and a server is running at the socket")
    fix = "set http.port to another port (0: any free one), or http.enabled to false"
    return Check(name, Status.FAIL, f"{place} is used by another program", fix)


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
