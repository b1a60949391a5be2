"""Tests of the catalog's rules, one by one. Interleavings are tested in property_tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from kvpipe.cache.catalog import KEPT_MARKS_MAX, Catalog
from kvpipe.cache.chunks import Owner
from kvpipe.cache.policy import Lru
from kvpipe.cache.policy.base import Evictable
from kvpipe.cache.policy.guard import GuardedPolicy
from kvpipe.statemachine.core import IllegalTransition
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.trace.log import Counters

ME, OTHER = Owner("me", 1), Owner("other", 1)


def _catalog(slots: int = 2, groups: int = 1) -> Catalog:
    return Catalog(slots, groups, Lru(), Counters())


def _publish(catalog: Catalog, key: bytes, units: int = 1, group: int = 0) -> None:
    chunk = catalog.reserve(group)
    assert chunk is not None
    assert catalog.landed(catalog.write(chunk, units, key, keep=False))


def test_a_chunk_is_invisible_until_its_piece_has_landed() -> None:
    """A key is known while its piece is being written. No lookup finds the key before the piece has landed."""
    catalog = _catalog()
    chunk = catalog.reserve(0)
    assert chunk is not None
    piece = catalog.write(chunk, 2, b"k", keep=False)
    assert catalog.find(0, b"k") is None
    assert catalog.known(0, b"k")
    assert catalog.writing == 1
    assert catalog.landed(piece)
    assert catalog.find(0, b"k") is chunk
    assert catalog.writing == 0
    check_integrity(catalog)


def test_no_slot_beyond_a_limit_is_handed_out() -> None:
    """A slot beyond the limit is not used, even if it was ready, because some rank's pool does not have it."""
    catalog = _catalog(4)
    catalog.limit(2)
    catalog.use_more(4)
    assert (catalog.slots, catalog.ready, catalog.used) == (2, 2, 0)
    for key in (b"a", b"b", b"c"):
        _publish(catalog, key)
    assert {chunk.slot for chunk in catalog.index(0).values()} == {0, 1}
    catalog.limit(4)
    assert (catalog.slots, catalog.ready, catalog.used) == (2, 2, 2)
    check_integrity(catalog)


def test_a_lost_first_piece_frees_the_slot() -> None:
    """A chunk whose write failed is never found, and its slot is free again."""
    catalog = _catalog(1)
    chunk = catalog.reserve(0)
    assert chunk is not None
    catalog.lost(catalog.write(chunk, 1, b"k", keep=False))
    assert (catalog.used, catalog.known(0, b"k")) == (0, False)
    assert catalog.reserve(0) is not None


def test_a_later_piece_without_its_beginning_is_dropped() -> None:
    """A piece that lands after an earlier piece was lost cannot be found."""
    catalog = _catalog()
    chunk = catalog.reserve(0)
    assert chunk is not None
    first = catalog.write(chunk, 1, b"1", keep=False)
    second = catalog.write(chunk, 2, b"12", keep=False)
    catalog.lost(first)
    assert not catalog.landed(second)
    assert catalog.find(0, b"12") is None
    assert catalog.used == 0
    check_integrity(catalog)


def test_growth_moves_the_mark_unless_it_is_kept() -> None:
    """A chunk that grows is found under its new key.

    The chunk stays findable under its old key only if a request has used the old key.
    """
    catalog = _catalog()
    _publish(catalog, b"1")
    chunk = catalog.find(0, b"1")
    assert chunk is not None
    assert catalog.landed(catalog.write(chunk, 2, b"12", keep=False))
    assert catalog.find(0, b"1") is None
    catalog.keep_mark(chunk, b"12")
    assert catalog.landed(catalog.write(chunk, 3, b"123", keep=False))
    assert catalog.find(0, b"12") is catalog.find(0, b"123") is chunk
    assert chunk.identity == b"123"
    check_integrity(catalog)


