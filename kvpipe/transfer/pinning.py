"""This module pins the pool, piece by piece, so that copies to and from the pool are asynchronous.

A piece is a number of whole slots, so that no copy crosses the end of a piece. The pieces are adjacent, from the
beginning of the pool on. If other ranks have parts of the slots, a piece is this rank's part of one slot. Pinning uses
CUDA's driver. If CUDA's runtime failed to pin memory, the next kernel launch would report that failure, too.

While one process pins, the launches of all processes on the machine wait. Therefore pieces are small, the processes of
a machine take turns, and `Readier` pauses between pieces.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvpipe.machine.cores import bind_this_thread
from kvpipe.trace.log import log
from kvpipe.transfer.device import Device
from kvpipe.transfer.pool import HostPool

PIECE_BYTES_MAX: Final = 32 << 20  # the driver pins a piece of this size in about 3 ms
FIRST_BYTES: Final = 256 << 20
"""The number of bytes that are pinned at start-up for measurements: about as many as one step saves."""
END_S_MAX: Final = 30.0
TURN_S_MAX: Final = 1.0
"""The longest wait, in seconds, for another process's turn to end.

After this time a process pins without the lock, because the other process may hang.
"""
TURN_LOOK_S: Final = 0.000_5
TURNS: Final = Path(tempfile.gettempdir(), f"kvpipe-pinning-{os.getuid()}.lock")
"""The process that pins locks this file."""


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Wait at most `TURN_S_MAX` seconds for the lock of `path`, which a process holds while it pins. Never raises."""
    deadline = time.monotonic() + TURN_S_MAX
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        log.debug("no_turns", why=str(error))
        yield
        return
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # another process holds the lock
                time.sleep(TURN_LOOK_S)
            except OSError:  # no lock can be had: this file system has no locks, for example
                break
        yield
    finally:
        os.close(file)


def enter_thread(device: Device) -> None:
    """Prepare the calling thread to use the device. A failure is logged and not raised."""
    try:
        device.enter_thread()
    except Exception as error:  # noqa: BLE001  (a failure only harms a graph that is being captured)
        log.warning("thread_not_entered", why=repr(error))


class Pins:
    """The pinned bytes of one pool: the pool's first `slots` slots."""

    def __init__(self, device: Device, pool: HostPool) -> None:
        """Start with no pinned slots."""
        self.device, self.pool = device, pool
        self._lock = threading.Lock()  # guards the attributes below
        self._pieces: list[int] = []
        self._refused = self._ended = False
        self.slots = 0

    def begin(self, piece_bytes: int, first_bytes: int = 0) -> None:
        """Pin the pieces in the first `first_bytes` bytes, but at least one piece, and no slot without memory.

        The pages are pinned on a core near the device, because a page stays in the memory near the core that first
        touches the page.
        """
        pool = self.pool
        try:
            pool.near = self.device.cpus()
        except Exception as error:  # noqa: BLE001  (without the cores copies may only be slower)
            log.debug("cores_unknown", why=repr(error))
        step = min(max(1, piece_bytes // pool.part_bytes), pool.with_memory)
        wanted = step and max(1, min(first_bytes // pool.slot_bytes, pool.with_memory) // step) * step

        def pin() -> None:
            if pool.near:
                bind_this_thread(pool.near)
            for first in range(0, wanted, step or 1):
                for at, size in pool.parts(first, first + step):
                    if not self.claim(pool.base + at, size) or not self.slots:
                        return

        thread = threading.Thread(target=pin, name="kvpipe-pin")
        thread.start()
        thread.join()

    def claim(self, address: int, size: int) -> bool:
        """Pin the bytes of a piece that are not pinned yet. Returns whether the piece's slots may be used.

        This is `TransferEngine.claim`. A piece may begin before the end of the last pinned piece, because `begin` may
        have pinned pieces of another size.

        If the first piece could not be pinned, no piece is ever pinned, and all slots may be used unpinned. In this
        case no mover that needs pinned slots was measured.
        """
        with self._lock:
            next_at, stop = self.pool.base + self.slots * self.pool.slot_bytes, address + size
            if stop <= next_at or self._ended or (self._refused and not self.slots):
                return True
            return (address <= next_at and self._pin(next_at, stop - next_at)) or not self.slots

    def end(self, *, unpin: bool) -> None:
        """Wait for the piece that is being pinned, and pin no more pieces. If `unpin`, unpin all pieces. Idempotent."""
        if not self._lock.acquire(timeout=END_S_MAX):
            log.warning("pinning_does_not_end")
            return
        try:
            self._ended = True
            while unpin and self._pieces:
                self.device.unregister(self._pieces.pop())
        except Exception:
            log.exception("unpinning_failed")
        finally:
            self._lock.release()

    def _pin(self, address: int, size: int) -> bool:
        enter_thread(self.device)
        try:
            with turn(TURNS):
                self.device.register(address, size)
        except Exception as error:  # noqa: BLE001  (after any error copies still work unpinned)
            if not self._refused:
                log.warning(
                    "pool_not_pinned",
                    why=str(error),
                    pinned_slots=self.slots,
                    effect="the rest of the pool is not used"
                    if self.slots and not self.pool.token
                    else "copies are slower, and block the host, until the engine ends",
                    remedy="set a smaller pool_bytes_max or raise the limit on locked memory",
                )
            self._refused = True
            return False
        self._refused = False
        self._pieces.append(address)
        self.slots += -(-size // self.pool.slot_bytes)
        return True
