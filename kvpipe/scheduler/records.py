"""The scheduler side's records of a request: its lookup, its load, how far it is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from kvpipe.cache.catalog import Chunk
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import saving as m
from kvpipe.statemachine.core import Compiled, Cursor, Watch

if TYPE_CHECKING:
    from kvpipe.cache.hints import Hint
    from kvpipe.scheduler.answers import Answer
    from kvpipe.scheduler.base import Request, Turn
    from kvpipe.scheduler.hints import Wish
    from kvpipe.scheduler.report import RequestContext
    from kvpipe.scheduler.stages import Stage

BEYOND_TOKENS: Final = 1 << 60
"""More tokens than any request has."""
MEMORY: Final = "memory"
"""The tier of a hit's tokens that were in memory already."""
SAVE_RETRIES_MAX: Final = 3
"""How often a failed save is tried again, per admission."""


class LookupResult(NamedTuple):
    """A lookup's result in tokens: `local`, held by the engine; `hit`, loaded by kvpipe; `missed`, and `why`.

    `later`: the engine was asked to repeat the lookup.
    """

    local: int = 0
    hit: int = 0
    missed: int = 0
    why: str = ""
    later: bool = False
    staged: tuple[tuple[str, int], ...] = ()
    """(tier, tokens) of the hit that were fetched from tiers."""

    @property
    def by_tier(self) -> dict[str, int]:
        """The hit's tokens by tier."""
        by = dict(self.staged)
        kept = self.hit - sum(by.values())
        return {MEMORY: kept, **by} if kept else by


NO_RESULT: Final = LookupResult()
NO_TIERS: Final[tuple[tuple[str, int], ...]] = ()


class Asking(Cursor):
    """The last answer to the engine's lookup of one request, in step `asked_step`.

    It has the fields of `LookupResult`, and: `units`, held of the prefix; `waits`, whether they are loaded
    asynchronously; `put_off_steps`, in how many steps since its last admission the lookup was put off.
    """

    __slots__ = ("asked_step", "hit", "local", "missed", "put_off_steps", "staged", "units", "waits", "why")

    def __init__(self, machine: Compiled, request_id: str, watch: Watch | None) -> None:
        """Start without an answer."""
        self.machine, self.key, self.state, self.watch = machine, request_id, machine.initial, watch  # as a cursor's
        self.put_off_steps = 0  # the rest with the first answer

    @property
    def answer(self) -> LookupResult:
        """The last answer, for reports. There must be one."""
        later = self.state.row == lookup_m.LATER
        return LookupResult(self.local, self.hit, self.missed, self.why, later, self.staged)

    def reply(
        self,
        step: int,
        local: int,
        missed: int,
        why: str,
        hit: int = 0,
        units: int = 0,
        *,
        waits: bool = False,
        staged: tuple[tuple[str, int], ...] = NO_TIERS,
    ) -> None:
        """Record the answer to the lookup in `step`. `local`, `missed`, `hit`: in tokens."""
        self.asked_step, self.local, self.missed, self.why = step, local, missed, why
        self.hit, self.units, self.waits, self.staged = hit, units, waits, staged
        self.fire(lookup_m.ANSWER)

    def put_off(self, step: int, local: int, missed: int, why: str) -> None:
        """Record that the lookup in `step` is put off, for the reason `why`."""
        self.asked_step, self.local, self.missed, self.why = step, local, missed, why
        self.hit, self.units, self.waits, self.staged = 0, 0, False, NO_TIERS
        self.fire(lookup_m.PUT_OFF)

    def admit(self) -> None:
        """Use up the answer."""
        self.fire(lookup_m.ADMIT)
        self.put_off_steps = 0


class OpenChunk(msgspec.Struct, frozen=True, gc=False):
    """A chunk, from unit `base` of the prefix on, of which the request has filled `filled` units, up to `key`."""

    base: int
    chunk: Chunk
    filled: int
    key: bytes