def test_kept_marks_are_bounded() -> None:
    """However often a chunk grows, it keeps a bounded number of marks."""
    catalog = _catalog()
    _publish(catalog, b"\1")
    chunk = catalog.find(0, b"\1")
    assert chunk is not None
    for units in range(2, 20):
        catalog.landed(catalog.write(chunk, units, bytes([units]), keep=True))
    assert len(chunk.marks) == len(catalog.index(0)) == KEPT_MARKS_MAX
    check_integrity(catalog)


def test_second_save_of_the_same_content_frees_its_slot() -> None:
    """If two requests save the same prefix, the second chunk is dropped unless it has another key."""
    catalog = _catalog()
    chunks = [catalog.reserve(0), catalog.reserve(0)]
    pieces = [catalog.write(c, 1, b"k", keep=False) for c in chunks if c is not None]
    catalog.landed(pieces[0])
    catalog.landed(pieces[1])
    assert catalog.find(0, b"k") is chunks[0]
    assert catalog.used == 1
    check_integrity(catalog)


def test_reset_drops_a_copy_that_cannot_be_found_yet() -> None:
    """A growing chunk has landed only units that another chunk already holds. A reset drops both chunks."""
    catalog = _catalog(3)
    _publish(catalog, b"1")
    twin = catalog.reserve(0)
    assert twin is not None
    first = catalog.write(twin, 1, b"1", keep=False)
    second = catalog.write(twin, 2, b"12", keep=False)
    catalog.landed(first)
    check_integrity(catalog)
    assert catalog.reset() == 2
    assert not catalog.landed(second)
    assert catalog.find(0, b"12") is None
    assert catalog.used == 0
    check_integrity(catalog)


def test_a_leased_chunk_is_never_evicted() -> None:
    """If every chunk is leased or being written, a reservation is refused and counted. After a release it succeeds."""
    catalog = _catalog(2)
    _publish(catalog, b"k")
    chunk = catalog.find(0, b"k")
    assert chunk is not None
    catalog.lease(ME, [chunk])
    catalog.lease(OTHER, [chunk])
    writing = catalog.reserve(0)
    assert writing is not None
    piece = catalog.write(writing, 1, b"w", keep=False)
    assert catalog.reserve(0) is None
    assert catalog.counters["save_dropped_pool_full"] == 1
    assert catalog.release(ME) == 1
    assert catalog.reserve(0) is None
    assert catalog.find(0, b"k") is chunk
    assert catalog.release(OTHER) == 1
    assert catalog.release(OTHER) == 0
    fresh = catalog.reserve(0)
    assert fresh is not None
    assert fresh.slot == chunk.slot
    assert catalog.find(0, b"k") is None
    assert catalog.counters["evicted"] == 1
    catalog.abandon(fresh)
    catalog.landed(piece)
    check_integrity(catalog)


def test_leases_taken_before_a_rejected_lease_can_be_released() -> None:
    """If one chunk cannot be leased, the owner can still release the leases that it took before."""
    catalog = _catalog(2)
    _publish(catalog, b"k")
    chunk, writing = catalog.find(0, b"k"), catalog.reserve(0)
    assert chunk is not None
    assert writing is not None
    piece = catalog.write(writing, 1, b"w", keep=False)
    with pytest.raises(IllegalTransition, match="no piece has landed"):
        catalog.lease(ME, [chunk, writing])
    check_integrity(catalog)
    assert catalog.release(ME) == 1
    assert catalog.leases == 0
    catalog.lost(piece)
    check_integrity(catalog)


def test_the_end_of_a_prefix_is_evicted_first() -> None:
    """After a release, the last chunk of the prefix is evicted before the first."""
    catalog = _catalog(2)
    for key in (b"1", b"12"):
        _publish(catalog, key)
    chunks = [c for key in (b"1", b"12") if (c := catalog.find(0, key)) is not None]
    catalog.lease(ME, chunks)
    catalog.release(ME)
    assert catalog.reserve(0) is not None
    assert catalog.find(0, b"1") is chunks[0]
    assert catalog.find(0, b"12") is None


