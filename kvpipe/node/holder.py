"""The holder's process: it keeps a node's memory, answers engines, and watches their processes.

`python -m kvpipe.node.holder FOLDER ADOPT_S KEEP_S [FD]` forks twice, so that the holder is no descendant of the engine
that starts it. FD is the memory of an earlier holder.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Final

from kvpipe.errors import ConfigError
from kvpipe.node import messages
from kvpipe.node.clients import NodeClient, RefusedError
from kvpipe.node.keeper import Keeper
from kvpipe.node.layout import VERSION, Process
from kvpipe.node.listener import Listener
from kvpipe.node.memory import NodeMemory, Region
from kvpipe.node.messages import (
    BadMessageError,
    Goodbye,
    Hello,
    NodeStatus,
    SlotBatch,
    StatusQuestion,
    Unwelcome,
    Welcome,
)
from kvpipe.node.processes import (
    LOG,
    SOCKET,
    checked_folder,
    has_clients,
    lock_folder,
    memory_of_clients,
    peer_of,
    watch,
)
from kvpipe.node.rules import DEFAULT_POLICY, NodeRules, check_policy, write_rules
from kvpipe.node.segment import create
from kvpipe.statemachine.cursors import IllegalTransition

BEAT_S: Final = 0.25
"""The longest interval, in seconds, at which the holder advances its clock."""
SEARCH_S: Final = 1.0
"""The shortest interval, in seconds, at which the holder searches for the memory of idle engines."""
BUSY_S: Final = 0.02
"""The holder's longest wait, in seconds, while slots have no memory yet, or evicted slots still have leases."""
SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""The errors after which the holder tries again to watch a process."""
_log = logging.getLogger("kvpipe.node")


class HolderConnection:
    """The connection to one process of an engine."""

    def __init__(self, wire: socket.socket, process: Process) -> None:
        """Create a connection. `client` and its `keeper` are None until the holder has accepted the process."""
        self.wire, self.process = wire, process
        self.client: NodeClient | None = None
        self.keeper: Keeper | None = None


class Holder:
    """The holder of one folder. `run` returns when no engine has used the memory for `keep_s` seconds."""

    def __init__(self, folder: Path, *, adopt_s: float, keep_s: float, fd: int | None = None, policy: str = "") -> None:
        """Take the folder's lock and listen on the folder's socket.

        If running engines have the memory of an earlier holder, this holder waits up to `adopt_s` seconds for an engine
        to offer that memory. Without an offer, this holder creates a new memory. `fd` is the earlier holder's memory,
        if this memory is known. `policy` is the eviction policy of a new memory. If it is "", the engine that makes the
        memory chooses the policy.

        Raises:
            BlockingIOError: the folder has a holder.
        """
        self._folder, self._adopt_s, self._keep_s, self._policy = checked_folder(folder), adopt_s, keep_s, policy
        self._lock = lock_folder(folder)
        self._selector = selectors.DefaultSelector()
        self._memory: NodeMemory | None = None
        self._began = self._idle_since = time.monotonic()
        self._boot = secrets.randbits(63) | 1
        self._watched: dict[Process, int] = {}
        self._unwatched = set[Process]()
        self._searched_s = self._began - SEARCH_S
        self._links: dict[NodeClient, HolderConnection] = {}
        if fd is not None:
            self._adopt(fd)
        self._listener = Listener(folder / SOCKET, self._selector, BEAT_S, self._accepted)

    def _adopt(self, fd: int) -> None:
        """Become the holder of an existing memory.

        Raises:
            RefusedError: the memory is not usable, or has another holder.
        """
        self._memory = NodeMemory(fd, self._boot)
        for process in {process for _, client in self._memory.clients for process in client.processes}:
            self._watch(process)

    def _watch(self, process: Process, *, refuses: bool = False) -> None:
        """Notice the end of a process. If that is not possible yet, each step tries again.

        Raises:
            RefusedError: if `refuses`: the process cannot be watched, and not because a resource is exhausted.
        """
        assert self._memory is not None  # noqa: S101
        if process in self._watched:
            return
        try:
            pidfd = watch(process)
        except OSError as error:
            if refuses and error.errno not in SHORTAGES:
                raise RefusedError(f"process {process.pid} cannot be watched: {error}") from None
            if process not in self._unwatched:
                _log.warning("process %d is not watched yet: %s", process.pid, error)
            self._unwatched.add(process)
            return
        self._unwatched.discard(process)
        if pidfd is None:
            self._memory.died(process)
        else:
            self._watched[process] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._fired(process))

    def _fired(self, process: Process) -> None:
        pidfd = self._watched.pop(process)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        assert self._memory is not None  # noqa: S101
        self._memory.died(process)

    def status(self) -> NodeStatus:
        """Return how the memory is used, for operators."""
        return NodeStatus(os.getpid()) if self._memory is None else self._memory.status()

    def run(self) -> None:
        """Answer engines until the memory is unused."""
        while not self._is_unused():
            self.step()
        with contextlib.suppress(FileNotFoundError):
            (self._folder / SOCKET).unlink()

    def end(self) -> None:
        """Make `run` return after the current step. The engines keep the memory."""
        self._keep_s = -1.0

    def close(self) -> None:
        """Close every descriptor, for a holder that runs inside another process."""
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        self._listener.close()
        if self._memory is not None:
            self._memory.close()
        os.close(self._lock)

    @property
    def _has_engines(self) -> bool:
        return self._memory is not None and any(True for _ in self._memory.clients)

    def _is_unused(self) -> bool:
        now = time.monotonic()
        if self._has_engines:
            self._idle_since = now
        return now - self._idle_since > self._keep_s

    def step(self) -> None:
        """Handle the events that have arrived, at most one event per source."""
        for process in list(self._unwatched):
            self._watch(process)
        self._listener.step()
        wait_s = BUSY_S if self._memory is not None and self._memory.step() else BEAT_S
        for key, _ in self._selector.select(wait_s):
            if self._selector.get_map().get(key.fd) is key:  # false if an earlier call has closed the source
                key.data()

    def _accepted(self, wire: socket.socket) -> None:
        try:
            process, pidfd = peer_of(wire)
        except (ConfigError, OSError) as error:
            with contextlib.suppress(OSError):
                messages.send(wire, Unwelcome(str(error), again=isinstance(error, OSError)))
            wire.close()
            return
        os.close(pidfd)
        link = HolderConnection(wire, process)
        self._selector.register(wire, selectors.EVENT_READ, lambda: self._receive(link))

    def _receive(self, link: HolderConnection) -> None:
        try:
            message, fd = messages.receive_by_holder(link.wire)
        except BlockingIOError:
            return
        except BadMessageError as error:
            self._refuse(link, RefusedError(f"not a message of version {VERSION}: {error}"))
            return
        except OSError:
            self._drop(link)
            return
        try:
            self._handle(link, message, fd)
        except RefusedError as error:
            self._refuse(link, error)
        except (IllegalTransition, OSError) as error:
            _log.warning("connection of process %d ends: %s", link.process.pid, error)
            self._drop(link)

    def _handle(self, link: HolderConnection, message: messages.ToHolder, fd: int | None) -> None:
        if isinstance(message, Hello):
            self._greet(link, message, fd)
        elif isinstance(message, StatusQuestion):
            messages.send(link.wire, self.status())
        elif link.client is None or message.boot != self._boot or link.keeper is None:
            self._drop(link)
        elif isinstance(message, SlotBatch):
            answer = link.keeper.batch(link.client, message)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the engine may have left already
                messages.send(link.wire, answer)
        elif isinstance(message, Goodbye):
            link.keeper.left(link.client, link.process)
            self._drop(link)

    def _greet(self, link: HolderConnection, hello: Hello, fd: int | None) -> None:
        if hello.version != VERSION:
            self._close_fd(fd)
            if not self._has_engines:
                self.end()  # no engine uses this holder, so a holder of the other version may replace it
            raise RefusedError(f"the node's holder has version {VERSION}, this engine has {hello.version}", again=True)
        if self._memory is None:
            self._begin(hello, fd)
        else:
            self._close_fd(fd)
        self._watch(link.process, refuses=True)
        self._agree(hello.policy)
        memory, region = self._region_for(hello)
        segment, keeper = region
        client = memory.greet(region, hello, link.process)
        self._watch(link.process)  # again, because this client was not there if the process had ended
        link.client, link.keeper = client, keeper
        if hello.role == "scheduler":
            self._links[client] = link
        welcome = Welcome(
            self._boot, client.row, client.namespace, tuple(client.granted.items()), segment.layout.region,
            memory.policy, keeper.evictor.takes_hints,
        )  # fmt: skip
        messages.send(link.wire, welcome, [memory.fd])

    def _agree(self, policy: str) -> None:
        """Check that an engine accepts the memory's policy. A memory without engines gets the holder's or engine's.

        Raises:
            RefusedError: the engine requires another policy.
        """
        assert self._memory is not None  # noqa: S101
        memory, wanted = self._memory, self._policy or policy
        if wanted not in {"", memory.policy} and not self._has_engines:
            check_policy(wanted)
            _log.info("the unused memory evicts by %s from now on", wanted)
            memory.use_policy(wanted)
        if policy not in {"", memory.policy}:
            how = "start the holder with it" if self._policy else "stop all engines of the memory"
            raise RefusedError(
                f"the node's memory evicts by the policy {memory.policy!r}, this engine needs {policy!r}; unset its "
                f"policy, or {how}"
            )

    def _region_for(self, hello: Hello) -> tuple[NodeMemory, Region]:
        """Return the memory that has slots of the size that an engine needs, and the region of these slots.

        If the present memory cannot have slots of that size, and no engine uses the present memory, a new memory is
        created.
        """
        assert self._memory is not None  # noqa: S101
        try:
            return self._memory, self._memory.region_for(hello)
        except RefusedError:
            if self._has_engines or hello.segment:
                raise
        self._make(hello)
        return self._memory, self._memory.region_for(hello)

    def _begin(self, hello: Hello, fd: int | None) -> None:
        """Adopt the memory that an engine offers, or that an idle engine has. Otherwise, create a new memory."""
        if fd is not None:
            try:
                self._adopt(fd)
            except RefusedError:
                os.close(fd)
                raise
            return
        is_early = time.monotonic() - self._began < self._adopt_s
        if is_early and has_clients(self._folder) and self._adopt_of_clients():
            return
        if hello.segment or (is_early and has_clients(self._folder)):
            raise RefusedError("an engine may still offer an earlier memory", again=True)
        self._make(hello)

    def _adopt_of_clients(self) -> bool:
        """Adopt the memory of engines that offer nothing, because they are idle. Returns whether there is one."""
        now = time.monotonic()
        if now - self._searched_s < SEARCH_S:
            return False
        self._searched_s = now
        if (fd := memory_of_clients(self._folder)) is None:
            return False
        try:
            self._adopt(fd)
        except RefusedError as error:
            _log.warning("the memory of idle engines cannot be adopted: %s", error)
            os.close(fd)
            return False
        return True

    def _make(self, hello: Hello) -> None:
        """Make the memory that an engine asks for. The new memory replaces a memory that no engine uses."""
        policy = self._policy or hello.policy or DEFAULT_POLICY
        check_policy(policy)
        try:
            fd = create(hello.slots, hello.slot_bytes)
        except ConfigError as error:
            raise RefusedError(str(error)) from None
        write_rules(fd, NodeRules(policy))
        old = self._memory
        try:
            self._adopt(fd)
        except (OSError, RefusedError) as error:
            os.close(fd)
            raise RefusedError(str(error), again=True) from None
        if old is not None:
            _log.info("the unused memory is replaced by one with slots of %d bytes", hello.slot_bytes)
            old.close()

    def _close_fd(self, fd: int | None) -> None:
        if fd is not None:
            os.close(fd)

    def _refuse(self, link: HolderConnection, error: RefusedError) -> None:
        _log.info("process %d is refused: %s", link.process.pid, error)
        with contextlib.suppress(OSError):
            messages.send(link.wire, Unwelcome(str(error), error.again))
        self._drop(link)

    def _drop(self, link: HolderConnection) -> None:
        self._selector.unregister(link.wire)
        link.wire.close()
        if link.client is not None and self._links.get(link.client) is link:
            del self._links[link.client]
            if link.keeper is not None:
                link.keeper.hung_up(link.client)


def main(arguments: list[str]) -> None:
    """Run a holder in the background. A second holder of the folder ends at once."""
    folder, adopt_s, keep_s, *fds = arguments
    if os.fork():
        os._exit(0)
    os.chdir("/")
    logging.basicConfig(
        filename=Path(folder, LOG), level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s"
    )
    try:
        holder = Holder(Path(folder), adopt_s=float(adopt_s), keep_s=float(keep_s), fd=int(fds[0]) if fds else None)
    except BlockingIOError:
        return
    except RefusedError as error:
        _log.warning("cannot hold the memory: %s", error)
        return
    _log.info("holder of %s", folder)
    try:
        holder.run()
    except Exception:
        _log.exception("the holder ends")
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
