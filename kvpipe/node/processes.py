"""Processes and their pidfds: which process is at the other end of a socket, and when a process has exited."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Final

from kvpipe.errors import ConfigError
from kvpipe.node.layout import Process

_CREDENTIALS: Final = struct.Struct("3i")
_SO_PEERPIDFD: Final = 77
_STAT_START: Final = 19
"""The index of the start time in /proc/PID/stat, counted from after the program's name."""
SOCKET: Final = "holder.sock"
LOCK: Final = "holder.lock"
LOG: Final = "holder.log"
CLIENTS: Final = "clients.lock"
MEMORY: Final = "kvpipe-node"
"""The name of a memory's descriptors in /proc."""
_FLOCK: Final = struct.Struct("hhlli")
FOLDER_BYTES_MAX: Final = 100 - len("/" + SOCKET)
"""The longest path of the folder in bytes, because a Unix socket's path may have at most 107 bytes."""


def process_of(pid: int) -> Process:
    """Return the process with the number `pid`. Raises OSError if no process has this number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    return Process(pid, int(stat.rpartition(")")[2].split()[_STAT_START]))


def age_s(process: Process) -> float:
    """Return the time in seconds since a process has started."""
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK"))


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger, so that it runs no instruction."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in {"T", "t"}


def peer_of(wire: socket.socket) -> tuple[Process, int]:
    """Return the process at the other end of a socket, and its pidfd.

    Raises:
        ConfigError: the process belongs to another user, or to another PID namespace.
        OSError: the process has ended.

    """
    pid, uid, _ = _CREDENTIALS.unpack(wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise ConfigError(f"the process at the node's socket belongs to user {uid}, this one to user {os.geteuid()}")
    if pid <= 0:
        raise ConfigError("the process at the node's socket is in another PID namespace; let the containers share one")
    try:
        raw = wire.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        pidfd = int.from_bytes(raw, "little", signed=True)
    except OSError:  # before Linux 6.5
        pidfd = os.pidfd_open(pid)
    try:
        return process_of(pid), pidfd
    except OSError:
        os.close(pidfd)
        raise


def watch(process: Process) -> int | None:
    """Return a pidfd of a process from the tables, or None if the process has ended.

    Raises:
        OSError: the process may be alive, but this process has no descriptor left, for example.

    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    try:
        if process_of(process.pid) == process:
            return pidfd
    except ProcessLookupError:
        pass
    except OSError:
        os.close(pidfd)
        raise
    os.close(pidfd)
    return None


def kill(pidfd: int, limit_s: float) -> bool:
    """Kill a process and wait for its exit. Returns whether the process has exited within `limit_s` seconds."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


def lock_folder(folder: Path) -> int:
    """Become the only holder of a folder. Returns the descriptor of the lock, which is released when the process ends.

    The record lock tells other processes the holder's number (`holder_of`). The record lock is taken first, so that the
    number is known even if the holder is stopped between the two locks. The second lock keeps out another holder in the
    same process.

    Raises:
        BlockingIOError: the folder has a holder.
    """
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    return fd


def holder_of(folder: Path) -> int:
    """Return the process number of the folder's holder, or 0 if the folder has no holder.

    In the holder's own process the result is 0, because a process does not see its own lock.
    """
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        found = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(fd)
    kind, _, _, _, pid = _FLOCK.unpack(found)
    return 0 if kind == fcntl.F_UNLCK else pid


def mark_client(folder: Path) -> int:
    """Mark this process as one that has mapped the folder's memory.

    The mark lasts until the process ends or closes the returned descriptor.
    """
    fd = os.open(folder / CLIENTS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(BlockingIOError):  # a holder tests the lock at this moment
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def has_clients(folder: Path) -> bool:
    """Return whether a process that has mapped the folder's memory is alive.

    If such a process is alive, a new holder waits up to `adopt_s` seconds until the process sends its descriptor of
    that memory.
    """
    fd = os.open(folder / CLIENTS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def memory_of_clients(folder: Path) -> int | None:
    """Return a descriptor of the memory that processes with the folder's mark have, or None.

    An idle engine does not send its descriptor of the memory, but /proc shows the lock and the descriptors of every
    process. The result is None if /proc hides the descriptors, or if these processes have several memories. It is also
    None if one of these processes is in another PID namespace, because the memory names the engines' processes by their
    numbers in that namespace.
    """
    mark = (folder / CLIENTS).stat()
    return _memory_of(_locking(mark.st_ino) - {os.getpid()}, mark, namespace=_namespace_of("self"))


def memory_of_holder(folder: Path) -> int | None:
    """Return a descriptor of the memory of the folder's holder, or None if there is no holder or /proc hides it."""
    holder = holder_of(folder)
    return _memory_of({holder}, (folder / LOCK).stat()) if holder else None


