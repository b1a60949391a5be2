"""The holder's policy gets the same calls as the policy of a private pool."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator, Sequence

import pytest

from kvpipe.cache.policy import Lru, Sessions
from kvpipe.cache.policy.base import Evictable, Policy
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.node.clients import NodeChunk, NodeClient
from kvpipe.node.evictor import HELD_LOOK_MAX, LOOK_MAX, Evictor, evicting
from kvpipe.node.keeper import Keeper
from kvpipe.node.layout import VERSION, Process, SlotRecord, link_of
from kvpipe.node.ledger import Ledger
from kvpipe.node.messages import USES_BYTES_MAX, Hello, Publish, SlotBatch, Use
from kvpipe.node.replica import STAMP_BYTES, stamp_of
from kvpipe.node.segment import Segment, create
from kvpipe.node.uses import WAITING_BYTES_MAX, UseQueue
from kvpipe.statemachine import node_slot as m

SLOTS = 32
NOW_S = 5.0


class Heard(Sessions):
    """The policy `sessions`, which notes its calls."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.calls: list[tuple[object, ...]] = []

    def request(self, now_s: float, *, over: bool) -> None:
        """Note the call."""
        self.calls.append(("request", now_s, over))
        super().request(now_s, over=over)

    def answered(self, tokens: int) -> None:
        """Note the call."""
        self.calls.append(("answered", tokens))
        super().answered(tokens)

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """Note the call."""
        self.calls.append(("insert_all", [chunk.identity for chunk in chunks], hit))
        super().insert_all(chunks, hit=hit)

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """Note the call."""
        self.calls.append(("remove_all", [chunk.identity for chunk in chunks]))
        super().remove_all(chunks)

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """Note the call."""
        self.calls.append(("refresh_all", [chunk.identity for chunk in chunks]))
        super().refresh_all(chunks)

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """Note the call."""
        self.calls.append(("hint", chunk.identity, hint))
        super().hint(chunk, hint)


class Engine:
    """An engine and its holder over a small memory."""

    def __init__(self) -> None:
        self.fd = create(SLOTS, 64, rows=2, ring=64)
        self.segment = Segment(self.fd)
        self.begin(Heard(SLOTS))

    def begin(self, policy: Policy) -> None:
        """Let another holder take over."""
        self.policy = policy
        self.keeper = Keeper(Ledger(self.segment), policy, fence=lambda: None, clock=lambda: NOW_S)
        self.keeper.use_more(SLOTS)
        hello = Hello(VERSION, "scheduler", b"1" * 16, b"n" * 32, SLOTS, 64)
        self.client: NodeClient = self.keeper.greet(hello, Process(1, 1))

    def saves(self, *keys: bytes, over: bool = False) -> bytes:
        """Save the chunks of a prompt, and return their joined stamps, the first chunk first."""
        stamps = b""
        for before, key in zip((b"", *keys), keys, strict=False):
            ((slot, number),) = self.keeper.batch(self.client, SlotBatch(0, want=1)).granted
            one = Publish(slot, number, 0, key, 1, behind=before and link_of(before), over=over)
            self.keeper.batch(self.client, SlotBatch(0, (one,)))
            stamps += stamp_of(slot, number + 1)
        return stamps

    def uses(self, *uses: Use) -> list[tuple[object, ...]]:
        """Report uses, and return the policy's calls."""
        assert isinstance(self.policy, Heard)
        self.policy.calls.clear()
        self.keeper.batch(self.client, SlotBatch(0, used=uses))
        return self.policy.calls

    def evicted(self, count: int) -> list[bytes]:
        """Let the holder evict `count` chunks, and return their keys."""
        before = {chunk.found_by[2] for chunk in self.keeper._chunks.values()}
        self.keeper._evict(count)
        return sorted(before - {chunk.found_by[2] for chunk in self.keeper._chunks.values()})


def _reversed(stamps: bytes) -> bytes:
    return b"".join(stamps[at : at + STAMP_BYTES] for at in range(len(stamps) - STAMP_BYTES, -1, -STAMP_BYTES))


