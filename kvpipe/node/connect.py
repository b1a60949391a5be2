"""Finds the holder of a node's memory, or starts a holder.

These functions wait, so an engine never calls them on its own thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import kvpipe
from kvpipe.errors import ConfigError
from kvpipe.node import messages
from kvpipe.node.layout import VERSION
from kvpipe.node.messages import BadMessageError, Hello, NodeStatus, StatusQuestion, Unwelcome, Welcome
from kvpipe.node.processes import LOG, SOCKET, checked_folder, holder_of, is_stopped, kill, peer_of
from kvpipe.statemachine.core import Machine
from kvpipe.statemachine.node_client import NODE_CLIENT
from kvpipe.statemachine.node_slot import NODE_SLOT

LOOK_S: Final = 0.01
ADOPT_S: Final = 10.0
START_S: Final = 5.0
STARTING: Final = "starting.lock"
STARTED_LOOKS: Final = 100
KEEP_S: Final = 60.0

for _table in (NODE_CLIENT, NODE_SLOT):
    Machine.of(_table)  # the holder does not validate its tables, because it starts without pydantic


class RefusedByHolderError(ConfigError):
    """The holder has refused this engine permanently."""


class NoHolderError(ConfigError):
    """No holder has accepted this process in time."""


class Reached(NamedTuple):
    """A connection to a holder. `fd` is the memory's descriptor."""

    wire: socket.socket
    welcome: Welcome
    fd: int

    def close(self) -> None:
        """Close all descriptors."""
        self.wire.close()
        os.close(self.fd)


def greet(folder: Path, hello: Hello, offer: int | None, answer_s: float) -> Reached | str:
    """Connect to the folder's holder and greet the holder. Returns the reason for a refusal if a retry may succeed.

    `offer` is the memory that this process has. `answer_s` is the longest wait for an answer.

    Raises:
        RefusedByHolderError: the holder has refused this process permanently.
        ConfigError: the socket belongs to another user.
    """
    with contextlib.ExitStack() as opened:
        wire = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC))
        wire.settimeout(answer_s)
        try:
            wire.connect(str(folder / SOCKET))
            os.close(peer_of(wire)[1])
            messages.send(wire, hello, [] if offer is None else [offer])
            answer, fd = messages.receive_by_engine(wire)
        except BadMessageError as error:
            raise RefusedByHolderError(str(error)) from None
        except OSError:
            return "no answer"
        if isinstance(answer, Unwelcome):
            if not answer.again:
                raise RefusedByHolderError(answer.why)
            return answer.why
        if not isinstance(answer, Welcome) or fd is None:
            return "no answer"
        wire.setblocking(False)  # noqa: FBT003
        opened.pop_all()
        return Reached(wire, answer, fd)


