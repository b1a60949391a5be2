"""A task of the loop thread that fails jobs whose copies make no progress for `stuck_ms_max` milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import anyio

from kvpipe.statemachine import copy as m
from kvpipe.trace import events as e
from kvpipe.transfer.base import QUIET, Ticket
from kvpipe.worker.batch import LAST_MOVES, Batch
from kvpipe.worker.checks import SlotChecks
from kvpipe.worker.copies import Copies

LOOKS_PER_LIMIT: Final = 4
STUCK: Final = "it did not move in stuck_ms_max"


class Watchdog:
    """Checks the batches of `copies` four times in each `stuck_ms_max` milliseconds."""

    def __init__(
        self, copies: Copies, abandon: Callable[[Ticket], bool], stuck_ms_max: int, checks: SlotChecks | None = None
    ) -> None:
        """`abandon` is the transfer engine's method. Without `checks`, slots have no marks."""
        self._copies, self._abandon, self._stuck_s = copies, abandon, stuck_ms_max / 1000
        self._checks = checks

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await anyio.sleep(self._stuck_s / LOOKS_PER_LIMIT)
            self._copies.loop.drain()  # handle items that were put into the inbox without waking the loop
            oldest_ns = time.monotonic_ns() - int(self._stuck_s * 1e9)
            try:
                with self._copies.loop.turn:
                    for batch in [one for one in self._copies.live if self._is_stuck(one, oldest_ns)]:
                        self._give_up(batch)
            finally:
                # another thread may have put items while this task held the lock `turn`
                self._copies.loop.drain()

    @staticmethod
    def _is_stuck(batch: Batch, oldest_ns: int) -> bool:
        # vLLM's thread may still be submitting copies of the batch, and replacing the batch's last ticket.
        waits = batch.stuck or not batch.settled or batch.awaits_digests
        return max(batch.moved_ns, batch.last.born_ns) < oldest_ns and waits

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
        batch.stuck = True  # set this first, so that a copy submitted from now on does not begin
        for job in batch.jobs:
            if not batch.cursors[job.id].state.final:
                copies.fire(batch, job, m.FAULT, STUCK)
        # A copy that cannot be abandoned may still write. In this case the batch is not reported yet, and the watchdog
        # checks the batch again later.
        for ticket in dict.fromkeys(tuple(batch.tickets.values())):
            if ticket.state not in QUIET and self._abandon(ticket):
                ticket.withdraw()
        if self._checks is not None and batch.settled:
            self._checks.give_up(batch)
        copies.put_outcomes(batch)
