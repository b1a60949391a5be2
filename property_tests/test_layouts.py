"""Ranks of one layout fetch chunks that ranks of another layout stored: all bytes are right, or all chunks miss."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import event, given
from hypothesis import strategies as st

from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import TierOrder
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.tiers.base import ALIGN_BYTES
from kvpipe.tiers.carrier import Carrier
from kvpipe.tiers.envelope import HEADER_BYTES
from kvpipe.tiers.finder import Finder, TierLookup
from kvpipe.tiers.guard import FIND, READ, WRITE, guarded
from kvpipe.tiers.parts import BOUND, RankParts, Share, kept_splits, slices, split_of, splits
from kvpipe.tiers.prefix_keys import PrefixKeys
from kvpipe.trace.log import Counters
from kvpipe.transfer.pool import HostPool
from property_tests.profiles import examples

SPACE, BLOCK_TOKENS = "3" * 32, 16
RANKS_MAX = 4
FILLING = 0xA5

Bytes = npt.NDArray[np.uint8]


class Lies(NamedTuple):
    """One cache group: the KV `heads` of all ranks, and the size of each layer.

    If `heads` is 0, the order of the heads is unknown. A layer is (number of rows, bytes of a head in a row).
    """

    heads: int
    layers: tuple[tuple[int, int], ...]

    def page_bytes(self, layer: int, ranks: int) -> int:
        """Return the bytes of a rank's page of a layer."""
        rows, run = self.layers[layer]
        return rows * run * self.mine(ranks)

    def mine(self, ranks: int) -> int:
        """Return the number of heads of a rank, or an arbitrary number if the order of the heads is unknown."""
        split = split_of(self.heads, ranks)
        return self.heads // split if split else 3


class Case(NamedTuple):
    """An engine of `ranks` ranks writes, and an engine of `readers` ranks reads. Each chunk has `units` units.

    The largest chunk has `per_chunk` units. `most` is the `share_ranks_max` of the writing engine, and `theirs` is the
    `share_ranks_max` of the reading engine.
    """

    groups: tuple[Lies, ...]
    ranks: int
    readers: int
    per_chunk: int
    units: int
    most: int
    theirs: int


layers = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=3).map(tuple)
groups = st.builds(Lies, st.sampled_from((BOUND, 1, 1, 2, 3, 4, 4, 6, 8)), layers)


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    per_chunk = draw(st.integers(1, 3))
    some = tuple(draw(st.lists(groups, min_size=1, max_size=2)))
    ranks = st.integers(1, RANKS_MAX)
    most = st.sampled_from((1, 1, 2, 4, 8))
    return Case(some, draw(ranks), draw(ranks), per_chunk, draw(st.integers(1, per_chunk)), draw(most), draw(most))


class Rank:
    """One rank: its pool, its carrier, and the expected content of its slots."""

    def __init__(self, case: Case, rank: int, ranks: int, most: int, tier: HeldTier) -> None:
        """`ranks` and `most` belong to the rank's engine."""
        made = [
            Group(tuple(Layer(f"{g} {i}", lies.page_bytes(i, ranks)) for i in range(len(lies.layers))), BLOCK_TOKENS)
            for g, lies in enumerate(case.groups)
        ]
        self.geometry = Geometry(tuple(made), case.per_chunk * BLOCK_TOKENS, 1 << 20)
        self.case, self.rank, self.ranks, self.pool = case, rank, ranks, HostPool(self.geometry)
        shares = tuple(Share(lies.heads, tuple(rows for rows, _ in lies.layers)) for lies in case.groups)
        spec = DictSpec.model_validate({"timeout_ms_max": 600_000})
        self.counters = Counters()
        tiers = guarded([(tier.name, spec, tier)], (READ, WRITE))
        self.carrier = Carrier(
            tiers,
            self.geometry,
            self.pool,
            RankParts(rank, ranks, shares, most),
            counters=self.counters,
        )

    def expected(self, group: int, layer: int) -> Bytes:
        """Return the bytes of a layer's chunk that this rank holds: the rank's part of all heads."""
        lies, pages = self.case.groups[group], self.case.units
        rows, run = lies.layers[layer]
        split = split_of(lies.heads, self.ranks)
        rng = np.random.default_rng([group, layer, 0 if split else 1000 + self.rank])
        mine = lies.mine(self.ranks)
        whole = rng.integers(0, 256, (pages * rows, mine * (split or 1), run), np.uint8)
        first = self.rank * split // self.ranks * mine
        return whole[:, first : first + mine].reshape(-1)

    def slot(self, group: int, layer: int) -> Bytes:
        """Return the layer's part of the slot of a chunk of `group`, up to `units`."""
        at, size = self.geometry.layer_offsets[group][layer], self.case.groups[group].page_bytes(layer, self.ranks)
        slot: Bytes = self.pool.tensor.numpy()[group]
        return slot[at : at + size * self.case.units]

    def carry(self, orders: Sequence[TierOrder]) -> list[bool]:
        """Carry out orders, and return whether each succeeded."""
        self.carrier.carry_out(orders, SPACE, 1)
        ended, limit = dict[int, bool](), time.monotonic() + WAIT_S
        while len(ended) < len(orders):
            assert time.monotonic() < limit
            ended |= {one.order.id: one.ok for one in self.carrier.collect()}
            time.sleep(0.0002)
        assert not self.counters.faults
        return [ended[order.id] for order in orders]


