"""A job or a tier transfer, on which every rank reports once."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvpipe.protocol.messages import Tally
from kvpipe.statemachine import job as m
from kvpipe.statemachine.core import Compiled, Cursor, Watch


class Reported(Cursor):
    """A job or tier transfer, on which every rank reports once. `ok` and `bad` are the numbers of reports so far.

    `sent_at_s` is the time at which the job or transfer was planned, in seconds of the monotonic clock.
    """

    __slots__ = ("bad", "ok", "sent_at_s")

    def __init__(self, machine: Compiled, number: int, watch: Watch | None) -> None:
        """Start without reports. `machine` is the job machine. `number` is the id of the job or transfer."""
        super().__init__(machine, number, watch)
        self.ok = self.bad = 0
        self.sent_at_s = time.monotonic()

    def count(self, reports: Tally, ranks: int) -> bool:
        """Add `reports` to the counts. `ranks` reports are expected in all. Returns whether all ranks have reported."""
        self.ok, self.bad = self.ok + reports.ok, self.bad + reports.bad
        if self.ok + self.bad < ranks:
            return self.fire(m.FAILED if reports.bad else m.SOME).to.final
        return self.fire(m.NOT_ALL if self.bad else m.ALL).to.final


def awaited(sent: Mapping[int, Reported], patience_s: float) -> bool:
    """Whether reports may come soon, because the newest job or transfer was sent less than `patience_s` seconds ago.

    `sent` is in the order of sending.
    """
    return bool(sent) and time.monotonic() - next(reversed(sent.values())).sent_at_s < patience_s  # type: ignore[call-overload]
