"""An operator's read shows one moment and runs in short slices.

If the engine is busy, the read is answered in bounded time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvpipe.features.orders import READS_MAX, Order, Orders, Work
from kvpipe.manage import reads
from kvpipe.manage.survey import TierSurvey
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.trace.log import Counters
from tests.manage.conftest import READS, Managed
from tests.manage.test_api import prompt
from tests.rigs.scheduler_world import UNIT, SchedulerWorld

LONG_TOKENS = 128 << 10


def _carry_out(order: Order, step: Callable[[], object]) -> Any:
    """Make steps until `order` is over, and return its result."""
    for _ in range(1000):
        if order.over:
            break
        step()
    assert order.over
    return order.result


def test_a_snapshot_is_of_one_moment_while_the_engine_makes_steps() -> None:
    """Each step of this engine begins a save of a new request, and no save ends."""
    world = SchedulerWorld()
    world.side.orders.slice_s_max = 0

    def step() -> None:
        request = world.request(f"r{len(world.side.requests.tracked)}", 1)
        world.admit(request)
        world.step(request)

    for _ in range(3):
        step()
    order = world.side.orders.queue_read(lambda: reads.snapshot(world.side, 100))
    found: reads.EngineSnapshot = _carry_out(order, step)
    totals = found.totals
    assert totals.requests == 4, "it is made in the first step after it was asked for"
    assert {totals.pool.pieces_writing, totals.pool.slots_used, len(totals.jobs), totals.step, len(found.rows)} == {4}


def test_a_snapshot_of_many_requests_is_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot shows the slowest requests, except requests that finish between two slices."""
    monkeypatch.setattr(reads, "REQUESTS_PER_PART", 4)
    world = SchedulerWorld()
    for number in range(10):
        world.admit(world.request(f"r{number}", 1))
    parts = reads.snapshot(world.side, 6)
    for _ in range(3):  # two pauses while ten requests are ranked, one pause while six requests are copied
        next(parts)
    for tracked in list(world.side.requests.tracked.values())[4:6]:
        world.side.finished(tracked.request)
    with pytest.raises(StopIteration) as end:
        next(parts)
    found: reads.EngineSnapshot = end.value.value
    assert found.totals.requests == 10
    assert [row["request"] for row in found.rows] == ["r0", "r1", "r2", "r3"]