def _key(group: int) -> bytes:
    return bytes([group + 1]) * 32


@contextmanager
def _ranks(case: Case, ranks: int, most: int, tier: HeldTier) -> Iterator[list[Rank]]:
    with ExitStack() as stack:
        made = [Rank(case, rank, ranks, most, tier) for rank in range(ranks)]
        for one in made:
            stack.callback(one.carrier.shutdown)
        yield made


def _orders(case: Case, *, stores: bool, split: dict[int, int]) -> list[TierOrder]:
    return [TierOrder(1 + g, stores, 0, g, g, case.units, _key(g), split[g]) for g in sorted(split)]


def _found(case: Case, tier: HeldTier) -> dict[int, int]:
    """Return, for each group whose chunk the reading engine finds, the number of the chunk's parts in the tier."""
    spec = DictSpec.model_validate({"timeout_ms_max": 600_000})
    finder = Finder(
        guarded([(tier.name, spec, tier)], (FIND,)),
        ranks=case.readers,
        units_per_chunk=case.per_chunk,
        fault=print,
        share_ranks_max=case.theirs,
    )
    finder.heads = tuple(lies.heads for lies in case.groups)
    try:
        out = {}
        for group in range(len(case.groups)):
            keys = [*(bytes(32) for _ in range(case.units - 1)), _key(group)]
            lookup = TierLookup(PrefixKeys(keys, ()), ((group, case.units),), space=SPACE, seconds_max=WAIT_S)
            finder.look_up(lookup)
            assert eventually(lambda asked=lookup: asked.done)  # type: ignore[misc]
            for place in lookup.found:
                out[group] = lookup.elsewhere.get(place, (SPACE, finder.split(group)))[1]
        return out
    finally:
        finder.stop()


def _own(case: Case, ranks: int, most: int) -> dict[int, int]:
    return dict(enumerate(kept_splits([lies.heads for lies in case.groups], ranks, most)))


@given(_cases())
@examples(60)
def test_engine_of_any_layout_finds_stored_chunks_whole_or_not_at_all(case: Case) -> None:
    """Each part is stored once.

    An engine of any layout finds complete and right chunks if it can use them, or else no chunks.
    """
    tier = HeldTier()
    with _ranks(case, case.ranks, case.most, tier) as writers:
        for one in writers:
            for group, lies in enumerate(case.groups):
                for layer in range(len(lies.layers)):
                    one.slot(group, layer)[:] = one.expected(group, layer)
            assert all(one.carry(_orders(case, stores=True, split=_own(case, case.ranks, case.most))))
        written = sum(one.carrier.bytes[tier.name, WRITE] for one in writers)
    own, other = _own(case, case.ranks, case.most), _own(case, case.readers, case.theirs)
    marks = int(all(own.values()))
    assert len(tier.values) == marks + sum(split or case.ranks for split in own.values())
    assert written == sum(len(value) - HEADER_BYTES for value in tier.values.values()) - marks * ALIGN_BYTES
    found = _found(case, tier)
    if own == other and case.ranks == case.readers:
        assert found == own
    elif all(own.values()) and all(other.values()):
        assert found == own  # in as many parts as were written
    else:
        assert not any(group in found and BOUND in {own[group], other[group]} for group in own)
    event(f"groups found: {len(found)} of {len(own)}, {'another' if case.ranks != case.readers else 'one'} layout")
    with _ranks(case, case.readers, case.theirs, tier) as readers:
        for one in readers:
            one.pool.tensor.fill_(FILLING)
            assert all(one.carry(_orders(case, stores=False, split=found)))
            for group, lies in enumerate(case.groups):
                for layer in range(len(lies.layers)):
                    there = one.slot(group, layer)
                    assert np.array_equal(there, one.expected(group, layer) if group in found else 0 * there + FILLING)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
@examples(300)
def test_slices_cover_a_part_once(heads: int, ranks: int, others: int) -> None:
    """The slices of a part cover each of its heads once and in order, for any number of ranks that wrote the heads."""
    split, theirs = split_of(heads, ranks), split_of(heads, others)
    for part in range(split if theirs else 0):
        mine = heads // split
        made: list[Any] = [None] * mine
        for one in slices(heads, split, theirs, part):
            per = heads // theirs
            assert 0 <= one.part < theirs
            assert one.theirs.stop <= per
            assert one.theirs.stop - one.theirs.start == one.mine.stop - one.mine.start > 0
            assert made[one.mine] == [None] * (one.mine.stop - one.mine.start)
            made[one.mine] = range(one.part * per + one.theirs.start, one.part * per + one.theirs.stop)
        assert made == list(range(part * mine, (part + 1) * mine))
    if split and theirs and split != theirs:
        assert (theirs,) in splits((heads,), ranks)
