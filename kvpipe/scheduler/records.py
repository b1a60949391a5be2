"""The scheduler side's records of a request: its lookup, its load, and the progress of its saves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from kvpipe.cache.chunks import Chunk
from kvpipe.protocol.limits import NO_LIMITS
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import saving as m
from kvpipe.statemachine.core import Compiled, Cursor, Watch

if TYPE_CHECKING:
    from kvpipe.cache.policy.hints import Hint
    from kvpipe.protocol.engine import Precedence, Request
    from kvpipe.scheduler.stages import RequestStage
    from kvpipe.scheduler.wishes import Wish

BEYOND_TOKENS: Final = 1 << 60
"""A number of tokens that is higher than any request's number of tokens."""
MEMORY: Final = "memory"
"""The tier name for the tokens of a hit that memory already held at the lookup."""
SAVE_RETRIES_MAX: Final = 3
"""The number of retries of failed saves, per admission."""


class LookupResult(NamedTuple):
    """The result of a lookup, in tokens.

    `local` tokens are held by the engine. `hit` tokens are loaded by kvpipe. `missed` tokens are computed, for the
    reason `why`. `later` says that the engine was asked to repeat the lookup.
    """

    local: int = 0
    hit: int = 0
    missed: int = 0
    why: str = ""
    later: bool = False
    staged: tuple[tuple[str, int], ...] = ()
    """Pairs of (tier, tokens): the part of the hit that was fetched from tiers."""

    @property
    def by_tier(self) -> dict[str, int]:
        """The number of tokens of the hit, by tier."""
        by = dict(self.staged)
        kept = self.hit - sum(by.values())
        return {MEMORY: kept, **by} if kept else by


NO_RESULT: Final = LookupResult()
NO_TIERS: Final[tuple[tuple[str, int], ...]] = ()


class Asking(Cursor):
    """The last answer to the engine's lookup of one request, given in step `asked_step`.

    An `Asking` has the fields of `LookupResult` and more. `units` is the number of units of the prefix that are held.
    `waits` says that the hit is loaded asynchronously. `put_off_steps` is the number of steps since the last admission
    in which the lookup was postponed. `waited_s` is the number of seconds since the last admission in which the lookup
    was postponed, up to the last answer. `put_off_at_s` is the time at which the present postponement began, or 0 if
    the lookup is not postponed now.
    """

    __slots__ = (
        "asked_step", "hit", "local", "missed", "put_off_at_s", "put_off_steps", "staged", "units", "waited_s", "waits",
        "why",
    )  # fmt: skip

    def __init__(self, machine: Compiled, request_id: str, watch: Watch | None) -> None:
        """Start without an answer."""
        # The fields of `Cursor`, set here because calling its constructor takes longer.
        self.machine, self.key, self.state, self.watch = machine, request_id, machine.initial, watch
        self.put_off_steps, self.put_off_at_s, self.waited_s = 0, 0.0, 0.0  # the first answer sets the other fields

    @property
    def answer(self) -> LookupResult:
        """The last answer, for reports. The lookup must have been answered before."""
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
        """Record the answer to the lookup in `step`. `local`, `missed` and `hit` are numbers of tokens."""
        self.asked_step, self.local, self.missed, self.why = step, local, missed, why
        self.hit, self.units, self.waits, self.staged = hit, units, waits, staged
        if self.put_off_at_s:
            self.waited_s, self.put_off_at_s = self.waited_s + time.monotonic() - self.put_off_at_s, 0.0
        self.fire(lookup_m.ANSWER)

    def put_off(self, step: int, local: int, missed: int, why: str) -> None:
        """Record that the lookup in `step` is postponed for the reason `why`."""
        self.asked_step, self.local, self.missed, self.why = step, local, missed, why
        self.hit, self.units, self.waits, self.staged = 0, 0, False, NO_TIERS
        if not self.put_off_at_s:
            self.put_off_at_s = time.monotonic()
        self.fire(lookup_m.PUT_OFF)

    def admit(self) -> None:
        """Mark the answer as used by an admission."""
        self.fire(lookup_m.ADMIT)
        self.put_off_steps, self.put_off_at_s, self.waited_s = 0, 0.0, 0.0


class OpenChunk(msgspec.Struct, frozen=True, gc=False):
    """A chunk that is still being filled.

    The request has filled `filled` units of the chunk. The last filled unit has the key `key`. `base` is the index in
    the prefix of the chunk's first unit.
    """

    base: int
    chunk: Chunk
    filled: int
    key: bytes


