"""The keeper shares slots between engines, evicts chunks without leases, and is not harmed by wrong reports."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvpipe.cache.policy.lru import Lru
from kvpipe.node.clients import NodeClient, RefusedError
from kvpipe.node.keeper import Keeper
from kvpipe.node.layout import NAMESPACES_MAX, PROCESSES_MAX, VERSION, Process
from kvpipe.node.ledger import Ledger
from kvpipe.node.messages import BATCH_MAX, Hello, Publish, SlotBatch, Use
from kvpipe.node.replica import stamp_of
from kvpipe.node.segment import Segment, create
from tests.rigs.node_replica import evict_all

SLOTS, ROWS = 16, 4


class Node:
    """A keeper over a small memory, and the calls of engines."""

    def __init__(self) -> None:
        self.fd = create(SLOTS, 64, rows=ROWS, ring=64)
        self.segment = Segment(self.fd)
        self.fences = 0
        self.keeper = self.take_over()
        self.keeper.use_more(SLOTS)

    def take_over(self) -> Keeper:
        """Return another keeper of the same memory."""
        self.keeper = Keeper(Ledger(self.segment), Lru(), fence=self._fence)
        return self.keeper

    def _fence(self) -> None:
        self.fences += 1

    def engine(self, number: int, **changes: Any) -> NodeClient:
        """Attach an engine that has one process."""
        given: dict[str, Any] = {
            "version": VERSION, "role": "scheduler", "client": b"%016d" % number, "namespace": b"n" * 32,
            "slots": SLOTS, "slot_bytes": 64,
        }  # fmt: skip
        return self.keeper.greet(Hello(**given | changes), Process(number, 1))

    def grant(self, client: NodeClient, want: int, stock: int = 0) -> list[tuple[int, int]]:
        """Make new grants for an engine that has `stock` unused grants, and return the new grants."""
        return list(self.keeper.batch(client, SlotBatch(0, want=want, stock=stock)).granted)

    def publish(self, client: NodeClient, *keys: bytes) -> list[int]:
        """Publish chunks in new slots, one after the other, and return the slots."""
        slots = []
        for key in keys:
            ((slot, generation),) = self.grant(client, 1)
            self.keeper.batch(client, SlotBatch(0, (Publish(slot, generation, 0, key, 1),)))
            slots.append(slot)
        return slots


@pytest.fixture
def node() -> Iterator[Node]:
    """Return a node without engines."""
    made = Node()
    yield made
    os.close(made.fd)


def test_stocks_are_a_quarter_of_the_slots(node: Node) -> None:
    """The other three quarters are for chunks, no matter how many engines ask for slots."""
    first = node.engine(1)
    assert len(node.grant(first, 100)) == SLOTS // 4
    assert node.grant(first, 100, SLOTS // 4) == []
    second = node.engine(2)
    assert len(node.grant(second, 100)) == SLOTS // 8
    assert node.keeper.usage().granted == SLOTS // 4 + SLOTS // 8


def test_busy_engine_gets_slots_beside_idle_ones(node: Node) -> None:
    """A slot does not count as stock while a save writes it or after its chunk is reported.

    One engine has at most half of all slots.
    """
    busy = node.engine(1)
    for number in range(2, ROWS + 1):
        node.grant(node.engine(number), 100)
    for _ in range(SLOTS // 2):
        assert len(node.grant(busy, 100)) == 1  # the slot of the earlier grant is being written
    assert node.grant(busy, 100) == []
    assert node.keeper.usage().free == SLOTS // 2 - (SLOTS // 8 + SLOTS // 12 + SLOTS // 16)


def test_slots_without_memory_are_not_granted(node: Node) -> None:
    """A slot is granted only when the slot has memory."""
    fd = create(SLOTS, 64, rows=ROWS, ring=64)
    keeper = Keeper(Ledger(Segment(fd)), Lru(), fence=lambda: None)
    hello = Hello(VERSION, "scheduler", b"1" * 16, b"n" * 32, SLOTS, 64)
    client = keeper.greet(hello, Process(1, 1))
    assert keeper.batch(client, SlotBatch(0, want=8)).granted == ()
    keeper.use_more(2)
    assert keeper.batch(client, SlotBatch(0, want=8)).granted == ((0, 0),)
    assert keeper.usage().unready == SLOTS - 2
    os.close(fd)
    assert node.keeper.usage().unready == 0


def test_least_recently_used_chunk_is_evicted_across_engines(node: Node) -> None:
    """A report that any engine has read a chunk counts as a use of the chunk."""
    first, second = node.engine(1), node.engine(2)
    slots = node.publish(first, *[b"%d" % n for n in range(SLOTS)])
    node.keeper.batch(second, SlotBatch(0, used=(Use("loaded", stamp_of(slots[0], 1) + stamp_of(slots[1], 99)),)))
    assert [slot for slot, _ in node.grant(second, 2)] == [slots[2], slots[1]]
    assert node.keeper.counts["evicted"] == 2
    assert node.fences == 1


def test_leased_chunk_is_not_evicted(node: Node) -> None:
    """If all chunks are leased, no slot is granted."""
    first, second = node.engine(1), node.engine(2)
    slots = node.publish(first, *[b"%d" % n for n in range(SLOTS)])
    leases = node.segment.leases_of(second.row)
    for slot in slots[1:]:
        leases[slot] = 1
    assert [slot for slot, _ in node.grant(first, 2)] == [slots[0]]
    assert node.keeper.usage().evicting == 0
    leases[slots[5]] = 0
    assert [slot for slot, _ in node.grant(first, 2)] == [slots[5]]


def test_chunk_that_is_leased_while_it_is_evicted_is_freed_later(node: Node) -> None:
    """The keeper sees the lease only after its fence, and frees the slot when the lease has ended."""
    first = node.engine(1)
    (slot,) = node.publish(first, b"k")
    leases = node.segment.leases_of(first.row)
    node._fence = lambda: leases.__setitem__(slot, 1)  # type: ignore[method-assign]
    node.take_over()
    first = node.engine(1)
    evict_all(node.keeper)
    assert node.keeper.usage().evicting == 1
    assert node.keeper.is_draining
    node.keeper._fence = lambda: None
    leases[slot] = 0
    node.keeper.drain()
    assert node.keeper.usage().free == SLOTS


def test_second_copy_of_a_chunk_is_not_published(node: Node) -> None:
    """The second engine keeps its slot for another chunk, and finds the first engine's chunk."""
    first, second = node.engine(1), node.engine(2)
    ((a, x),), ((b, y),) = node.grant(first, 1), node.grant(second, 1)
    assert node.keeper.batch(first, SlotBatch(0, (Publish(a, x, 0, b"k", 1),))).late == ()
    assert node.keeper.batch(second, SlotBatch(0, (Publish(b, y, 0, b"k", 1),))).late == (b,)
    assert second.granted == {b: y}
    # the same key in another group is another chunk
    assert node.keeper.batch(second, SlotBatch(0, (Publish(b, y, 1, b"k", 1),))).late == ()
    assert node.keeper.usage().published == 2


