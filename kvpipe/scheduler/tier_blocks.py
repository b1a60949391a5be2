"""The chunks in tiers that routers know of. Routers are notified through the engine's `Published`.

A chunk becomes known when all ranks have stored or fetched the chunk. A chunk is withdrawn as soon as this engine
learns that the tier has lost the chunk. The engine learns this from a lookup or from a `Noticing` tier.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from kvpipe.cache.fair import FairShares
from kvpipe.tiers.base import Key, Noticing
from kvpipe.tiers.finder import ChunkName
from kvpipe.trace.events import TierBlockAnnounced, TierBlocksWithdrawn

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Chunk
    from kvpipe.cache.tenants import Tenant
    from kvpipe.protocol.messages import TierOrder
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.hooks import Published
    from kvpipe.tiers.finder import Finder, TierLookup
    from kvpipe.tiers.namespace import Namespace

TOKENS_MAX: Final = 8 << 20
"""The bound on the tokens of all known chunks together. `CHUNK_TOKENS` are added for each chunk.

A token takes 8 bytes, so all known chunks take about 64 MB.
"""
CHUNK_TOKENS: Final = 128
"""The memory of a known chunk apart from its tokens, about 1 KB, as a number of tokens."""
NOTICED_MAX: Final = 65_536
"""The number of notices that may wait for later steps.