class SaveProgress(Cursor):
    """How much of one request is saved.

    `saved_units` is the number of units of the prefix that are saved, are being saved, or were held already.
    `next_save_at_tokens` is the number of final tokens from which on a new unit can be saved.
    """

    __slots__ = ("next_save_at_tokens", "opened", "retries", "saved_units")

    def __init__(self, machine: Compiled, request_id: str, groups: int, watch: Watch | None) -> None:
        """Start with nothing saved. `groups` is the number of cache groups.

        `opened` has the chunk being filled, for each group.
        """
        # The fields of `Cursor`, set here because calling its constructor takes longer.
        self.machine, self.key, self.state, self.watch = machine, request_id, machine.initial, watch
        self.saved_units = self.next_save_at_tokens = self.retries = 0
        self.opened: list[OpenChunk | None] = [None] * groups

    def admit(self, held_units: int) -> None:
        """Start the saves again, because the request was admitted with new blocks.

        The first `held_units` units of the request need no save.
        """
        if self.fire(m.ADMIT).moves:
            self.close_chunks()
        self.saved_units = held_units
        self.next_save_at_tokens = self.retries = 0

    def planned(self, next_save_at_tokens: int) -> None:
        """Record that all final units are saved or are being saved, including this step's save.

        The next unit becomes final at `next_save_at_tokens` tokens.
        """
        self.fire(m.PLANNED)
        self.next_save_at_tokens = next_save_at_tokens

    def complete(self) -> None:
        """Stop saving, because nothing more of the request will have to be saved."""
        self.fire(m.COMPLETE)
        self.next_save_at_tokens = BEYOND_TOKENS

    def lost(self, first_unit: int) -> None:
        """A save from unit `first_unit` on has failed.

        Retry the save, at most `SAVE_RETRIES_MAX` times per admission.
        """
        self.close_chunks()
        if self.retries < SAVE_RETRIES_MAX and self.fire(m.LOST).to.row == m.OPEN:
            self.retries += 1
            self.saved_units = min(self.saved_units, first_unit)
            self.next_save_at_tokens = 0

    def preempted(self) -> None:
        """Save nothing before the next admission, because the request has lost its blocks."""
        self.fire(m.GIVE_UP)
        self.next_save_at_tokens = BEYOND_TOKENS
        self.seal_chunks()

    def give_up(self) -> None:
        """Save nothing before the next admission, because the bytes of the request's blocks may be wrong."""
        self.preempted()
        self.close_chunks()

    def seal_chunks(self) -> None:
        """Mark the chunks that are being filled: this request adds nothing more. Other requests may add units."""
        for opened in self.opened:
            if opened is not None:
                opened.chunk.seal()

    def close(self, group: int) -> None:
        """Close the chunk of `group` that is being filled, if any: the request adds no more units to this chunk."""
        opened, self.opened[group] = self.opened[group], None
        if opened is not None:
            opened.chunk.seal()

    def close_chunks(self) -> None:
        """Close the chunks that are being filled, so that no units are added to these chunks any more."""
        self.seal_chunks()
        self.opened = [None] * len(self.opened)


Machines: TypeAlias = tuple[Compiled, Compiled, Compiled]
"""The state machines of requests, of lookups and of saving, compiled for one engine."""
Watches: TypeAlias = tuple[Watch | None, Watch | None, Watch | None]
"""The watches of a request's cursors: of the request, of its lookup and of its saving, in this order."""


class RequestContext:
    """The data for the trace events of one request. Times are nanoseconds of the monotonic clock, loads are tokens."""

    __slots__ = (
        "added_ns", "admissions", "answer", "epoch", "failures", "loaded", "loading", "loading_ns", "loading_since",
        "number", "pages_saved", "sampled", "traceparent",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        """Start outside of the trace sample.

        `number` names the request's cursor in traces, and differs for each request.
        """
        self.number, self.traceparent, self.sampled = number, "", False
        self.added_ns = time.monotonic_ns()
        self.answer: LookupResult | None = None
        self.epoch = self.admissions = self.failures = self.loading = self.loaded = self.pages_saved = (
            0  # the loads are in tokens
        )
        self.loading_since = self.loading_ns = 0

    def end_loading(self) -> None:
        """Add the time of an asynchronous load that is under way to `loading_ns`."""
        if self.loading_since:
            self.loading_ns += time.monotonic_ns() - self.loading_since
            self.loading_since = 0


class Tracked(Cursor):
    """A request that the scheduler side tracks.

    `load_job_id` is the id of this admission's load until the load is over, and otherwise 0. `wishes` are the hints
    that came with the request. `hints` are the same hints with times of the catalog's clock. Until the request ends,
    these times count from the request's arrival, not from the request's end.
    """

    __slots__ = (
        "asking",
        "hints",
        "life",
        "limits",
        "load_job_id",
        "precedence",
        "preemptions",
        "request",
        "saving",
        "stage",
        "wishes",
    )  # fmt: skip

    def __init__(
        self, machines: Machines, request: Request, groups: int, precedence: Precedence, life: RequestContext,
        watches: Watches,
    ) -> None:  # fmt: skip
        """Start to track. `groups` is the number of cache groups.

        The request with the lowest `precedence` is served first. `life` is the data for the request's trace events.
        """
        (machine, lookup, saving), (watch, watch_lookup, watch_saving) = machines, watches
        request_id = request.request_id
        self.machine, self.key, self.state, self.watch = machine, request_id, machine.initial, watch
        self.request, self.precedence, self.life = request, precedence, life
        self.asking = Asking(lookup, request_id, watch_lookup)
        self.saving = SaveProgress(saving, request_id, groups, watch_saving)
        self.load_job_id = 0
        self.preemptions = request.num_preemptions
        self.stage: RequestStage | None = None
        self.limits = NO_LIMITS
        self.wishes: tuple[Wish, ...] = ()
        self.hints: tuple[Hint, ...] = ()

    @property
    def epoch(self) -> int:
        """The number of the request's last admission, unique in the engine."""
        return self.life.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.life.epoch = epoch