@pytest.mark.parametrize("namespace", [b"n" * 32, b"m" * 32])
def test_namespaces_share_nothing(node: Node, namespace: bytes) -> None:
    """Engines of different models may have equal keys for different chunks."""
    first, second = node.engine(1), node.engine(2, namespace=namespace)
    node.publish(first, b"k")
    node.publish(second, b"k")
    assert node.keeper.usage().published == (1 if namespace == b"n" * 32 else 2)


def test_namespace_without_chunks_makes_room(node: Node) -> None:
    """A node that runs for months sees more namespaces than it has numbers for namespaces."""
    node.publish(node.engine(1), b"k")
    for n in range(2 * NAMESPACES_MAX):
        client = node.engine(2, namespace=b"%032d" % n, client=b"%016d" % (n + 10))
        assert client.namespace != 0
        node.keeper.died(client, Process(2, 1))
    assert len(node.take_over()._namespaces.numbers) == 2


def test_least_recently_used_namespace_makes_room(node: Node) -> None:
    """Each reset of an engine makes a namespace, and each number may have chunks. Namespaces of engines stay."""
    fd = create(2 * NAMESPACES_MAX, 64, rows=ROWS)
    node.keeper = keeper = Keeper(Ledger(Segment(fd)), Lru(), fence=lambda: None)
    keeper.use_more(2 * NAMESPACES_MAX)
    first, idle = node.engine(1), node.engine(2, namespace=b"i" * 32)
    node.publish(first, b"k")
    node.publish(idle, b"k")
    names = [b"%032d" % n for n in range(NAMESPACES_MAX)]
    for name in names:
        answer = keeper.batch(first, SlotBatch(0, namespace=name))
        assert answer.namespace == first.namespace >= 0
        node.publish(first, b"k")
    found = {number for number, _, _ in keeper._index}
    assert len(found) == NAMESPACES_MAX
    assert {idle.namespace, first.namespace} <= found
    numbers = keeper._namespaces.numbers
    assert set(numbers) == {b"i" * 32, *names[1:]}  # the oldest namespaces of the first engine have lost their numbers
    assert Keeper(Ledger(Segment(fd)), Lru())._namespaces.numbers == numbers
    os.close(fd)


