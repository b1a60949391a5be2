"""Compares the catalog with a model that knows only the content of each chunk's units, and which units have landed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, Owner, Piece
from kvpipe.cache.policy import large, make_policy
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.trace.log import Counters
from property_tests.profiles import examples

SLOTS, GROUPS, UNITS = 3, 2, 4
LETTERS = st.text("ab", min_size=1, max_size=2)


def _key(text: str) -> bytes:
    return text.encode()


@dataclass(eq=False)
class Known:
    """A chunk in the model: the content of its units, the landed units, and whether the chunk may still be found."""

    chunk: Chunk
    content: str = ""
    landed: set[int] = field(default_factory=set)
    writers: int = 0
    dropped: bool = False


Written = MultipleResults[tuple[Known, Piece]] | tuple[Known, Piece]


class CatalogModel(RuleBasedStateMachine):
    """Reservations, pieces, leases, evictions and resets in any order."""

    policy = "lru"
    pieces: Bundle[tuple[Known, Piece]] = Bundle("pieces")
    owners: Bundle[Owner] = Bundle("owners")

    def __init__(self) -> None:
        """Start with free slots."""
        super().__init__()
        self.catalog = Catalog(SLOTS, GROUPS, make_policy(self.policy, SLOTS), Counters())
        self.known: dict[int, Known] = {}
        self.in_flight: list[tuple[Known, Piece]] = []
        self.leased: dict[Owner, list[Chunk]] = {}
        self.number = 0

    def _holders(self) -> list[Chunk]:
        return [k.chunk for k, _ in self.in_flight] + [c for owned in self.leased.values() for c in owned]

    def _findable(self) -> list[Chunk]:
        found = {id(c): c for g in range(GROUPS) for c in self.catalog.index(g).values()}
        return list(found.values())

    def _write(self, known: Known, more: str, *, keep: bool) -> tuple[Known, Piece]:
        start = known.chunk.written
        content = known.content[:start] + more
        known.content = content
        known.landed -= set(range(start, len(content)))
        known.writers += 1
        piece = self.catalog.write(known.chunk, len(content), _key(content), keep=keep)
        assert (piece.start, piece.stop) == (start, len(content))
        self.in_flight.append((known, piece))
        return known, piece

    # ---- writing --------------------------------------------------------------------------------------------------

    @rule(target=pieces, group=st.integers(0, GROUPS - 1), text=LETTERS, keep=st.booleans())
    def write_new(self, group: int, text: str, *, keep: bool) -> Written:
        """Reserve a slot, for which a chunk may be evicted, and write the first piece of the slot's new chunk."""
        held = self._holders()
        before = {id(c): [mark.key for mark in c.marks] for c in held}
        chunk = self.catalog.reserve(group)
        for c in held:
            assert [mark.key for mark in c.marks] == before[id(c)]
            assert chunk is None or chunk.slot != c.slot, "the slot of a held chunk was handed out"
        if chunk is None:
            assert len({c.slot for c in held}) == SLOTS, "refused while a chunk could be evicted"
            return multiple()
        assert 0 <= chunk.slot < SLOTS
        known = self.known[id(chunk)] = Known(chunk)
        return self._write(known, text, keep=keep)

    @rule(group=st.integers(0, GROUPS - 1))
    def reserve_in_vain(self, group: int) -> None:
        """Reserve a slot and release it unwritten."""
        chunk = self.catalog.reserve(group)
        if chunk is not None:
            self.catalog.abandon(chunk)

    @precondition(lambda self: self.in_flight or self._findable())
    @rule(target=pieces, data=st.data(), text=LETTERS, keep=st.booleans())
    def grow(self, data: st.DataObject, text: str, *, keep: bool) -> Written:
        """Write a further piece of a chunk that can be found or is being written."""
        chunks = self._findable() + [k.chunk for k, _ in self.in_flight if not k.dropped]
        fits = [c for c in chunks if c.written + len(text) <= UNITS]
        if not fits:
            return multiple()
        return self._write(self.known[id(data.draw(st.sampled_from(fits)))], text, keep=keep)

    @rule(item=consumes(pieces))
    def land(self, item: tuple[Known, Piece]) -> None:
        """Land a piece on every rank."""
        known, piece = item
        self.in_flight.remove(item)
        known.writers -= 1
        whole = not known.dropped and set(range(piece.start)) <= known.landed
        assert self.catalog.landed(piece) == whole
        if whole:
            known.landed |= set(range(piece.start, piece.stop))

    @rule(item=consumes(pieces))
    def lose(self, item: tuple[Known, Piece]) -> None:
        """Fail a piece on one rank."""
        known, piece = item
        self.in_flight.remove(item)
        known.writers -= 1
        self.catalog.lost(piece)

    # ---- reading --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self._findable())
    @rule(target=owners, data=st.data())
    def lease(self, data: st.DataObject) -> Owner:
        """Let a request lease some of the findable chunks."""
        self.number += 1
        owner = Owner(f"r{self.number}", 1)
        chunks = data.draw(st.lists(st.sampled_from(self._findable()), min_size=1, max_size=3, unique_by=id))
        self.catalog.lease(owner, chunks)
        self.leased[owner] = chunks
        return owner

    @rule(owner=consumes(owners))
    def release(self, owner: Owner) -> None:
        """Release a request's leases. A second release does nothing."""
        assert self.catalog.release(owner) == len(self.leased.pop(owner))
        assert self.catalog.release(owner) == 0

    @precondition(lambda self: self._findable())
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        """Keep a chunk's mark, and refresh some chunks."""
        chunk = data.draw(st.sampled_from(self._findable()))
        self.catalog.keep_mark(chunk, data.draw(st.sampled_from(chunk.marks)).key)
        self.catalog.refresh(iter([chunk]))

    @rule()
    def reset(self) -> None:
        """Reset the catalog."""
        self.catalog.reset()
        assert not self._findable()
        for known, _ in self.in_flight:
            known.dropped = True

    # ---- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def integrity(self) -> None:
        """Check that the catalog is consistent."""
        check_integrity(self.catalog)

    @invariant()
    def found_means_landed(self) -> None:
        """Each key leads to a chunk whose units, up to the key's mark, have landed and hold the key's content."""
        for group in range(GROUPS):
            for key in self.catalog.index(group):
                chunk = self.catalog.find(group, key)
                assert chunk is not None
                known = self.known[id(chunk)]
                assert chunk.group == group
                assert not known.dropped
                (mark,) = [m for m in chunk.marks if m.key == key]
                assert _key(known.content[: mark.units]) == key
                assert set(range(mark.units)) <= known.landed
                assert self.catalog.known(group, key)

    @invariant()
    def counts(self) -> None:
        """Check leases and writers against the model, and that a leased chunk keeps its slot."""
        assert self.catalog.leases == sum(map(len, self.leased.values()))
        assert self.catalog.writing == len(self.in_flight)
        slots = [c.slot for c in {id(c): c for c in self._holders()}.values()]
        assert len(set(slots)) == len(slots) <= self.catalog.used

    def teardown(self) -> None:
        """End all pieces and leases, reset the catalog, and check that nothing is left."""
        for i, (_, piece) in enumerate(self.in_flight):
            if i % 2:
                self.catalog.landed(piece)
            else:
                self.catalog.lost(piece)
        for owner in self.leased:
            self.catalog.release(owner)
        check_integrity(self.catalog)
        self.catalog.reset()
        check_integrity(self.catalog)
        for _ in range(SLOTS):
            self.catalog.sweep()
        check_integrity(self.catalog)
        assert (self.catalog.used, self.catalog.leases, self.catalog.writing) == (0, 0, 0)
        assert not any(self.catalog._pending)
        assert not self.catalog.leased
        assert len(self.catalog._policy) == 0


