"""The record of a save or load that ranks are carrying out."""

from __future__ import annotations

import time
from typing import Final

from kvpipe.cache.chunks import Owner, Piece
from kvpipe.protocol.messages import Job
from kvpipe.scheduler.records import Tracked
from kvpipe.scheduler.reported import Reported
from kvpipe.statemachine import job as m
from kvpipe.statemachine.core import Compiled

_BELIEVED: Final = frozenset({m.SENT, m.DONE})


class JobInFlight(Reported):
    """A save or load on which not all ranks have reported yet.

    A save has `pieces`, from unit `first_unit` of the prefix on. A load has an `owner`, which holds `leases` leases. A
    load transfers `tokens` tokens. A load with 0 tokens is planned in order to fail on every rank.
    """

    __slots__ = ("first_unit", "job", "leases", "owner", "pieces", "tokens", "tracked")

    def __init__(
        self,
        machine: Compiled,
        job: Job,
        tracked: Tracked,
        owner: Owner | None,
        pieces: tuple[Piece, ...],
        first_unit: int,
        tokens: int,
        leases: int,
    ) -> None:
        """Record a job that is sent with the step that is being planned. The job starts without a watch."""
        # The fields of `Reported`, set here because calling its constructor takes longer.
        self.machine, self.key, self.state, self.watch = machine, job.id, machine.initial, None
        self.ok = self.bad = 0
        self.sent_at_s = time.monotonic()
        self.job, self.tracked, self.pieces, self.first_unit, self.owner = job, tracked, pieces, first_unit, owner
        self.tokens, self.leases = tokens, leases

    @property
    def believed(self) -> bool:
        """Whether no rank has failed the job, and the job is not tainted."""
        return self.state.row in _BELIEVED
