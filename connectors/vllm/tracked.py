"""What the scheduler side remembers: of a request, of the last lookup, of a chunk being filled, of a job in flight."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.catalog import Chunk, Owner, Piece
from kvpipe.plan import Job
from kvpipe.statemachine import request as m
from kvpipe.statemachine.core import Compiled, Cursor, Watch

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.connectors.vllm.staging import Stage
    from kvpipe.connectors.vllm.tracing import Life

REQUEST: Final[Compiled] = m.REQUEST.compile()
"""The machine of every request."""


class Match(NamedTuple):
    """The answer to the last lookup: valid until the end of the scheduling pass in which it was given."""

    step: int
    local_tokens: int
    units: int
    waits: bool = False  # for an asynchronous load


class OpenChunk(NamedTuple):
    """A chunk that this request is filling, from unit `base` on: `filled` units, whose prefix hash is `key`."""

    base: int
    chunk: Chunk
    filled: int
    key: bytes


class Tracked(Cursor):
    """One request. `next_at` is the token count at which the next unit is full: until then there is nothing to do."""

    __slots__ = (
        "epoch",
        "job",
        "later",
        "life",
        "match",
        "next_at",
        "opened",
        "preemptions",
        "request",
        "retries",
        "saved",
        "stage",
    )

    def __init__(self, request: Request, groups: int, life: Life, watch: Watch | None) -> None:
        """`saved` counts the units of the prefix that are saved, being saved, or given up.

        `later` is the step in which a lookup ends to ask for time; 0: it has not asked.
        """
        super().__init__(REQUEST, request.request_id, watch)
        self.request, self.life = request, life
        self.epoch = self.saved = self.next_at = self.retries = self.later = 0
        self.preemptions = request.num_preemptions
        self.opened: list[OpenChunk | None] = [None] * groups
        self.match: Match | None = None
        self.stage: Stage | None = None
        self.job = 0


class Flight:
    """A job that the ranks have not all reported yet."""

    __slots__ = ("bad", "born_ns", "distrusted", "job", "ok", "owner", "pieces", "tracked", "unit")

    def __init__(self, job: Job, tracked: Tracked, pieces: tuple[Piece, ...], owner: Owner | None, unit: int) -> None:
        """`unit` is the first unit that the job saves."""
        self.job, self.tracked, self.pieces, self.owner, self.unit = job, tracked, pieces, owner, unit
        self.ok = self.bad = 0
        self.born_ns = time.monotonic_ns()
        self.distrusted = False  # of a save: its bytes may rest on garbage; of a load: it is known to have failed