Further notices are dropped. The chunk of a dropped notice is withdrawn when a lookup misses the chunk.
"""
NOTICES_PER_STEP_MAX: Final = 256
"""The number of notices that one step processes at most, because each notice takes some microseconds."""

WithdrawalReason = Literal["missed", "noticed", "no_room", "reset"]
"""The reason for a withdrawal, as recorded in the trace."""


class _KnownBlock(NamedTuple):
    """A chunk that routers know of.

    `number` is higher for each later store or fetch of a chunk by all ranks. It is compared with the number at a
    lookup's start, because a lookup's miss does not withdraw a chunk that was stored later.
    """

    block: Any  # opaque: only the engine reads it
    number: int


class TierBlocks:
    """The table of the chunks in tiers that routers know of. Only the scheduler's thread changes the table."""

    def __init__(self, context: Context, finder: Finder, space: Namespace, published: Published) -> None:
        """Start without known chunks. `space` is the namespace of the engine's chunks."""
        self._context, self._finder, self._space, self._published = context, finder, space, published
        self._unit_tokens = context.geometry.unit_tokens
        self._announces = [tier.spec.announce != "never" for tier in finder.tiers]
        self.known: list[dict[ChunkName, _KnownBlock]] = [{} for _ in finder.tiers]
        # the block and tenant of each store in flight, by the id of its order
        self._ordered: dict[int, tuple[object, Tenant]] = {}
        self._shares = FairShares[tuple[int, ChunkName]](context.catalog.account_of)
        self._number = 0
        self._noticed: dict[tuple[int, ChunkName], _KnownBlock] = {}
        for at, tier in enumerate(finder.tiers):
            if self._announces[at] and isinstance(tier.tier, Noticing):
                tier.tier.on_gone = functools.partial(self._notice, at)

    # ---- stores and fetches ---------------------------------------------------------------------------------------

    def ordered(self, order: TierOrder, chunk: Chunk, key: bytes) -> None:
        """Note that `order` stores `chunk` up to the mark `key`. The chunk may be dropped before the store ends."""
        block = self._published.block(chunk, key) if self._announces[order.tier] else None
        if block is not None:
            self._ordered[order.id] = block, chunk.tenant

    def stored(self, order: TierOrder, space: str, *, ok: bool) -> None:
        """All ranks have reported a store in the namespace `space`. `ok` says that all ranks have stored the chunk."""
        ordered = self._ordered.pop(order.id, None)
        if ordered is not None and ok and space == self._space.name:
            self._add(order, *ordered)

    def fetched(self, order: TierOrder, space: str, chunk: Chunk, key: bytes) -> None:
        """All ranks have fetched a chunk up to the mark `key` for a lookup in `space`. `chunk` has this mark."""
        if order.space or space != self._space.name or not self._announces[order.tier]:
            return  # a chunk of another split or namespace: no lookup would report its loss
        if (block := self._published.block(chunk, key)) is not None:
            self._add(order, block, chunk.tenant)

    def _add(self, order: TierOrder, block: object, tenant: Tenant) -> None:
        """Announce a chunk. If the chunk is known already, only note that the tier has the chunk now."""
        name, known = (order.group, order.chunk), self.known[order.tier]
        before = known.get(name)
        self._number += 1
        known[name] = _KnownBlock(block if before is None else before.block, self._number)
        self._shares.put((order.tier, name), tenant, amount=order.units * self._unit_tokens + CHUNK_TOKENS)
        if before is None:
            self._published.stored(order.tier, order.group, block)
            self._context.counters["tier_blocks_announced"] += 1
            if (trace := self._context.trace).detail:
                trace.put(TierBlockAnnounced(
                    *trace.of("", 0), tier=self._finder.tiers[order.tier].name, group=order.group,
                    units=order.units,
                ))  # fmt: skip
        while self._shares.amount > TOKENS_MAX:
            tier, oldest = self._shares.most()
            self._withdraw(tier, [oldest], "no_room")

    # ---- what is gone ---------------------------------------------------------------------------------------------

    def watch(self, lookup: TierLookup) -> TierLookup:
        """Make `lookup` record the chunks that it misses, and return `lookup`. The lookup must not have begun yet."""
        if any(self._announces):
            lookup.misses, lookup.announced, lookup.number = [], self.known, self._number
        return lookup

    def missed(self, lookup: TierLookup) -> None:
        """Withdraw the chunks that a lookup has missed, unless they were stored since the lookup began."""
        for tier, name in lookup.misses or ():
            known = self.known[tier].get(name)
            if known is not None and known.number <= lookup.number:
                self._withdraw(tier, [name], "missed")
        lookup.misses = None

    def plan_step(self) -> None:
        """Withdraw chunks whose loss tiers have noticed, at most a few in each step."""
        gone: dict[int, list[ChunkName]] = {}
        for _ in range(min(len(self._noticed), NOTICES_PER_STEP_MAX)):
            (tier, name), known = self._noticed.popitem()  # other threads only add notices
            if self.known[tier].get(name) is known:  # false if the chunk was stored again
                gone.setdefault(tier, []).append(name)
        for tier, names in gone.items():
            self._withdraw(tier, names, "noticed")

    def reset(self) -> None:
        """Withdraw all chunks, because later lookups do not find them. Stores in flight are not announced."""
        self._ordered.clear()
        for tier, known in enumerate(self.known):
            self._withdraw(tier, [*known], "reset")

    def _notice(self, tier: int, key: Key) -> None:
        """Note that a tier has lost the value of `key`. Called on any thread, and for each part of a chunk."""
        name = key.group, key.chunk
        known = self.known[tier].get(name)
        if known is None or len(self._noticed) >= NOTICED_MAX:
            return
        if (key.namespace, key.ranks) == (self._space.name, self._finder.parts(key.group)):
            self._noticed[tier, name] = known

    def _withdraw(self, tier: int, names: Iterable[ChunkName], why: WithdrawalReason) -> None:
        """Notify routers that `tier` does not have the chunks with these names. Unknown names are skipped."""
        gone: dict[int, list[object]] = {}
        for name in names:
            known = self.known[tier].pop(name, None)
            if known is not None:
                self._shares.pop((tier, name))
                gone.setdefault(name[0], []).append(known.block)
        for group, blocks in gone.items():
            self._published.gone(tier, group, blocks)
            self._context.counters["tier_blocks_withdrawn"] += len(blocks)
            if (trace := self._context.trace).detail:
                trace.put(TierBlocksWithdrawn(
                    *trace.of("", 0), tier=self._finder.tiers[tier].name, group=group, blocks=len(blocks), why=why
                ))  # fmt: skip
