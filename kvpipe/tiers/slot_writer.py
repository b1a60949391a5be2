"""Writes chunks of slots to a tier. If a slot's mark shows that the slot has changed, the tier keeps no value of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import anyio

from kvpipe.protocol.messages import TierOrder
from kvpipe.tiers.base import Key, Put, Written, blocking
from kvpipe.tiers.bodies import Bodies
from kvpipe.tiers.guard import GuardedTier
from kvpipe.trace.log import Counters

Values = Sequence[tuple[Key, memoryview]]
Fill = Callable[[], object]


class SlotWriter:
    """Writes the values of one rank's slots."""

    def __init__(self, bodies: Bodies, threads: anyio.CapacityLimiter, counters: Counters) -> None:
        """Values are sealed in `threads`. Damaged slots are counted in `counters`."""
        self._bodies, self._threads, self._counters = bodies, threads, counters

    async def damage(self, order: TierOrder) -> str:
        """Return why the order's slot must not be stored, or "". A thread compares digests, which takes long."""
        if why := self._changed(order):
            return why
        if order.stamp and self._bodies.digests:
            return self._note(order, await blocking(self._threads, functools.partial(self._bodies.damage, order)))
        return ""

    async def write(
        self, tier: GuardedTier, units: int, values: Values, moves: Sequence[Fill] = (), order: TierOrder | None = None
    ) -> str:
        """Write all values in one call, after `moves` have filled the bodies.

        `order` names the slot of the values, if there is one. Returns why the slot must not be stored, or "". In the
        first case, the tier does not keep the values.
        """

        def work() -> list[Put]:
            for move in moves:
                move()
            named = [(tier.sealer.names(key)[0], body) for key, body in values]
            return [Put(name, tier.sealer.seal(name, units, body)) for name, body in named]

        puts = await blocking(self._threads, work)
        if order is not None and (why := self._changed(order)):
            return why
        written = await tier.write(puts)
        # The tier may have read the slot itself. Its readers would find the wrong checksum, so this only saves reads.
        if order is not None and (why := self._changed(order)):
            stored = [put.key for put, how in zip(puts, written, strict=True) if how is Written.STORED]
            if stored:  # a value that the tier had before is not of this slot
                await tier.delete(stored)
            return why
        return ""

    def _changed(self, order: TierOrder) -> str:
        return self._note(order, self._bodies.other_chunk(order))

    def _note(self, order: TierOrder, why: str) -> str:
        if why:
            self._counters.fault("slot_damaged", order=order.id, why=why)
        return why
