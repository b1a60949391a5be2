"""Several lookups of one step pin chunks. After a reset, later steps drop the remaining chunks."""

from __future__ import annotations

import pytest

from kvpipe.testing.node_integrity import check_node_integrity
from kvpipe.trace.miss_reasons import RESET
from tests.node.test_catalog import Worlds
from tests.rigs.node_replica import evict_all
from tests.rigs.scheduler_world import SAVE


def test_second_lookup_of_a_step_keeps_the_first_one_s_hit(worlds: Worlds) -> None:
    """The holder evicts chunks between two lookups. The first lookup has pinned its chunks, so both requests load."""
    first, second = worlds.start(), worlds.start()
    first.run(first.request("one", 8, shared=8))
    second.step()
    asked = [second.request(name, 8, shared=8, extra=1) for name in ("other", "third")]
    second.requests = asked
    tokens = [second.ask(asked[0])]
    evict_all(worlds.node.keeper)
    tokens.append(second.ask(asked[1]))
    assert tokens == [8 * 16, 8 * 16]
    for request in asked:
        second.side.admitted(request, second.allocate(request), 8 * 16)
        request.num_computed_tokens = 8 * 16
    loads = [job for job in second.step(*asked) if job.kind != SAVE]
    assert worlds.node.keeper.usage().evicting == 2
    assert len(loads) == 2
    for job in loads:
        second.end(job)
    second.step()
    assert worlds.node.keeper.usage().evicting == 0


def test_reset_drops_only_held_chunks_at_once(worlds: Worlds) -> None:
    """Later steps drop the other chunks. Until then, a lookup of these chunks misses, and its reason is the reset."""
    first = worlds.start()
    one, two = (first.request(name, 8) for name in ("one", "two"))
    first.run(one)
    first.run(two)
    first.catalog.sweep_slots = 1
    first.requests = [two]
    first.admit(two)
    jobs = first.step(two)
    assert first.catalog.reset() == 4
    assert first.catalog.stale == 2
    assert first.side.prefixes.why_short(one, 0) == RESET
    for stale in (1, 0, 0):
        first.step()
        check_node_integrity(first.catalog)
        assert first.catalog.stale == stale
    assert first.side.prefixes.why_short(one, 0) == RESET
    for job in jobs:
        first.end(job)
    check_node_integrity(first.catalog)


def test_reset_before_an_earlier_one_is_swept_forgets_everything(worlds: Worlds) -> None:
    """A reset forgets all chunks, even while an earlier sweep of old chunks is not finished.

    A change of weights has begun this sweep. Then the old weights came back, so the engine finds its chunks again until
    the reset.
    """
    first = worlds.start()
    first.catalog.sweep_slots = 1
    one = first.request("one", 8, shared=8)
    first.run(one)
    for digest in ("other", "weights"):
        first.side.ranks_ready({}, [digest])
        first.catalog.poll()
        first.catalog.poll()
    assert first.catalog.stale == 2
    assert first.found(one) == 8
    first.step()
    check_node_integrity(first.catalog)
    assert first.found(one) == 8
    assert first.catalog.reset() == 2
    assert first.catalog.stale == 1
    check_node_integrity(first.catalog)
    assert first.found(one) == 0


def test_granted_slot_forgets_its_old_chunk_when_the_journal_is_not_read(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of an old chunk is granted again. The old chunk's stamp neither pins nor drops the growing new chunk."""
    first = worlds.start(stock=16)
    first.run(first.request("one", 4, shared=4))
    (old,) = first.catalog.index(0).values()
    evict_all(worlds.node.keeper)
    spare = first.catalog.reserve(0)
    assert spare is not None
    for _ in range(2):  # the holder grants the old chunk's slot again, but the engine has not read the journal
        first.pool.poll()
    first.catalog.abandon(spare)
    first.pool.stock._free.sort(key=old.slot.__eq__)  # the next save takes the old chunk's slot
    two = first.request("two", 6)
    first.requests = [two]
    first.admit(two)
    monkeypatch.setattr(first.catalog._follower, "poll", lambda: None)
    jobs = first.step(two)
    check_node_integrity(first.catalog)
    growing = first.catalog.at(old.slot)
    assert growing is not None
    assert growing is not old
    assert first.ask(first.request("again", 4, shared=4, extra=1)) == 0
    for job in jobs:
        first.end(job)
    check_node_integrity(first.catalog)
    assert first.catalog.at(old.slot) is growing
