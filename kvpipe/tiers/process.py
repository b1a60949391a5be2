"""The engine's side of a process that runs a tier's client.

The engine's side starts the process, asks questions, and ends the process. `mooncake/child.py` and `s3/child.py` are
the programs of the client's process. A lane consists of a socket and of a range of the memory that both processes
share. Only one question at a time uses a lane.
"""

from __future__ import annotations

import io
import mmap
import os
import socket
import subprocess
import sys
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from kvpipe.tiers.base import TierError, TierFullError

MESSAGE_BYTES_MAX: Final = 1 << 20
SEND_BYTES: Final = 256 << 10
"""SO_SNDBUF of a lane's socket. The kernel doubles this value, or doubles its own limit if the limit is lower.

The resulting size is less than `MESSAGE_BYTES_MAX`, and more than any question or answer.
"""
INLINE_BYTES: Final = 64 << 10
"""Copies of fewer bytes run on the loop's thread, because handing them to another thread would take longer."""
PIECE_BYTES: Final = 1 << 20
"""Copies are divided into ranges of this number of bytes. Two threads copy alternate ranges in parallel."""
STEP_BYTES: Final = 2 << 20
"""The size of a lane's memory is a multiple of this number of bytes."""
CANCEL: Final = b"cancel"
"""The message that cancels the question in progress on a lane. The client still sends an answer to that question."""
FULL: Final = "full"
"""The answer that the client sends with an error if the tier has no room."""


