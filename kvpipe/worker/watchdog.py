"""Fails jobs whose copies make no progress for `stuck_ms_max`: a task of the loop thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import anyio

from kvpipe.statemachine import copy as m
from kvpipe.trace import events as e
from kvpipe.transfer.base import QUIET, Ticket
from kvpipe.worker.batch import LAST_MOVES, Batch

if TYPE_CHECKING:
    from kvpipe.worker.copies import Copies

LOOKS_PER_LIMIT: Final = 4
STUCK: Final = "it did not move in stuck_ms_max"


class Watchdog:
    """Checks the batches of `copies` four times in `stuck_ms_max`."""

    def __init__(self, copies: Copies, abandon: Callable[[Ticket], bool], stuck_ms_max: int) -> None:
        """`abandon`: as of the transfer engine."""
        self._copies, self._abandon, self._stuck_s = copies, abandon, stuck_ms_max / 1000

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await anyio.sleep(self._stuck_s / LOOKS_PER_LIMIT)
            self._copies.loop.drain()  # a batch may have been put there without waking anybody
            oldest_ns = time.monotonic_ns() - int(self._stuck_s * 1e9)
            for batch in [one for one in self._copies.live if self._is_stuck(one, oldest_ns)]:
                self._give_up(batch)

    @staticmethod
    def _is_stuck(batch: Batch, oldest_ns: int) -> bool:
        last = batch.last  # of vLLM's thread: a step may still be submitting
        born_ns = last.born_ns if last is not None else 0
        return max(batch.moved_ns, born_ns) < oldest_ns and (batch.stuck or not batch.settled)

    def _give_up(self, batch: Batch) -> None:
        copies = self._copies
        if not all(cursor.state.final for cursor in batch.cursors.values()):
            waited_ms, kind = round((time.monotonic_ns() - batch.moved_ns) / 1e6), batch.kind.name.lower()
            for job in batch.jobs:
                moves = [f"{edge.event} -> {edge.to.name}" for number, edge in batch.history if number == job.id]
                message = (time.monotonic_ns(), copies.trace.rank, job.request, job.epoch, batch.step)
                copies.counters["stuck"] += 1
                copies.trace.put(
                    e.Stuck(*message, job=job.id, kind=kind, waited_ms=waited_ms, last=moves[-LAST_MOVES:])
                )
        batch.stuck = True  # first: what is submitted from now on is not begun
        for job in batch.jobs:
            if not batch.cursors[job.id].state.final:
                copies.fire(batch, job, m.FAULT, STUCK)
        # reported only when it is safe: what cannot be taken back may still write, and is asked again
        for ticket in tuple(batch.tickets.values()):
            if ticket.state not in QUIET and self._abandon(ticket):
                ticket.withdraw()
        copies.report(batch)