@pytest.mark.parametrize(
    "report",
    [
        SlotBatch(0, (Publish(99, 0, 0, b"k", 1),)),
        SlotBatch(0, (Publish(0, 7, 0, b"k", 1),)),
        SlotBatch(0, (Publish(15, 0, 0, b"k" * 65, 1),)),
        SlotBatch(0, returned=((3, 3), (99, 0))),
        SlotBatch(0, used=(Use("ended", stamp_of(99, 1) + stamp_of(-1, 0) + b"odd"), Use("resume", b"")), want=-5),
    ],
)
def test_report_that_does_not_fit_changes_nothing(node: Node, report: SlotBatch) -> None:
    """A report may be wrong or hostile, or may name a grant of an earlier holder."""
    client = node.engine(1)
    node.grant(client, 2)
    before = node.keeper.usage()
    node.keeper.batch(client, report)
    assert node.keeper.usage() == before


def test_late_report_of_a_returned_slot_is_ignored(node: Node) -> None:
    """The generation distinguishes two grants of one slot."""
    client = node.engine(1)
    ((slot, generation),) = node.grant(client, 1)
    node.keeper.batch(client, SlotBatch(0, returned=((slot, generation),)))
    assert node.grant(client, 1) == [(slot, generation + 2)]
    node.keeper.batch(client, SlotBatch(0, (Publish(slot, generation, 0, b"k", 1),)))
    assert node.keeper.usage().published == 0
    assert len(node.grant(client, BATCH_MAX * 2, 1)) == SLOTS // 4 - 1


def test_rows_and_processes_are_bounded(node: Node) -> None:
    """The limit on rows and the limit on processes cause refusals. A refusal says whether a later try may succeed."""
    for number in range(ROWS):
        node.engine(number)
    with pytest.raises(RefusedError, match=f"{ROWS} engines") as refused:
        node.engine(ROWS)
    assert refused.value.again
    hello = Hello(VERSION, "rank", b"%016d" % 0, b"n" * 32, SLOTS, 64)
    for pid in range(1, PROCESSES_MAX):
        node.keeper.greet(hello, Process(100 + pid, 1))
    with pytest.raises(RefusedError, match="at most"):
        node.keeper.greet(hello, Process(1000, 1))


def test_engine_that_has_lost_a_process_is_not_attached_again(node: Node) -> None:
    """As long as a slot is in quarantine, the next holder refuses the engine, too."""
    client = node.engine(1)
    node.keeper.greet(Hello(VERSION, "rank", b"%016d" % 1, b"n" * 32, SLOTS, 64), Process(9, 1))
    node.grant(client, 1)
    node.keeper.died(client, Process(9, 1))
    assert node.keeper.usage().quarantine == 1
    answer = node.keeper.batch(client, SlotBatch(0, (Publish(0, 0, 0, b"k", 1),), want=1))
    assert (answer.granted, answer.late, answer.namespace) == ((), (0,), -1)  # no chunk is published
    for _ in range(2):
        with pytest.raises(RefusedError, match="another client"):
            node.engine(1)
        node.take_over()
    for process in (Process(9, 1), Process(1, 1)):
        for one in list(node.keeper.clients.values()):
            node.keeper.died(one, process)
    assert node.keeper.usage().free == SLOTS


