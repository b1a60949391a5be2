"""Pins the pool, piece by piece, so that copies to and from it are asynchronous.

Pieces are whole slots, so that no copy crosses a piece's end, and follow each other from the pool's beginning. Pinning
goes through the driver: in the runtime, a failure would also be reported by the next kernel launch.
"""

from __future__ import annotations

import threading
from typing import Final

from kvpipe.cores import bind_this_thread
from kvpipe.trace.log import log
from kvpipe.transfer.device import Device
from kvpipe.transfer.pool import HostPool

PIECE_BYTES_MAX: Final = 256 << 20  # about 25 ms in the driver
END_S_MAX: Final = 30.0


def enter_thread(device: Device) -> None:
    """Prepare the calling thread to use the device. Never raises: a failure is logged."""
    try:
        device.enter_thread()
    except Exception as error:  # noqa: BLE001  (without it all is well but for a graph that is being captured)
        log.warning("thread_not_entered", why=repr(error))


class Pins:
    """The pinned part of one pool: its first `slots` slots."""

    def __init__(self, device: Device, pool: HostPool) -> None:
        """Start with nothing pinned."""
        self._device, self._pool = device, pool
        self._lock = threading.Lock()  # guards what follows
        self._pieces: list[int] = []
        self._refused = self._ended = False
        self.slots = 0

    def begin(self, piece_bytes: int) -> None:
        """Pin the first piece, about `piece_bytes`, on a core near the device: pages stay where first touched."""
        pool = self._pool
        try:
            pool.near = self._device.cpus()
        except Exception as error:  # noqa: BLE001  (what is not known costs speed at most)
            log.debug("cores_unknown", why=repr(error))
        size = min(max(1, piece_bytes // pool.slot_bytes), pool.slots) * pool.slot_bytes

        def pin() -> None:
            if pool.near:
                bind_this_thread(pool.near)
            self.claim(pool.base, size)

        thread = threading.Thread(target=pin, name="kvpipe-pin")
        thread.start()
        thread.join()

    def claim(self, address: int, size: int) -> bool:
        """Pin the next piece. Returns whether its slots may be used. See `TransferEngine.claim`.

        If the first piece could not be pinned nothing ever is, and all slots may be used unpinned: no mover that needs
        pinned slots was measured.
        """
        with self._lock:
            next_at = self._pool.base + self.slots * self._pool.slot_bytes
            if address < next_at or self._ended or (self._refused and not self.slots):
                return True
            return (address == next_at and self._pin(address, size)) or not self.slots

    def end(self, *, unpin: bool) -> None:
        """Wait for pinning under way, pin nothing any more, and unpin all pieces if `unpin`. Idempotent."""
        if not self._lock.acquire(timeout=END_S_MAX):
            log.warning("pinning_does_not_end")
            return
        try:
            self._ended = True
            while unpin and self._pieces:
                self._device.unregister(self._pieces.pop())
        except Exception:
            log.exception("unpinning_failed")
        finally:
            self._lock.release()

    def _pin(self, address: int, size: int) -> bool:
        enter_thread(self._device)
        try:
            self._device.register(address, size)
        except Exception as error:  # noqa: BLE001  (whatever it is, there is a way without)
            if not self._refused:
                log.warning(
                    "pool_not_pinned",
                    why=str(error),
                    pinned_slots=self.slots,
                    effect="the rest of the pool is not used"
                    if self.slots
                    else "copies are slower, and block the host, until the end",
                    remedy="set a smaller pool_bytes_max or raise the limit on locked memory",
                )
            self._refused = True
            return False
        self._refused = False
        self._pieces.append(address)
        self.slots += size // self._pool.slot_bytes
        return True