class S3FifoCatalogModel(CatalogModel):
    """The same test with the policy S3-FIFO."""

    policy = "s3fifo"


class SessionsCatalogModel(CatalogModel):
    """The same test with the policy that uses the order of chunks in prefixes."""

    policy = "sessions"


class LargeCatalogModel(CatalogModel):
    """The same test with mappings that are divided into shards, as in large pools."""

    policy = "sessions"

    def __init__(self) -> None:
        """Start with free slots."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(large, "PLAIN_MAX", 0)
            super().__init__()
        assert type(self.catalog.index(0)) is large.Shards


class StaleCatalogModel(CatalogModel):
    """The same test, but most of the chunks that a reset drops are removed much later."""

    policy = "sessions"

    def __init__(self) -> None:
        """Start with free slots."""
        super().__init__()
        self.catalog.sweep_slots = 1


TestStaleCatalog = StaleCatalogModel.TestCase
TestStaleCatalog.settings = examples(150, 40)
TestCatalog = CatalogModel.TestCase
TestCatalog.settings = examples(150, 40)
TestS3FifoCatalog = S3FifoCatalogModel.TestCase
TestS3FifoCatalog.settings = examples(100, 40)
TestSessionsCatalog = SessionsCatalogModel.TestCase
TestSessionsCatalog.settings = examples(100, 40)
TestLargeCatalog = LargeCatalogModel.TestCase
TestLargeCatalog.settings = examples(100, 40)