def test_need_for_memory_follows_from_the_examined_chunks(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its own chunks are leased, a region must not take memory whose chunks were used later."""
    monkeypatch.setattr("kvpipe.node.evictor.LOOK_MAX", 2)
    first = node.engine(1)
    slots = node.publish(first, *(b"%d" % key for key in range(SLOTS)))
    leases = node.segment.leases_of(first.row)
    for slot in slots[:2]:
        leases[slot] = 1
    oldest = node.keeper.used[slots[0]]
    assert node.grant(first, 1) == []
    assert node.keeper.short == oldest
    third = node.keeper.used[slots[2]]
    assert [slot for slot, _ in node.grant(first, 1)] == slots[2:3], "the leased chunks count as used"
    assert node.keeper.short == third
    for slot in slots[4:]:
        leases[slot] = 1
    fourth = node.keeper.used[slots[3]]
    assert [slot for slot, _ in node.grant(first, 3)] == slots[3:4]
    assert node.keeper.short == fourth


def test_need_for_memory_is_unbounded_without_any_chunk(node: Node) -> None:
    """If all its slots are granted, a region gets the least recently used slots of other regions at any age."""
    fd = create(SLOTS, 64, rows=ROWS, ring=64)
    node.keeper = keeper = Keeper(Ledger(Segment(fd)), Lru(), fence=lambda: None)
    keeper.use_more(1)
    node.grant(node.engine(1), 1)
    before = keeper.short
    assert before is None
    node.grant(node.engine(2), 1)
    assert keeper.short == math.inf
    os.close(fd)


def _with_helper(node: Node) -> NodeClient:
    """Attach an engine with a scheduler, a rank and a helper, and grant it a slot."""
    client = node.engine(1)
    for role, pid in (("rank", 2), ("helper", 3)):
        node.keeper.greet(Hello(VERSION, role, b"%016d" % 1, b"n" * 32, SLOTS, 64), Process(pid, 1))  # type: ignore[arg-type]
    assert len(node.grant(client, 1)) == 1
    return client


@pytest.mark.parametrize("taken_over", [False, True])
def test_slots_wait_for_the_end_of_a_helper(node: Node, *, taken_over: bool) -> None:
    """After a rank was killed, its tier's client may still write into a slot.

    The next holder waits for this client, too.
    """
    client = _with_helper(node)
    if taken_over:
        node.take_over().use_more(SLOTS)
        client = node.keeper.clients[client.row]
    for pid in (1, 2):
        node.keeper.died(client, Process(pid, 1))
    assert (node.keeper.usage().quarantine, node.keeper.usage().free) == (1, SLOTS - 1)
    node.keeper.died(client, Process(3, 1))
    assert (node.keeper.usage().quarantine, node.keeper.usage().free) == (0, SLOTS)
    assert not node.keeper.clients


@pytest.mark.parametrize("taken_over", [False, True])
def test_engine_goes_on_after_the_end_of_a_helper(node: Node, *, taken_over: bool) -> None:
    """After the end of a helper, a tier starts another client.

    The row has room for the new client, and the engine keeps its grants.
    """
    client = _with_helper(node)
    if taken_over:
        node.take_over().use_more(SLOTS)
        client = node.keeper.clients[client.row]
        node.engine(1, held=tuple(client.granted.items()))
    node.keeper.died(client, Process(3, 1))
    assert client.state.name == "ATTACHED"
    assert client.processes == {Process(1, 1), Process(2, 1)}
    assert len(node.grant(client, 1, stock=1)) == 1
    assert node.keeper.usage().quarantine == 0
