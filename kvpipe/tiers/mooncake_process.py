"""The engine's side of the process that runs Mooncake's client: how it is started, asked and ended.

`mooncake_child.py` is the other side. Every lane is a socket to one of its threads, with a stretch of shared memory.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from kvpipe.tiers.base import TierError

CHILD: Final = Path(__file__).with_name("mooncake_child.py")
MESSAGE_BYTES_MAX: Final = 1 << 20
INLINE_BYTES: Final = 64 << 10
"""Fewer bytes than these are copied on the loop: a thread costs more."""
PIECE_BYTES: Final = 1 << 20
"""Bytes that one thread copies while another copies the next."""
ASKERS: Final = 2
"""Questions without values at once."""


class Lane:
    """A socket to one thread of the client's process, and a stretch of the memory shared with it."""

    def __init__(self, wire: socket.socket, memory: memoryview) -> None:
        self.wire, self.memory = wire, memory
        self.owed = False  # an answer that nobody waits for any more: until it comes the memory is the client's

    async def settle(self, limit_s: float) -> None:
        """Wait until the memory is this process's."""
        with anyio.fail_after(limit_s):
            while self.owed:
                await self._answer()

    async def ask(self, question: list[Any], limit_s: float) -> Any:  # noqa: ANN401
        """Return the answer. A cancellation waits for it, so that what was asked has been done or not."""
        await self.settle(limit_s)
        self.wire.send(msgspec.msgpack.encode(question))
        self.owed = True
        with anyio.fail_after(limit_s, shield=True):
            why, answer = msgspec.msgpack.decode(await self._answer())
        if why:
            raise TierError(why)
        return answer

    async def _answer(self) -> bytes:
        await anyio.wait_readable(self.wire)
        message = self.wire.recv(MESSAGE_BYTES_MAX)
        if not message:
            raise ConnectionResetError
        self.owed = False
        return message


def beside(parts: Sequence[memoryview], memory: memoryview, at: int) -> list[tuple[memoryview, memoryview]]:
    """Return the parts of a value with where each is in a lane's memory, in which the value begins at `at`."""
    begins = accumulate((part.nbytes for part in parts), initial=at)
    return [(part, memory[begin : begin + part.nbytes]) for part, begin in zip(parts, begins, strict=False)]


async def copy(copies: list[tuple[memoryview, memoryview]], limiter: anyio.CapacityLimiter) -> None:
    """Copy each second to the first, in two threads and without the interpreter's lock; few bytes at once."""
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
    """Lanes, each lent to one caller at a time."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._free, self._size, self._turn = deque(lanes), len(lanes), anyio.Semaphore(len(lanes))
        self._shut = False

    @asynccontextmanager
    async def lane(self, limit_s: float) -> AsyncIterator[Lane]:
        """Lend a lane. Raises TimeoutError if there is none in time."""
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

    def _back(self, lane: Lane) -> None:
        self._free.appendleft(lane)  # the last one used: its memory is there, and in the cache
        self._turn.release()
        if self._shut:
            lane.wire.close()

    async def idle(self) -> None:
        """Wait until nobody has a lane."""
        for _ in range(self._size):
            await self._turn.acquire()
        for _ in range(self._size):
            self._turn.release()

    def shut(self) -> None:
        """Lend no more."""
        self._shut = True
        for lane in self._free:
            lane.wire.close()


class ClientProcess:
    """The client's process, seen from this one."""

    def __init__(self, readers: int, writers: int, lane_bytes: int, timeout_ms: int) -> None:
        """Start it. Blocks for some milliseconds."""
        counts = {"read": readers, "write": writers, "ask": ASKERS, "scan": 1}
        self.lane_bytes = lane_bytes
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1 + sum(counts.values()))]
        memory_fd = os.memfd_create("kvpipe-mooncake")
        fds = [memory_fd, *(theirs.fileno() for _, theirs in pairs)]
        try:
            os.ftruncate(memory_fd, self.lane_bytes * (len(pairs) - 1))
            memory = memoryview(mmap.mmap(memory_fd, 0))
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", str(CHILD), *map(str, fds)],
                pass_fds=fds, env=_environment(timeout_ms), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=_log(),
            )  # fmt: skip
        finally:
            os.close(memory_fd)
            for mine, theirs in pairs:
                theirs.close()
                mine.setblocking(False)  # noqa: FBT003
        (self._control, _), *others = pairs
        lanes = iter([
            Lane(mine, memory[n * self.lane_bytes : (n + 1) * self.lane_bytes]) for n, (mine, _) in enumerate(others)
        ])  # fmt: skip
        self.pools = {use: Pool([*islice(lanes, count)]) for use, count in counts.items()}

    async def greet(self, settings: dict[str, Any], limit_s: float) -> None:
        """Send the settings and wait until the client is connected. Raises TierError if it is not."""
        self._control.send(msgspec.msgpack.encode(settings))
        with anyio.fail_after(limit_s):
            await anyio.wait_readable(self._control)
        answer = self._control.recv(MESSAGE_BYTES_MAX)
        if answer != b"ready":
            raise TierError(answer.decode() or "its process has ended")

    async def end(self, limit_s: float) -> None:
        """Let what is under way end, and then the process, each within bounds; kill it otherwise."""
        try:
            with anyio.move_on_after(limit_s, shield=True):
                for pool in self.pools.values():
                    await pool.idle()
            self._control.shutdown(socket.SHUT_WR)
            with anyio.move_on_after(limit_s, shield=True):
                await anyio.wait_readable(self._control)  # its end
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the process at once. Idempotent."""
        self._process.kill()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._process.wait)
        self._control.close()
        for pool in self.pools.values():
            pool.shut()


def _environment(timeout_ms: int) -> dict[str, str]:
    """Bound the client's waits, and keep it quiet; what the user has set stays."""
    seconds = str(-(-timeout_ms // 1000))
    bounds = dict.fromkeys(("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"), str(timeout_ms))
    waits = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_HANDSHAKE_CONNECT_TIMEOUT")
    quiet = {"MC_STORE_CLIENT_METRIC": "0", "MC_STORE_CLIENT_SETUP_RETRIES": "3"}
    no_device = {"CUDA_VISIBLE_DEVICES": ""}  # values come from host memory: it shall not take any of a device's
    return bounds | dict.fromkeys(waits, seconds) | quiet | os.environ | no_device


def _log() -> int | None:
    """Where the client's log goes: nowhere, unless the user has set its level."""
    return None if "MC_LOG_LEVEL" in os.environ else subprocess.DEVNULL