class SaveProgress(Cursor):
    """How far one request is saved.

    `saved_units`: units of the prefix that are saved, being saved, or held already. `next_save_at_tokens`: there is
    nothing new to save before so many tokens.
    """

    __slots__ = ("next_save_at_tokens", "opened", "retries", "saved_units")

    def __init__(self, machine: Compiled, request_id: str, groups: int, watch: Watch | None) -> None:
        """Start with nothing saved. `groups`: number of cache groups; `opened`: per group, the chunk being filled."""
        self.machine, self.key, self.state, self.watch = machine, request_id, machine.initial, watch  # as a cursor's
        self.saved_units = self.next_save_at_tokens = self.retries = 0
        self.opened: list[OpenChunk | None] = [None] * groups

    def admit(self, held_units: int) -> None:
        """The request was admitted with new blocks. The first `held_units` units need not be saved."""
        if self.fire(m.ADMIT).moves:
            self.close_chunks()
        self.saved_units = held_units
        self.next_save_at_tokens = self.retries = 0

    def planned(self, next_save_at_tokens: int) -> None:
        """All final units are saved or being saved, with this step's save. The next is final at so many tokens."""
        self.fire(m.PLANNED)
        self.next_save_at_tokens = next_save_at_tokens

    def complete(self) -> None:
        """Nothing more of the request will have to be saved."""
        self.fire(m.COMPLETE)
        self.next_save_at_tokens = BEYOND_TOKENS

    def lost(self, first_unit: int) -> None:
        """A save from `first_unit` on has failed: try again, at most `SAVE_RETRIES_MAX` times per admission."""
        self.close_chunks()
        if self.retries < SAVE_RETRIES_MAX and self.fire(m.LOST).to.row == m.OPEN:
            self.retries += 1
            self.saved_units = min(self.saved_units, first_unit)
            self.next_save_at_tokens = 0

    def preempted(self) -> None:
        """Save nothing more before the next admission: the blocks are gone."""
        self.fire(m.GIVE_UP)
        self.next_save_at_tokens = BEYOND_TOKENS

    def give_up(self) -> None:
        """Save nothing more before the next admission: the blocks' bytes may be wrong."""
        self.preempted()
        self.close_chunks()

    def close_chunks(self) -> None:
        """Fill none of the chunks that were begun any further."""
        self.opened = [None] * len(self.opened)


Machines: TypeAlias = tuple[Compiled, Compiled, Compiled]
"""The machines of requests, of lookups and of saving, compiled for one engine."""
Watches: TypeAlias = tuple[Watch | None, Watch | None, Watch | None]
"""The watches of a request's cursors in these machines, in the same order."""


class Tracked(Cursor):
    """One request. `load_job_id`: id of this admission's load, until it is over; 0: there is none.

    `wishes`: the hints that came with it. `hints`: what they are for its chunks: as if it were over when it arrived,
    and from its end on once that has come.
    `kept_units`, `stored_units`: chunks from there on are evicted first when it is over, and not stored in tiers.
    """

    __slots__ = (
        "answer", "asking", "hints", "kept_units", "life", "load_job_id", "preemptions", "request", "saving", "stage",
        "stored_units", "turn", "wishes",
    )  # fmt: skip

    def __init__(
        self, machines: Machines, request: Request, groups: int, turn: Turn, life: RequestContext, watches: Watches
    ) -> None:
        """`groups`: number of cache groups. `turn`: whose is lower comes first. `life`: of its events."""
        (machine, lookup, saving), (watch, watch_lookup, watch_saving) = machines, watches
        request_id = request.request_id
        self.machine, self.key, self.state, self.watch = machine, request_id, machine.initial, watch
        self.request, self.turn, self.life = request, turn, life
        self.asking = Asking(lookup, request_id, watch_lookup)
        self.saving = SaveProgress(saving, request_id, groups, watch_saving)
        self.load_job_id = 0
        self.preemptions = request.num_preemptions
        self.stage: Stage | None = None
        self.wishes: tuple[Wish, ...] = ()
        self.hints: tuple[Hint, ...] = ()
        self.answer: Answer | None = None
        self.kept_units = self.stored_units = BEYOND_TOKENS

    @property
    def epoch(self) -> int:
        """The number of its last admission, unique in the engine."""
        return self.life.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.life.epoch = epoch
