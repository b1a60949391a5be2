"""The client's process maps the slots that engines share, and reads values into these slots."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio
import numpy as np

from kvpipe.tiers.base import Get, TierError
from kvpipe.tiers.process import ClientChannel, ClientProcess

if TYPE_CHECKING:
    from kvpipe.transfer.pool import SharedSlots

RETRY_S: Final = 10.0
"""If a client cannot map the slots, it tries again after this number of seconds. Meanwhile, values are copied."""


class SlotFills:
    """Asks the client's process to read values into slots. Such a read is a *fill*.

    A fill ends when the client has answered, when the client has revoked the fill, or when the client's process has
    ended. A fill that has ended writes its slots no more, so that a slot may be granted for another chunk.
    """

    def __init__(self, limit_s: float) -> None:
        """Start without slots. `limit_s` is the longest wait for an answer without values."""
        self._limit_s, self._begin, self._end = limit_s, 0, 0
        self._slots: SharedSlots | None = None
        self._client: ClientProcess | None = None  # the client's process that has mapped the slots
        self._retry_s, self._count = 0.0, 0
        self._joining = anyio.Lock()

    def share(self, slots: SharedSlots) -> None:
        """Fill `slots` from now on."""
        if slots.file is not None:
            self._slots, self._begin = slots, _address(slots.memory)
            self._end = self._begin + slots.memory.nbytes

    async def places(self, client: ClientProcess, gets: Sequence[Get]) -> list[int]:
        """Return the place of each value's body in the slots, or [] if values must be copied.

        A place is a number of bytes from the beginning of the slots. If one value must be copied, all are copied.
        """
        if self._slots is None or not all(map(self._fits, gets)) or len({get.into[0].nbytes for get in gets}) > 1:
            return []
        async with self._joining:
            if client is not self._client and not await self._joined(client):
                return []
        return [_address(get.into[1]) - self._begin for get in gets]

    def _fits(self, get: Get) -> bool:
        """Return whether a value has a header of whole pages, and a body in a slot."""
        if len(get.into) != 2 or get.into[0].nbytes % mmap.PAGESIZE:  # noqa: PLR2004
            return False
        begin = _address(get.into[1])
        return self._begin <= begin and begin + get.into[1].nbytes <= self._end and begin % mmap.PAGESIZE == 0

    async def _joined(self, client: ClientProcess) -> bool:
        """Make a new client's process map the slots. Returns whether the process has mapped the slots."""
        assert self._slots is not None  # noqa: S101
        assert self._slots.file is not None  # noqa: S101
        if time.monotonic() < self._retry_s:
            return False
        try:
            async with client.pools["ask"].lane(self._limit_s) as lane:
                await lane.ask(["join", *self._slots.file], 2 * self._limit_s)
        except (TierError, OSError):
            self._retry_s = time.monotonic() + RETRY_S
            return False
        self._client = client
        return True

    async def ask(self, client: ClientProcess, lane: ClientChannel, arguments: list[Any], limit_s: float) -> list[int]:
        """Fill slots, and return the code of each value. Raises as `ClientChannel.ask`."""
        self._count += 1
        number = self._count
        try:
            return await lane.ask(["fill", *arguments, number], limit_s)  # type: ignore[no-any-return]
        finally:
            if lane.owed:
                with anyio.CancelScope(shield=True):
                    await self._revoke(client, number)

    async def _revoke(self, client: ClientProcess, number: int) -> None:
        """Make the client stop all writes into the slots of a fill. A client that does not answer is killed."""
        try:
            async with client.pools["revoke"].lane(self._limit_s) as lane:
                await lane.ask(["revoke", number], self._limit_s)
        except (TierError, OSError):
            await client.kill()


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