class ClientChannel:
    """One lane: a socket to the client's process, and a range of the memory shared with that process."""

    def __init__(self, wire: socket.socket, shared: io.FileIO, where: range, *, cancels: bool) -> None:
        """`where` is the lane's range of the `shared` memory. `cancels` says that the client understands `CANCEL`."""
        self.wire, self.memory = wire, memoryview(b"")
        self.owed = False  # whether an answer is outstanding; until it comes, the client may use the memory
        self._shared, self._where, self._cancels = shared, where, cancels

    def room(self, size: int) -> memoryview:
        """Return at least `size` bytes of the lane's memory. The mapping grows to the largest size ever requested.

        Raises:
            ConnectionResetError: the process has ended, so that the shared memory cannot be mapped any more.

        """
        if size > self.memory.nbytes:
            if self._shared.closed:
                raise ConnectionResetError
            whole = min(-(-size // STEP_BYTES) * STEP_BYTES, len(self._where))
            self.memory = memoryview(mmap.mmap(self._shared.fileno(), whole, offset=self._where.start))
        return self.memory

    async def settle(self, limit_s: float) -> None:
        """Wait until the client no longer uses the lane's memory. Raises TimeoutError after `limit_s` seconds."""
        with anyio.fail_after(limit_s):
            while self.owed:
                await self._answer()

    async def ask(self, question: list[Any], limit_s: float) -> Any:  # noqa: ANN401
        """Send a question and return the answer.

        If this call is cancelled, it sends `CANCEL` to the client. If the client does not understand `CANCEL`, the call
        waits for the answer instead.

        Raises:
            TimeoutError: the client has not answered within `limit_s` seconds.
            TierError: the client has answered with an error; `TierFullError` if the tier has no room.
            OSError: the client's process has ended.

        """
        await self.settle(limit_s)
        self.wire.send(msgspec.msgpack.encode(question))
        self.owed = True
        try:
            with anyio.fail_after(limit_s, shield=not self._cancels):
                why, answer = msgspec.msgpack.decode(await self._answer())
        except BaseException:
            if self._cancels and self.owed:
                with suppress(OSError):
                    self.wire.send(CANCEL)
            raise
        if why:
            raise TierFullError(why) if answer == FULL else TierError(why)
        return answer

    async def _answer(self) -> bytes:
        await anyio.wait_readable(self.wire)
        message = self.wire.recv(MESSAGE_BYTES_MAX)
        if not message:
            raise ConnectionResetError
        self.owed = False
        return message


def beside(parts: Sequence[memoryview], memory: memoryview, at: int) -> list[tuple[memoryview, memoryview]]:
    """Return each part of a value with the part's range of a lane's memory. The value begins at `at` in the memory."""
    begins = accumulate((part.nbytes for part in parts), initial=at)
    return [(part, memory[begin : begin + part.nbytes]) for part, begin in zip(parts, begins, strict=False)]


async def copy(copies: list[tuple[memoryview, memoryview]], limiter: anyio.CapacityLimiter) -> None:
    """Copy the second view of each pair to the first, in two threads and without the GIL.

    A copy of fewer than `INLINE_BYTES` bytes runs on the calling thread.
    """
    if sum(source.nbytes for _, source in copies) < INLINE_BYTES:
        _copy(copies)
        return
    pieces = [
        (into[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES])
        for into, source in copies
        for at in range(0, source.nbytes, PIECE_BYTES)
    ]
    async with anyio.create_task_group() as group:
        for half in (pieces[::2], pieces[1::2]):
            group.start_soon(partial(anyio.to_thread.run_sync, _copy, half, limiter=limiter))


def _copy(copies: list[tuple[memoryview, memoryview]]) -> None:
    for into, source in copies:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


class Pool:
    """A pool of lanes. Each lane is lent to one caller at a time."""

    def __init__(self, lanes: Sequence[ClientChannel]) -> None:
        self._free, self._size, self._turn = deque(lanes), len(lanes), anyio.Semaphore(len(lanes))
        self._shut = False

    @asynccontextmanager
    async def lane(self, limit_s: float) -> AsyncIterator[ClientChannel]:
        """Lend a lane. Raises TimeoutError if no lane is free within `limit_s`, ConnectionResetError after `shut`."""
        with anyio.fail_after(limit_s):
            await self._turn.acquire()
        if self._shut:
            self._turn.release()
            raise ConnectionResetError
        lane = min(self._free, key=lambda lane: lane.owed)
        self._free.remove(lane)
        try:
            yield lane
        finally:
            self._back(lane)

    def _back(self, lane: ClientChannel) -> None:
        # at the front, to be lent next, because its memory is mapped and in the CPU's cache
        self._free.appendleft(lane)
        self._turn.release()
        if self._shut:
            lane.wire.close()

    async def idle(self) -> None:
        """Wait until no lane is lent."""
        taken = 0
        try:
            while taken < self._size:
                await self._turn.acquire()
                taken += 1
        finally:
            for _ in range(taken):
                self._turn.release()

    def shut(self) -> None:
        """Stop lending lanes. Close free lanes now, and each lent lane when it is returned."""
        self._shut = True
        for lane in self._free:
            lane.wire.close()


class ClientProcess:
    """The parent's handle of the client's process. `pools` has the pools of lanes, by use."""

    def __init__(
        self, child: Path, counts: dict[str, int], lane_bytes: int, environment: dict[str, str], *,
        cancels: bool = False, log: int | None = subprocess.DEVNULL,
    ) -> None:  # fmt: skip
        """Start the process. Blocks for some milliseconds.

        `child` is the process's program, such as `mooncake/child.py`. `counts` has the number of lanes by use. The
        memory of a lane has at most `lane_bytes` bytes, a multiple of the page size. `cancels` says that the client
        understands `CANCEL`. `log` is the destination of the process's stderr.
        """
        self.lane_bytes = lane_bytes
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1 + sum(counts.values()))]
        for one in (one for pair in pairs for one in pair):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._shared = io.FileIO(os.memfd_create(f"kvpipe-{child.stem}"), "r+")
        fds = [self._shared.fileno(), *(theirs.fileno() for _, theirs in pairs)]
        try:
            # costs nothing at first, because each page is allocated on its first use
            self._shared.truncate(lane_bytes * (len(pairs) - 1))
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", str(child), *map(str, fds)],
                pass_fds=fds, env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        except BaseException:
            self._shared.close()
            raise
        finally:
            for mine, theirs in pairs:
                theirs.close()
                mine.setblocking(False)  # noqa: FBT003
        (self._control, _), *others = pairs
        lanes = iter([
            ClientChannel(mine, self._shared, range(n * lane_bytes, (n + 1) * lane_bytes), cancels=cancels)
            for n, (mine, _) in enumerate(others)
        ])  # fmt: skip
        self.pools = {use: Pool([*islice(lanes, count)]) for use, count in counts.items()}

    async def greet(self, settings: dict[str, Any], limit_s: float) -> None:
        """Send the settings and wait until the client is ready. Raises TierError if the client cannot start.

        Raises TimeoutError if the client does not answer within `limit_s` seconds.
        """
        self._control.send(msgspec.msgpack.encode(settings))
        with anyio.fail_after(limit_s):
            await anyio.wait_readable(self._control)
        answer = self._control.recv(MESSAGE_BYTES_MAX)
        if answer != b"ready":
            raise TierError(answer.decode() or "its process has ended")

    async def end(self, limit_s: float) -> None:
        """Wait for questions in progress, then for the process's exit, each for `limit_s` seconds.

        Then kill the process.
        """
        try:
            await self._idle(limit_s)
            with suppress(OSError):  # the process was already killed
                self._control.shutdown(socket.SHUT_WR)
                with anyio.move_on_after(limit_s, shield=True):
                    await anyio.wait_readable(self._control)  # readable when the process has closed its socket
        finally:
            await self.kill()
            await self._idle(limit_s)  # ends in any case: when the process ends, calls that wait for an answer raise

    async def _idle(self, limit_s: float) -> None:
        with anyio.move_on_after(limit_s, shield=True):
            for pool in self.pools.values():
                await pool.idle()

    async def kill(self) -> None:
        """Kill the process without waiting for questions in progress. Later calls have no effect."""
        self._process.kill()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._process.wait)
        self._control.close()
        self._shared.close()
        for pool in self.pools.values():
            pool.shut()