def _namespace_of(process: int | str) -> int:
    """Return the inode number of a process's PID namespace."""
    return Path(f"/proc/{process}/ns/pid").stat().st_ino


def _memory_of(processes: set[int], mark: os.stat_result, *, namespace: int | None = None) -> int | None:
    """Return a descriptor of the only memory of those `processes` that have opened the file `mark`, or None.

    The result is also None if the search could not read every descriptor of these processes, or if one of them is not
    in the PID `namespace`.
    """
    found = dict[tuple[int, int], int]()
    try:
        is_whole = _search(processes, mark, found) or _search(processes, mark, found)
    except OSError:
        is_whole = False
    if is_whole and len(found) == 1 and namespace in {None, *(place for place, _ in found)}:
        return found.popitem()[1]
    for fd in found.values():
        os.close(fd)
    return None


def _search(processes: set[int], mark: os.stat_result, found: dict[tuple[int, int], int]) -> bool:
    """Add the memories of those `processes` that have opened the file `mark` to `found`.

    Each memory is named by the inode numbers of the process's PID namespace and of the memory.

    Returns False if a descriptor was closed during the search. A second search may then find another descriptor.
    """
    missed = 0
    for process in processes:
        try:
            paths = list(Path(f"/proc/{process}/fd").iterdir())
        except FileNotFoundError:  # the process has ended
            continue
        missed += len(paths)
        is_marked, memories = False, list[Path]()
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                to = str(path.readlink())
                if to.endswith(".lock"):  # the file of another file system may have the same inode number
                    is_marked |= os.path.samestat(path.stat(), mark)
                elif to.startswith(f"/memfd:{MEMORY}"):
                    memories.append(path)
                missed -= 1
        for path in memories if is_marked else ():
            missed += 1
            with contextlib.suppress(FileNotFoundError):
                namespace = _namespace_of(process)
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if found.setdefault((namespace, os.fstat(fd).st_ino), fd) != fd:
                    os.close(fd)
                missed -= 1
    return not missed


def _locking(inode: int) -> set[int]:
    """Return the processes that have locked a file with this inode number."""
    try:
        locks = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    fields = (line.split() for line in locks if "->" not in line)  # such a line is of a process that waits
    return {int(pid) for _, _, _, _, pid, place, *_ in fields if place.endswith(f":{inode}")}


def short_folder(folder: Path) -> Path:
    """Return `folder`. Raises ValueError if the folder's path is too long for the node's socket."""
    if len(os.fsencode(folder)) > FOLDER_BYTES_MAX:
        raise ValueError(f"expected a path of at most {FOLDER_BYTES_MAX} bytes, because it contains a socket")
    return folder


def checked_folder(folder: Path) -> Path:
    """Return the folder of the node's socket, which only this user may enter. Creates the folder if it does not exist.

    Raises:
        ConfigError: the folder belongs to another user, is open to others, or has a path that is too long.
    """
    try:
        short_folder(folder)
    except ValueError as error:
        raise ConfigError(f"the node's folder is {folder}: {error}; set pool_dir to a shorter path") from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = folder.lstat()
    if stat.st_uid != os.geteuid() or stat.st_mode & 0o077 or not folder.is_dir() or folder.is_symlink():
        raise ConfigError(f"the node's folder {folder} must be this user's alone: chown and chmod 700 it, or remove it")
    return folder


def folder_of_user() -> Path:
    """Return the folder in which this user's engines find each other."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "kvpipe") if runtime else Path(f"/tmp/kvpipe-{os.geteuid()}")  # noqa: S108  (checked_folder)
