"""Tests take every cell of two state machines that clocks and threads drive: a carrier's orders, and breakers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpipe.statemachine import breaker, carry
from kvpipe.statemachine.core import Machine
from kvpipe.testing.held_tier import HeldTier
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.tiers.guard import FAULTS_MAX, READ
from kvpipe.trace.recorder import Recorder
from kvpipe.trace.replay import Replay
from tests.tiers.test_carrier import Rank


class TracedRank(Rank):
    """A rank whose cursors are recorded."""

    def __init__(self, tier: HeldTier, **spec: Any) -> None:
        """See `Rank`."""
        self._recorder, self._replay = Recorder(detail=True), Replay()
        super().__init__([tier], trace=self._recorder, **spec)

    def taken(self, machine: Machine) -> set[tuple[str, str]]:
        """Return the cells of `machine` that were taken until now."""
        for event in self._recorder.take():
            self._replay.feed(event)
        assert self._replay.ok, self._replay.problems
        return {(state, event) for name, state, event in self._replay.cells if name == machine.name}


def _legal(machine: Machine) -> set[tuple[str, str]]:
    """Return the cells that do not reject."""
    return {
        (state, event) for state, row in machine.table.items() for event, cell in row.items() if cell.kind != "reject"
    }


def _until(true: Callable[[], bool]) -> None:
    assert eventually(true)


def test_every_cell_of_an_order_is_taken() -> None:
    """The tier has or lacks the chunk, fails, has an open breaker, or does not exist.

    In these cases, orders take every cell.
    """
    tier = HeldTier()
    rank, late = TracedRank(tier), TracedRank(tier, lanes=1)
    rank.carry(stores=False, slot=0)
    rank.carry(stores=False, slot=0, tier=7)
    assert rank.ended(2) == [False] * 2
    rank.carry(stores=True, slot=0)
    assert rank.ended() == [True]
    tier.trouble = "down"
    for _ in range(FAULTS_MAX + 1):
        rank.carry(stores=False, slot=0)
        assert rank.ended() == [False]
    tier.trouble = "none"
    tier.hold()
    late.carry(stores=False, slot=0)
    _until(lambda: tier.waiting == 1)
    late.carry(stores=False, slot=1)  # no lane becomes free for this order
    late.carrier.loop.settle(WAIT_S)
    late.carrier.shutdown()
    assert late.ended(2) == [False] * 2
    rank.carrier.shutdown()
    assert not _legal(carry.CARRY) - rank.taken(carry.CARRY) - late.taken(carry.CARRY)


def test_every_cell_of_a_breaker_is_taken() -> None:
    """Calls and probes succeed and fail. Some calls end only after the breaker has opened."""
    tier = HeldTier()
    rank = TracedRank(tier, lanes=FAULTS_MAX)
    guard = rank.tiers[0]
    reads = guard.breakers[READ]

    def leave() -> None:
        rank.carrier.loop.put(lambda: guard.fault(READ, "it took too long", slow=True))
        _until(lambda: reads.state.row == breaker.OPEN)

    def come_back() -> None:
        tier.trouble = "none"
        rank.probe_until(lambda: reads.state.row == breaker.HALF_OPEN)

    def fetch(count: int = 1, trouble: str = "none", *, left_meanwhile: bool = False) -> None:
        tier.trouble = trouble
        if left_meanwhile:
            tier.hold()
        for _ in range(count):
            rank.carry(stores=False, slot=0)
        if left_meanwhile:
            _until(lambda: tier.waiting == count)
            leave()
            tier.let_go()
        rank.ended(count)

    fetch()
    fetch(FAULTS_MAX, "down")
    rank.probe_until(lambda: any(event == breaker.PROBE_FAILED for _, event in rank.taken(breaker.BREAKER)))
    come_back()
    fetch()
    assert reads.state.row == breaker.CLOSED
    fetch(left_meanwhile=True)
    come_back()
    fetch()
    fetch(2, "down", left_meanwhile=True)
    come_back()
    fetch(1, "down")  # this failure opens the breaker
    come_back()
    fetch()
    leave()
    come_back()
    fetch(1, "down")
    come_back()
    rank.carrier.shutdown()
    assert not _legal(breaker.BREAKER) - rank.taken(breaker.BREAKER)