class ClientTier:
    """The base class of tiers whose client runs in a process of its own."""

    def __init__(self, name: str, timeout_ms: int) -> None:
        """Make a closed tier. `open` starts its process. `timeout_ms` is the tier's `timeout_ms_max`."""
        self.name = name
        self._opened = False  # if True, `health` restarts a client that has ended
        self._child: ClientProcess | None = None
        self._opening = anyio.Lock()
        self._copies = anyio.CapacityLimiter(2)
        self._timeout_ms, self._limit_s = timeout_ms, timeout_ms / 1000

    async def _started(self, start: Callable[[], ClientProcess], settings: dict[str, Any], limit_s: float) -> None:
        """Start a process and wait until its client is ready. Raises TierError if the client cannot start."""
        with anyio.CancelScope(shield=True):
            child = await anyio.to_thread.run_sync(start)
        try:
            await child.greet(settings, limit_s)
        except BaseException:
            await child.kill()
            raise
        self._child = child

    async def close(self) -> None:
        """See `Tier.close`."""
        async with self._opening:
            self._opened = False
            await self._drop()

    async def health(self) -> None:
        """See `Tier.health`. A client that has ended is restarted."""
        if not self._opened:
            self._running()
        await self.open()

    @abstractmethod
    async def open(self) -> None:
        """See `Tier.open`."""

    async def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end(self._limit_s)

    def _running(self) -> ClientProcess:
        if self._child is None:
            raise TierError(f"{self.name}: {'the client has ended' if self._opened else 'it is not open'}")
        return self._child

    @asynccontextmanager
    async def _notified(self) -> AsyncIterator[None]:
        """Convert errors of the `with` block to TierErrors that name the tier."""
        try:
            yield
        except TierError as error:
            raise type(error)(str(error) if str(error).startswith(self.name) else f"{self.name}: {error}") from None
        except TimeoutError:
            msg = f"{self.name}: no answer within timeout_ms_max={self._timeout_ms}"
            raise TierError(msg) from None
        except OSError as error:
            self._running()
            msg = f"{self.name}: the client's process is gone ({type(error).__name__})"
            raise TierError(msg) from None