def test_refresh_orders_idle_chunks() -> None:
    """Refreshed chunks are evicted later. A refresh does not change chunks that a request holds."""
    catalog = _catalog(2)
    for key in (b"a", b"b"):
        _publish(catalog, key)
    first = catalog.find(0, b"a")
    assert first is not None
    catalog.refresh(iter([first]))
    catalog.reserve(0)
    assert catalog.find(0, b"a") is first
    assert catalog.find(0, b"b") is None


def test_reset_lets_readers_and_writers_finish() -> None:
    """After a reset no chunk can be found. A held slot becomes free when its last holder has ended."""
    catalog = _catalog(3)
    _publish(catalog, b"read")
    _publish(catalog, b"idle")
    chunk, writing = catalog.find(0, b"read"), catalog.reserve(0)
    assert chunk is not None
    assert writing is not None
    catalog.lease(ME, [chunk])
    piece = catalog.write(writing, 1, b"w", keep=False)
    assert catalog.reset() == 3
    assert not catalog.index(0)
    assert not catalog.known(0, b"w")
    assert catalog.used == 2
    check_integrity(catalog)
    assert not catalog.landed(piece)
    assert catalog.release(ME) == 1
    assert (catalog.used, catalog.leases, catalog.writing) == (0, 0, 0)
    check_integrity(catalog)


def test_equal_keys_of_two_groups_are_two_chunks() -> None:
    """The same key in two groups names two chunks."""
    catalog = _catalog(2, groups=2)
    _publish(catalog, b"k", group=0)
    assert catalog.find(1, b"k") is None
    _publish(catalog, b"k", group=1)
    assert catalog.find(0, b"k") is not catalog.find(1, b"k")


def test_the_integrity_check_sees_a_corruption() -> None:
    """Other tests rely on this check, which fails if slots, leases or the policy disagree."""
    for corrupt in ("_free", "leases", "_policy", "ready"):
        catalog = _catalog()
        _publish(catalog, b"k")
        check_integrity(catalog)
        chunk = catalog.find(0, b"k")
        assert chunk is not None
        if corrupt == "_free":
            catalog._free.append(chunk.slot)
        elif corrupt == "leases":
            chunk.leases += 1
        elif corrupt == "ready":
            chunk.ready = 0
        else:
            catalog._policy.remove(chunk)
        with pytest.raises(AssertionError):
            check_integrity(catalog)


def test_a_chunk_grows_again_after_a_lost_piece() -> None:
    """Only the lost piece is lost. The next piece begins at the end of the landed units, and can be found."""
    catalog = _catalog()
    _publish(catalog, b"1")
    chunk = catalog.find(0, b"1")
    assert chunk is not None
    catalog.lost(catalog.write(chunk, 3, b"12x", keep=False))
    assert chunk.written == 1
    again = catalog.write(chunk, 2, b"12", keep=False)
    assert again.start == 1
    assert catalog.landed(again)
    assert catalog.find(0, b"12") is chunk
    check_integrity(catalog)


def test_only_slots_that_are_ready_are_handed_out() -> None:
    """A slot that is not ready is neither free nor used, so the catalog evicts an older chunk to make room."""
    catalog = Catalog(4, 1, Lru(), Counters(), ready=0)
    assert catalog.reserve(0) is None
    catalog.use_more(2)
    for key in (b"a", b"b", b"c"):
        _publish(catalog, key)
        check_integrity(catalog)
    assert (catalog.used, catalog.ready) == (2, 2)
    assert (catalog.known(0, b"a"), catalog.known(0, b"c")) == (False, True)
    catalog.use_more(1)  # a late report of fewer ready slots changes nothing
    assert catalog.ready == 2
    catalog.use_more(9)
    assert (catalog.used, catalog.ready) == (2, 4)
    _publish(catalog, b"d")
    _publish(catalog, b"e")
    assert catalog.known(0, b"b")
    assert {chunk.slot for chunk in catalog.index(0).values()} == {0, 1, 2, 3}
    check_integrity(catalog)