def test_a_lookup_of_a_long_prompt_is_sliced(managed: Managed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice looks up at most 512 keys per cache group, and the engine makes steps between slices."""
    units, parts = LONG_TOKENS // UNIT, list[int]()
    managed.save("a", 40)
    managed.busy()
    managed.side.orders.slice_s_max = 0  # the shortest slices
    real = managed.side.catalog.index

    def index(group: int) -> Any:
        parts.append(group)
        return real(group)

    monkeypatch.setattr(managed.side.catalog, "index", index)
    whole = [f"a/{unit}".encode() for unit in range(units)]
    monkeypatch.setattr(managed.engine, "_hash", lambda _: iter([whole]))  # the real hasher pauses after every 2 units
    answered, wanted = list[Any](), prompt("a", LONG_TOKENS)
    asks = threading.Thread(target=lambda: answered.append(managed.good("POST", "/v1/lookup", wanted)))
    asks.start()
    steps = 0
    while asks.is_alive():
        if managed.side.orders.reads:
            managed.world.step()
            steps += 1
        asks.join(0.001)
    asks.join()
    assert (answered[0]["held_tokens"], answered[0]["why"]) == (40 * UNIT, "not_saved")
    assert units // reads.KEYS_PER_PART <= steps
    assert len(parts) >= units // reads.KEYS_PER_PART


@pytest.mark.parametrize("states", [(), (1,)])
def test_lookup_finds_the_hit_of_a_request(states: tuple[int, ...]) -> None:
    """Random chunks of the prompt were evicted.

    The two cases are a model with a window, and a model with states and a drafter.
    """
    drawn = random.Random(1)
    windows = (None, None) if states else (None, 3 * UNIT)
    world = SchedulerWorld(windows=windows, chunk_units=4, states=states, ahead_tokens=len(states))
    side, survey = world.side, TierSurvey(world.side, UNIT)
    for turn in range(20):
        request = world.request(f"r{turn}", drawn.randint(1, 24))
        world.admit(request)
        world.succeed(*world.step(request))
        for chunk in list(side.catalog.chunks()):
            if not drawn.randrange(8):
                side.catalog.evict(chunk)
        keys, of_states = survey.prefixes.unit_keys(request), survey.prefixes.state_keys(request)
        order = side.orders.queue_read(lambda keys=keys, of_states=of_states: reads.held_keys(side, keys, of_states))  # type: ignore[misc]
        found: reads.HeldKeys = _carry_out(order, world.step)
        assert survey.prefixes.longest(request, found.found) == side.prefetching.prefixes.longest(request)
        side.finished(request)


@pytest.mark.parametrize("path", sorted(READS))
def test_a_read_is_refused_when_the_engine_makes_no_step(managed: Managed, path: str) -> None:
    """The refusal has the reason, and is sent within a time limit. The engine does not carry out the read later."""
    managed.engine.read_s_max = managed.engine.count_s_max = 0.01
    managed.busy()
    method, body = ("POST", prompt("a", UNIT)) if path == "/v1/lookup" else ("GET", None)
    answered = list[Any]()
    asks = threading.Thread(target=lambda: answered.append(managed.ask(method, path, body)))
    asks.start()
    asks.join(WAIT_S)
    why = "the engine is busy: its scheduler has not answered within 0.01 s; ask again later"
    assert answered == [(503, {"error": why})]
    (order,) = managed.side.orders.reads
    managed.world.step()
    assert (order.over, order.work, len(managed.side.orders.reads)) == (True, None, 0)


def test_serving_continues_while_operators_read(managed: Managed) -> None:
    """One thread serves requests, another thread reads. All reads are answered, and nothing fails."""
    over, answered = threading.Event(), set[int]()

    def ask() -> None:
        while not over.is_set():
            answered.update(managed.ask("GET", f"/v1/{one}")[0] for one in ("state", "holders", "counters", "pins"))
            answered.add(managed.ask("POST", "/v1/lookup", prompt("r1", 20 * UNIT))[0])

    thread = threading.Thread(target=ask)
    thread.start()
    for turn in range(60):
        request = managed.save(f"r{turn}", 1 + turn % 40)
        if turn % 3:
            managed.side.finished(request)
            assert not managed.side.pending
    over.set()
    assert not managed.side.pending
    thread.join()
    assert answered == {200}
    assert managed.side.counters["contained_error"] == 0
    check_integrity(managed.side.catalog)


def test_a_waiting_read_is_carried_out_when_the_engine_becomes_idle(managed: Managed) -> None:
    """The read is queued while the engine has the turn. After that, the engine makes no step."""
    answered = list[int]()
    managed.busy()
    asks = threading.Thread(target=lambda: answered.append(managed.ask("GET", "/v1/state")[0]))
    asks.start()
    assert eventually(lambda: managed.side.orders.reads)
    assert not managed.side.pending
    asks.join(WAIT_S)
    assert answered == [200]


def test_reads_and_changes_alternate() -> None:
    """A read does not wait until a change has ended, and a change does not wait until a read has ended."""
    orders, done = Orders(Counters()), list[str]()
    orders.slice_s_max = float("inf")

    def work(name: str, parts: int, *, waits: bool = False) -> Work:
        for _ in range(parts):
            done.append(name)
            yield waits or None

    orders.queue_change(lambda: work("waits", 1, waits=True))
    first = orders.queue_change(lambda: work("change", 3))
    asked = [orders.queue_read(lambda name=name: work(name, 2)) for name in ("read", "other")]  # type: ignore[misc]
    orders.slice_parts_max = 40
    orders.carry_out()
    assert done == ["read", "waits", "other", "change", "read", "change", "other", "change"]
    assert all(order.over and not order.refused for order in (first, *asked))


def test_a_short_read_does_not_wait_for_a_long_one() -> None:
    """Reads take turns, so an operator gets the engine's state although another operator lists all slots."""
    orders = Orders(Counters())
    orders.slice_s_max, orders.slice_parts_max = float("inf"), 2
    orders.queue_read(lambda: (None for _ in range(500)))
    short = orders.queue_read(lambda: reads.at_once(int))
    for _ in range(2):
        orders.carry_out()
    assert short.over


def test_a_read_of_an_idle_engine_does_not_wait_for_changes(managed: Managed) -> None:
    """The read ends after one slice, before the end of the change. Then the change continues."""
    managed.side.orders.slice_parts_max = 2
    change = managed.side.orders.queue_change(lambda: (None for _ in range(1 << 40)))
    assert managed.ask("GET", "/v1/state")[0] == 200
    assert not change.over
    change.unwanted = True


def test_reads_are_refused_when_too_many_wait_and_at_the_end() -> None:
    """Changes are still accepted while too many reads wait."""
    orders = Orders(Counters())
    asked = [orders.queue_read(lambda: reads.at_once(int)) for _ in range(READS_MAX + 1)]
    assert [order.over for order in asked] == [False] * READS_MAX + [True]
    assert asked[-1].failed
    assert asked[-1].refused.startswith("the engine is busy: 64 reads wait")
    assert not orders.queue_change(lambda: reads.at_once(int)).over
    orders.end()
    late = orders.queue_read(lambda: reads.at_once(int))
    assert {order.refused for order in (*asked[:-1], late)} == {"the engine is shutting down"}