def ask_status(folder: Path, answer_s: float = 2.0) -> NodeStatus | None:
    """Return how the folder's memory is used, or None if no holder answers within `answer_s` seconds.

    Raises:
        ConfigError: the socket belongs to another user, or the holder has another version.

    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as wire:
        wire.settimeout(answer_s)
        try:
            wire.connect(str(folder / SOCKET))
            os.close(peer_of(wire)[1])
            messages.send(wire, StatusQuestion(VERSION))
            answer, _ = messages.receive_by_engine(wire)
        except BadMessageError as error:
            raise ConfigError(f"the node's holder has another version than {VERSION}: {error}") from None
        except OSError:
            return None
    return answer if isinstance(answer, NodeStatus) else None


def start_holder(folder: Path, offer: int | None, *, limit_s: float, keep_s: float = KEEP_S) -> None:
    """Start a holder in the background. `offer` is the memory of an earlier holder.

    One engine starts a holder, and all other engines wait for this start. The wait is at most `START_S` seconds. If the
    starting engine is stopped, no engine waits. If several holders start, one holder stays, and all other holders exit.
    """
    until = time.monotonic() + limit_s
    with _turn_to_start(folder, min(START_S, limit_s)):
        if not holder_of(folder):
            _start_holder(folder, offer, max(1.0, until - time.monotonic()), keep_s)


@contextlib.contextmanager
def _turn_to_start(folder: Path, wait_s: float) -> Iterator[None]:
    """Wait until this engine may start a holder, or until a holder exists. A start occupies a core for 0.2 s."""
    fd = os.open(folder / STARTING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + wait_s
    try:
        while time.monotonic() < until and not holder_of(folder):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if is_stopped(int.from_bytes(os.pread(fd, 4, 0))):
                    break
                time.sleep(LOOK_S)
            else:
                os.pwrite(fd, os.getpid().to_bytes(4), 0)
                break
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
        os.close(fd)


def _start_holder(folder: Path, offer: int | None, limit_s: float, keep_s: float) -> None:
    root = str(Path(kvpipe.__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    arguments = [str(folder.resolve()), str(ADOPT_S), str(keep_s), *([] if offer is None else [str(offer)])]
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(subprocess.TimeoutExpired), os.fdopen(log, "ab") as errors:
        subprocess.run(  # noqa: S603
            [sys.executable, "-P", "-m", "kvpipe.node.holder", *arguments],
            check=False, timeout=limit_s, start_new_session=True, cwd="/",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, pass_fds=[] if offer is None else [offer],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
    for _ in range(STARTED_LOOKS):
        if holder_of(folder):
            return
        time.sleep(LOOK_S)


class Silence:
    """Detects a holder whose clock stands still, because the holder is stopped or hangs."""

    def __init__(self, folder: Path, beat: Callable[[], int], silent_s: float) -> None:
        """Watch the holder's clock, which `beat` returns. The clock may stand still for `silent_s` seconds."""
        self._folder, self._beat, self._silent_s = folder, beat, silent_s
        self._holder, self._seen, self._since_s = 0, -1, 0.0

    def end_holder(self) -> None:
        """Kill the folder's holder if the holder's clock has stood still for too long. The caller repeats this call."""
        holder, beat, now = holder_of(self._folder), self._beat(), time.monotonic()
        if not holder or (holder, beat) != (self._holder, self._seen):
            self._holder, self._seen, self._since_s = holder, beat, now
        elif now - self._since_s > self._silent_s:
            try:
                pidfd = os.pidfd_open(holder)
            except OSError:
                return
            if holder_of(self._folder) == holder:
                kill(pidfd, self._silent_s)
            os.close(pidfd)


def reach(
    folder: Path, hello: Hello, *, offer: int | None = None, beat: Callable[[], int] | None = None, wait_s: float,
    answer_s: float, keep_s: float = KEEP_S,
) -> Reached:  # fmt: skip
    """Connect to the folder's holder. If the folder has no holder, start a holder. Waits at most `wait_s` seconds.

    A process that has mapped the memory can `offer` the memory to another holder. Such a process kills a holder whose
    `beat` stands still.

    Raises:
        RefusedByHolderError: the holder has refused this process permanently.
        NoHolderError: no holder has accepted this process in time. The message has the last reason.
        ConfigError: the folder or the socket cannot be used.
    """
    checked_folder(folder)
    deadline = time.monotonic() + wait_s
    silence = None if beat is None else Silence(folder, beat, answer_s)
    while True:
        reached = greet(folder, hello, offer, min(answer_s, wait_s))
        if isinstance(reached, Reached):
            return reached
        if time.monotonic() >= deadline:
            raise NoHolderError(
                f"no holder of the node's memory accepts this process within {wait_s} s (last reason: {reached}; see "
                f"{folder / LOG})"
            )
        if silence is not None:
            silence.end_holder()
        if holder_of(folder):
            time.sleep(LOOK_S)
        else:
            start_holder(folder, offer, limit_s=max(1.0, deadline - time.monotonic()), keep_s=keep_s)