def test_a_slot_that_was_used_is_used_again_first() -> None:
    """Using a slot again takes no more memory from the system, and the slot may still be in the processor's caches."""
    catalog = Catalog(8, 1, Lru(), Counters(), ready=2)
    _publish(catalog, b"a")
    chunk = catalog.reserve(0)
    assert chunk is not None
    catalog.abandon(chunk)
    catalog.use_more(8)
    again = catalog.reserve(0)
    assert again is not None
    assert again.slot == chunk.slot


def test_released_chunk_counts_as_used_at_its_release() -> None:
    """A released chunk counts as used at the time of its release, even if nothing else has happened for an hour."""
    now = [10.0]
    catalog = Catalog(4, 1, Lru(), Counters(), clock=lambda: now[0])
    chunk = catalog.reserve(0)
    assert chunk is not None
    catalog.landed(catalog.write(chunk, 1, b"a", keep=True))
    catalog.lease(Owner("pin", 1), [chunk])
    now[0] = 3610.0
    catalog.release(Owner("pin", 1))
    assert chunk.used_s == 3610


def test_chunks_used_in_one_second_share_an_object() -> None:
    """Chunks that were used in the same second share one `used_s` object."""
    now = [70_000.25]
    catalog = Catalog(4, 1, Lru(), Counters(), clock=lambda: now[0])
    _publish(catalog, b"a")
    now[0] += 0.5
    _publish(catalog, b"b")
    first, second = catalog.find(0, b"a"), catalog.find(0, b"b")
    assert first is not None
    assert second is not None
    assert first.used_s is second.used_s
    catalog.refresh([first])
    assert first.used_s is second.used_s


def test_lost_piece_does_not_count_as_the_end_of_a_request() -> None:
    """`lost` passes `over=False` to the policy, even if the preceding call passed `over=True`."""

    class Noted(Lru):
        at_s, over = 0.0, False

        def request(self, now_s: float, *, over: bool) -> None:
            self.at_s, self.over = now_s, over

    policy = Noted()
    catalog = Catalog(4, 1, policy, Counters())
    chunk = catalog.reserve(0)
    assert chunk is not None
    piece = catalog.write(chunk, 1, b"a", keep=True)
    catalog.refresh([], over=True)
    assert policy.over
    catalog.lost(piece)
    assert not policy.over


def test_answered_policy_gets_the_length_of_an_answer() -> None:
    """The policy gets the length, if it is known, after the request's end and before its chunks count as used."""

    class Noted(Lru):
        noted: ClassVar[list[object]] = []

        def request(self, now_s: float, *, over: bool) -> None:
            del now_s
            self.noted.append(over)

        def answered(self, tokens: int) -> None:
            self.noted.append(tokens)

        def refresh_all(self, chunks: Sequence[Evictable]) -> None:
            self.noted.append("used")
            super().refresh_all(chunks)

    catalog = Catalog(4, 1, Noted(), Counters(), clock=lambda: 0.0)
    catalog.refresh([], answer=7)
    catalog.refresh([])
    assert Noted.noted == [True, 7, "used", True, "used"]


def test_session_policy_without_answered_is_called_as_before() -> None:
    """A policy without the method `answered` gets the same calls as in versions before `AnsweredPolicy`."""
    faults = list[str]()

    class Old(Lru):
        def request(self, now_s: float, *, over: bool) -> None:
            del now_s, over

    policy = GuardedPolicy(Old(), "old", lambda event, **_: faults.append(event))
    for one in (policy, Old()):
        Catalog(4, 1, one, Counters()).refresh([], answer=7)
    assert faults == []