def _names(*keys: bytes, namespace: int = 0) -> list[bytes]:
    return [link_of(key) + namespace.to_bytes(4, "little") for key in keys]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Return an engine."""
    made = Engine()
    yield made
    os.close(made.fd)


def test_load_and_end_of_a_request_reach_the_policy(engine: Engine) -> None:
    """A load leases the chunks and releases them. The end of a request has the length of its answer."""
    stamps = _reversed(engine.saves(b"a", b"b"))
    uses = Use("leased", stamps), Use("loaded", stamps), Use("ended", stamps, 7), Use("touched", stamps)
    assert engine.uses(*uses) == [
        ("request", NOW_S, False), ("remove_all", _names(b"a", b"b")),
        ("request", NOW_S, False), ("insert_all", _names(b"b", b"a"), True),
        ("request", NOW_S, True), ("answered", 7), ("refresh_all", _names(b"b", b"a")),
        ("request", NOW_S, False), ("refresh_all", _names(b"b", b"a")),
    ]  # fmt: skip


def test_hint_reaches_the_policy_with_the_time_of_the_holder(engine: Engine) -> None:
    """An engine sends how many seconds are left. All chunks get one hint object, which policies compare by `is`."""
    stamps = _reversed(engine.saves(b"a", b"b"))
    _, (_, last, hint), (_, first, same) = engine.uses(Use("resume", stamps, in_s=3.0))
    assert [last, first] == _names(b"b", b"a")
    assert hint == Hint(Action.RESUME, NOW_S + 3)
    assert same is hint


def test_late_save_ends_with_its_request(engine: Engine) -> None:
    """A chunk that lands after the end of its request waits for the next request from now on."""
    engine.saves(b"a", over=True)
    assert isinstance(engine.policy, Heard)
    assert ("request", NOW_S, True) in engine.policy.calls


def test_policy_knows_the_prefix_also_in_a_new_holder(engine: Engine) -> None:
    """The end of a prompt is evicted before its beginning, although the beginning was saved first."""
    engine.saves(b"a", b"b", b"c")
    engine.saves(b"x")
    engine.begin(Heard(SLOTS))
    assert engine.evicted(1) == [b"c"]
    assert engine.evicted(1) == [b"b"]


def test_use_that_comes_in_parts_is_one_call(engine: Engine) -> None:
    """Otherwise the policy would take the second part for another request."""
    stamps = _reversed(engine.saves(b"a", b"b"))
    first = Use("ended", stamps[:STAMP_BYTES], more=True)
    assert engine.uses(first) == []
    assert engine.uses(Use("ended", stamps[STAMP_BYTES:])) == [
        ("request", NOW_S, True), ("refresh_all", _names(b"b", b"a")),
    ]  # fmt: skip


def test_leased_chunk_is_held_until_its_lease_ends(engine: Engine) -> None:
    """A search meets a held chunk only once. After the lease the chunk can be evicted, although nothing was read."""
    engine.begin(Heard(SLOTS))
    engine.saves(b"a", b"b")
    leases = engine.segment.leases_of(engine.client.row)
    leases[engine.keeper._index[0, 0, b"b"].slot] = 1
    assert engine.evicted(1) == [b"a"]
    assert len(engine.policy) == 0
    assert engine.evicted(1) == []
    leases[engine.keeper._index[0, 0, b"b"].slot] = 0
    assert engine.evicted(1) == [b"b"]


def test_end_of_a_request_does_not_refresh_a_leased_chunk(engine: Engine) -> None:
    """A private pool does not either. If the lease has ended, the chunk is refreshed."""
    stamps = _reversed(engine.saves(b"a", b"b"))
    leases, slot = engine.segment.leases_of(engine.client.row), engine.keeper._index[0, 0, b"b"].slot
    leases[slot] = 1
    assert engine.evicted(1) == [b"a"]
    assert engine.uses(Use("ended", stamps))[-1] == ("refresh_all", [])
    leases[slot] = 0
    assert engine.uses(Use("ended", stamps))[-1] == ("refresh_all", _names(b"b"))


def test_repeated_and_wrong_stamps_are_harmless(engine: Engine) -> None:
    """A client may name a chunk twice, an old generation, or bytes that are no stamp."""
    stamps = engine.saves(b"a")
    calls = engine.uses(Use("loaded", stamps + stamps + stamp_of(99, 1) + stamp_of(-1, 1) + stamp_of(0, 9) + b"odd"))
    assert calls[-1] == ("insert_all", _names(b"a"), True)


def test_failing_policy_is_replaced_by_lru(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks can still be evicted, the least recently used chunk first."""
    guarded = evicting("sessions", SLOTS)
    engine.begin(guarded)
    engine.saves(b"a", b"b")
    monkeypatch.setattr(Sessions, "victim", lambda _: 1 / 0)
    assert engine.evicted(1) == [b"a"]
    assert isinstance(evicting("no such policy", SLOTS), Lru)


@pytest.mark.parametrize("call", ["victim", "remove", "dropped"])
def test_policy_that_fails_midway_names_no_chunk_twice(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """LRU is filled with the chunks of the region. The chunks that the call has removed already are not among them."""
    right, calls = getattr(Sessions, call), list[object]()

    def fails_then(*arguments: object) -> object:
        calls.append(arguments)
        return right(*arguments) if len(calls) == 1 else 1 / 0

    monkeypatch.setattr(Sessions, call, fails_then)
    engine.begin(evicting("sessions", SLOTS))
    engine.saves(b"a", b"b", b"c", b"d")
    if call == "victim":
        assert len(engine.evicted(2)) == 2
    else:
        engine.keeper._evict_chunks([*engine.keeper._chunks.values()][:2])
    assert len(calls) == 2
    assert len(engine.keeper.evictor._policy) == 2
    assert len(engine.evicted(4)) == 2


def test_chunks_stay_when_the_policy_changes(engine: Engine) -> None:
    """The next policy knows all chunks, with their prefixes, and none of the places of the earlier policy."""
    engine.saves(b"x")
    stamps = _reversed(engine.saves(b"a", b"b", b"c"))
    engine.uses(Use("leased", stamps[:STAMP_BYTES]))  # held at the time of the change
    policies: tuple[Policy, ...] = (evicting("s3fifo", SLOTS), Lru(), Heard(SLOTS))
    for policy in policies:
        engine.keeper.use_policy(policy)
        assert len(policy) == 4
        assert not engine.keeper.evictor._held
    engine.policy = policy
    assert engine.keeper.counts["published"] == 4
    engine.uses(Use("ended", stamps))
    assert [engine.evicted(1) for _ in range(4)] == [[b"x"], [b"c"], [b"b"], [b"a"]]


def test_use_that_a_lost_connection_has_begun_is_forgotten(engine: Engine) -> None:
    """Otherwise the next use of the engine would have foreign chunks."""
    stamps = engine.saves(b"a", b"b")
    assert engine.uses(Use("ended", stamps[:STAMP_BYTES], more=True)) == []
    engine.keeper.hung_up(engine.client)
    engine.keeper.greet(Hello(VERSION, "scheduler", b"1" * 16, b"n" * 32, SLOTS, 64), Process(1, 1))
    assert engine.uses(Use("touched", stamps[STAMP_BYTES:]))[-1] == ("refresh_all", _names(b"b"))


@pytest.mark.parametrize("in_s", [math.nan, math.inf, -math.inf])
def test_hint_without_a_finite_time_is_ignored(engine: Engine, in_s: float) -> None:
    """A policy cannot compare such a time."""
    stamps = engine.saves(b"a")
    assert [call[0] for call in engine.uses(Use("resume", stamps, in_s=in_s))] == ["request"]


def test_links_in_a_circle_are_harmless(engine: Engine) -> None:
    """A client may name any chunk as the previous chunk, also the chunk itself."""
    for key, behind in ((b"a", b"b"), (b"b", b"a"), (b"c", b"c")):
        ((slot, number),) = engine.keeper.batch(engine.client, SlotBatch(0, want=1)).granted
        one = Publish(slot, number, 0, key, 1, behind=link_of(behind))
        engine.keeper.batch(engine.client, SlotBatch(0, (one,), used=(Use("ended", stamp_of(slot, number + 1)),)))
    assert len(engine.evicted(4)) == 3


class Leased:
    """An evictor whose chunks are all held. The even slots are leased. `looks` counts the reads of leases."""

    def __init__(self, count: int) -> None:
        records = (SlotRecord(slot, slot, m.PUBLISHED, 1, key=b"%d" % slot) for slot in range(count))
        self.chunks, self.looks = {record.slot: NodeChunk(record) for record in records}, 0
        self.evictor = Evictor(Lru(), lambda: NOW_S, lambda: [*self.chunks.values()], self._is_leased)
        for chunk in self.chunks.values():
            self.evictor.published(chunk, over=True)
        engine = Engine()
        stamps = b"".join(stamp_of(slot, 1) for slot in self.chunks)
        self.evictor.used(engine.client, Use("leased", stamps), self.chunks, memoryview(array("q", [1]) * count))
        os.close(engine.fd)

    def _is_leased(self, slot: int) -> bool:
        self.looks += 1
        return slot % 2 == 0


def test_search_looks_at_few_held_chunks() -> None:
    """Engines may lease most chunks of a large memory. A search without another victim looks at more of them."""
    leased = Leased(8 * HELD_LOOK_MAX)
    found, _ = leased.evictor.victims(1)
    assert len(found) == 1
    assert leased.looks <= LOOK_MAX + HELD_LOOK_MAX + 1
    leased.looks = 0
    assert len(leased.evictor.victims(1)[0]) == 1
    assert leased.looks <= LOOK_MAX + 1


def test_later_searches_look_at_the_other_held_chunks() -> None:
    """Each chunk whose lease has ended is found by some search."""
    leased = Leased(4 * HELD_LOOK_MAX)
    found = [chunk.slot for _ in range(6) for chunk in leased.evictor.victims(4 * HELD_LOOK_MAX)[0]]
    assert sorted(found) == [*range(1, 4 * HELD_LOOK_MAX, 2)]


def test_long_use_is_divided_and_old_uses_are_dropped() -> None:
    """A batch has a largest size, and uses wait for a holder in bounded memory."""
    queue = UseQueue()
    queue.add(Use("loaded", b""))
    assert not queue
    queue.add(Use("loaded", b"1" * (USES_BYTES_MAX + STAMP_BYTES)))
    queue.add(Use("ended", b"2" * STAMP_BYTES, 3))
    (first,), (rest, last) = queue.take(), queue.take()
    assert (len(first.stamps), first.more) == (USES_BYTES_MAX, True)
    assert (len(rest.stamps), rest.more, last.kind, last.answer) == (STAMP_BYTES, False, "ended", 3)
    assert queue.take() == ()
    for number in range(3):
        queue.add(Use("loaded", bytes([number]) * (WAITING_BYTES_MAX // 2)))
    assert {use.stamps[0] for use in (*queue.take(), *queue.take())} == {1}
