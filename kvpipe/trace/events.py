"""The closed set of events that a trace consists of. One line of JSON each; `event` says which.

Times are nanoseconds: `t_ns` of the monotonic clock, which all processes of a host share, and `wall_ns` since the epoch
(1970). `rank` is -1 on the scheduler's side. `engine` is the engine's id, `request` is vLLM's own request id: the two
link what scheduler and ranks say of one request. `epoch` counts admissions, `step` counts the scheduler's steps.

A `Transition` is the move of one machine's cursor: in `machine`, cursor `cursor` (a job's id, a slot, a request's
serial number) went from state `was` to `now` because of event `on`. A trace holds every one of them, in order: `replay`
proves it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import ClassVar, cast

import msgspec

from kvpipe.statemachine import breaker, carry, chunk, copy, job, lookup, request, saving, stage
from kvpipe.statemachine.core import Compiled, Edge, Machine, State

FORMAT = 1
"""Raised when a reader of the former format would misread a line."""

SCHEDULER = -1
"""`rank` of the scheduler's side."""

DEBUG, INFO, WARNING = logging.DEBUG, logging.INFO, logging.WARNING
MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        copy.SAVE, copy.LOAD, request.REQUEST, lookup.LOOKUP, saving.SAVING, job.JOB, chunk.CHUNK, stage.STAGE,
        carry.CARRY, breaker.BREAKER,
    )
}  # fmt: skip


class Event(msgspec.Struct, gc=False, tag_field="event", forbid_unknown_fields=True):
    """The fields of every event. `engine` and `wall_ns` are filled in by the writer."""

    level: ClassVar[int] = DEBUG
    throttled: ClassVar[bool] = False  # in the log, where it may come by the thousand

    t_ns: int
    rank: int
    request: str
    epoch: int
    step: int
    wall_ns: int = 0
    engine: str = ""


# ---- the recorder itself --------------------------------------------------------------------------------------------


class Started(Event, tag="started"):
    """A process began to write, or went on in a new file (`part` > 0).

    `side`: scheduler or worker; `layers`: of one rank; `sample` and `detail`: as configured.
    """

    format: int = FORMAT
    kvpipe: str = ""
    side: str = ""
    pid: int = 0
    layers: int = 0
    part: int = 0
    sample: float = 1.0
    detail: bool = True


class Ended(Event, tag="ended"):
    """A process ended in good order, and had dropped so many events."""

    dropped: int = 0


class Dropped(Event, tag="dropped"):
    """Events were lost here: the queue was full, or the file could not be written."""

    level = WARNING
    throttled = True
    count: int = 0
    why: str = ""


# ---- a request's life -----------------------------------------------------------------------------------------------


class RequestAdded(Event, tag="request_added"):
    """vLLM has a new request. `traceparent`: the W3C header it came with, if any."""

    prompt_tokens: int = 0
    traceparent: str = ""


class Lookup(Event, tag="lookup"):
    """The scheduler asked for hits, and the answer is another than the last time.

    `local_tokens` vLLM has itself; `hit_tokens`, by tier, come on top; `missed_tokens` are neither's, for reason `why`
    (`kvpipe.cache.miss_reasons`). `later`: ask again.
    """

    local_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    missed_tokens: int = 0
    why: str = ""
    later: bool = False


class RequestAdmitted(Event, tag="request_admitted"):
    """First admission: blocks are allocated. `waited_ms`: since the request was added; else as in `Lookup`."""

    level = INFO
    prompt_tokens: int = 0
    local_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    missed_tokens: int = 0
    why: str = ""
    load: str = ""
    waited_ms: float = 0.0


class RequestReadmitted(RequestAdmitted, tag="request_readmitted"):
    """A later admission, after a preemption or a failed load."""

    level = DEBUG


class RequestDone(Event, tag="request_done"):
    """The request is over: what kvpipe did for it. `status` is vLLM's.

    `loading_ms`: how long it waited for async loads; `saved_pages`: blocks of all groups that were saved.
    """

    level = INFO
    status: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    loaded_tokens: int = 0
    saved_pages: int = 0
    preemptions: int = 0
    loads_failed: int = 0
    loading_ms: float = 0.0
    lived_ms: float = 0.0
    traceparent: str = ""


class LeasesTaken(Event, tag="leases_taken"):
    """An admission holds so many chunks until its load ends."""

    chunks: int = 0


class LeasesReturned(Event, tag="leases_returned"):
    """They are evictable again."""

    chunks: int = 0


class LoadPlanned(Event, tag="load_planned"):
    """Job `job` will bring `tokens` back: `pages` blocks of all groups. `kind`: load_sync or load_async."""

    job: int = 0
    kind: str = ""
    pages: int = 0
    tokens: int = 0


class SavePlanned(Event, tag="save_planned"):
    """Job `job` will save `pages` blocks of all groups."""

    job: int = 0
    pages: int = 0


# ---- a rank's steps and copies --------------------------------------------------------------------------------------


class StepRan(Event, tag="step_ran"):
    """A rank ran a step: from `t_ns` on for `took_ns`, with so many jobs. `waited_ns` it waited for copies."""

    took_ns: int = 0
    jobs: int = 0
    waited_ns: int = 0


class LayerSubmitted(Event, tag="layer_submitted"):
    """The copy of one layer of a step's jobs of one `kind` was handed to the transfer engine, which uses `mover`."""

    kind: str = ""
    layer: int = 0
    jobs: list[int] = []
    mover: str = ""


class LayerCopied(Event, tag="layer_copied"):
    """It has ended: submitted at `t_ns`, it took `took_ns` until the loop thread was notified. `failed` names jobs."""

    kind: str = ""
    layer: int = 0
    jobs: list[int] = []
    took_ns: int = 0
    failed: list[int] = []


class MoverMeasured(Event, tag="mover_measured"):
    """At start-up a way to copy on CUDA was measured: time of a batch, of each copy in it, rate of endless bytes."""

    level = INFO
    kind: str = ""
    mover: str = ""
    fixed_us: float = 0.0
    copy_us: float = 0.0
    gb_per_s: float = 0.0


class PoolReady(Event, tag="pool_ready"):
    """All of a rank's pool is in memory, `took_ms` after it was begun."""

    level = INFO
    slots: int = 0
    gigabytes: float = 0.0
    took_ms: float = 0.0


class PoolShort(Event, tag="pool_short"):
    """There is no memory to spare for more of the pool than `ready` of its slots; it is asked for again later.

    `free_mb` are left, as `where` says.
    """

    level = WARNING
    ready: int = 0
    slots: int = 0
    free_mb: float = 0.0
    where: str = ""
    remedy: str = ""


# ---- what an operator switches, and what goes wrong -----------------------------------------------------------------


class FreezeSwitched(Event, tag="freeze_switched"):
    """Saving was stopped, or goes on."""

    level = WARNING
    on: bool = False


class CacheReset(Event, tag="cache_reset"):
    """Every chunk was forgotten."""

    level = WARNING
    chunks: int = 0


class TierSlow(Event, tag="tier_slow"):
    """A copy from or to a tier did not end in `waited_ms`; its jobs are failed."""

    level = WARNING
    throttled = True
    tier: str = ""
    waited_ms: float = 0.0


class TierLost(Event, tag="tier_lost"):
    """A tier does not work any more on this rank."""

    level = WARNING
    tier: str = ""
    why: str = ""


class TierLeft(Event, tag="tier_left"):
    """A slower tier fails, and is left alone until a probe says that it is back. `use`: find, read or write."""

    level = WARNING
    tier: str = ""
    use: str = ""
    why: str = ""


class TierBack(TierLeft, tag="tier_back"):
    """It is used again."""

    level = INFO


class Stuck(Event, tag="stuck"):
    """A job has not moved for `waited_ms` and is failed. `last`: its last transitions."""

    level = WARNING
    throttled = True
    job: int = 0
    kind: str = ""
    waited_ms: float = 0.0
    last: list[str] = []


class Fault(Event, tag="fault"):
    """Something went wrong and was contained: `name` is its counter, which stands at `seen`."""

    level = WARNING
    name: str = ""
    seen: int = 0
    fields: dict[str, str] = {}


# ---- transitions ----------------------------------------------------------------------------------------------------


class Transition(Event):
    """A cursor moved, or (`no_op`, `illegal`) did not."""

    machine: str = ""
    cursor: int = 0
    on: str = ""
    was: str = ""
    now: str = ""
    why: str = ""


class NoOp(Transition, tag="no_op"):
    """The event changes nothing here, and `why` says so."""


class Illegal(Transition, tag="illegal"):
    """The table rejects the event here: a bug of kvpipe, contained. The cursor has not moved."""

    level = WARNING
    throttled = True


class LayerLanded(Transition, tag="layer_landed"):
    """One more layer of the job has landed."""


class Confirmed(Transition, tag="confirmed"):
    """The job's step has ended well, before all of its layers have landed."""


class Finalized(Transition, tag="finalized"):
    """The rank vouches for the job."""


class Aborted(Transition, tag="aborted"):
    """The job was withdrawn."""


class Failed(Transition, tag="failed"):
    """The job failed; `why` says how."""


class Running(Transition, tag="running"):
    """The request computes."""


class Preempted(Transition, tag="preempted"):
    """vLLM took the request's blocks."""


class Resumed(Transition, tag="resumed"):
    """A request that had lost its blocks has some again."""


class Recomputing(Transition, tag="recomputing"):
    """A load of the request failed."""


class Finished(Transition, tag="finished"):
    """The request is over."""


class Reserved(Transition, tag="reserved"):
    """A slot was claimed for a new chunk."""


class Published(Transition, tag="published"):
    """Every rank has all of the chunk that was being written."""


class Evicted(Transition, tag="evicted"):
    """The slot is free."""


def _named(tag: str, sentence: str) -> type[Transition]:
    """Make an event of a move that nothing in this package asks for by its class."""
    made = msgspec.defstruct(tag.title().replace("_", ""), (), bases=(Transition,), tag=tag, gc=False)
    made.__doc__ = sentence
    return cast("type[Transition]", made)


_BY_STATE: dict[tuple[str, str], type[Transition]] = {
    **{
        (machine.name, state): kind
        for machine in (copy.SAVE, copy.LOAD)
        for state, kind in (
            (copy.LAYER, LayerLanded),
            (copy.LANDED, LayerLanded),
            (copy.CONFIRMED, Confirmed),
            (copy.CONFIRMED_LAYER, LayerLanded),
            (copy.FINALIZED, Finalized),
            (copy.ABORTED, Aborted),
            (copy.FAILED, Failed),
        )
    },
    ("request", request.ALLOCATED): _named("allocated", "Blocks for a hit, and leases."),
    ("request", request.LOADING): _named("dispatched", "The load went out with the step's metadata."),
    ("request", request.RUNNING): Running,
    ("request", request.LET_DOWN): _named(
        "let_down", "Another connector's load for the request has failed, and vLLM has taken its blocks back."
    ),
    ("request", request.PREEMPTED): Preempted,
    ("request", request.RECOMPUTING): Recomputing,
    ("request", request.DRAINING): _named("draining", "The request is over before its load."),
    ("request", request.FINISHED): Finished,
    ("lookup", lookup.ASKED): _named(
        "answered", "The engine was told what can be loaded for the request, or that nothing can."
    ),
    ("lookup", lookup.LATER): _named("put_off", "The engine was asked to ask for the request again."),
    ("lookup", lookup.UNASKED): _named("answer_used", "The request was admitted with the answer."),
    ("saving", saving.OPEN): _named(
        "saving_opened", "What of the request is final and not saved is looked for with its next step."
    ),
    ("saving", saving.WAITING): _named("saving_waits", "All of the request that is final is saved, or being saved."),
    ("saving", saving.GIVEN_UP): _named(
        "saving_given_up", "Nothing more of the request is saved before its next admission."
    ),
    ("saving", saving.DONE): _named(
        "saving_done", "All of the request's prompt is saved, or being saved, and its answer will not be."
    ),
    ("job", job.DOUBTED): _named("job_doubted", "A job is not believed any more, though ranks have yet to report it."),
    ("job", job.DONE): _named("job_done", "Every rank has done the job."),
    ("job", job.LOST): _named("job_lost", "Every rank has reported the job, and it is not believed."),
    ("chunk", chunk.RESERVED): Reserved,
    ("chunk", chunk.GROWING): _named("growing", "A further piece of a chunk is being written."),
    ("chunk", chunk.READY): Published,
    ("chunk", chunk.EVICTING): _named("evicting", "Evicted while it is read or written."),
    ("chunk", chunk.ABSENT): Evicted,
    ("stage", stage.FOUND): _named("tier_found", "Tiers hold more of the request's prefix than memory does."),
    ("stage", stage.FETCHING): _named("fetching", "The ranks are ordered to fetch it, while the request waits."),
    ("stage", stage.HELD): _named("staged", "The request waits no longer; what has come is leased for it."),
    ("stage", stage.OVER): _named("unstaged", "Nothing is leased for the waiting request any more."),
    ("carry", carry.MOVING): _named("carry_begun", "A chunk's bytes are on their way from or to a tier."),
    ("carry", carry.FINALIZED): Finalized,
    ("carry", carry.MISSED): _named("missed", "The tier did not have the chunk after all; `why` says what it had."),
    ("carry", carry.FAILED): Failed,
    ("carry", carry.ABORTED): Aborted,
    ("breaker", breaker.OPEN): _named("breaker_opened", "A tier is left alone."),
    ("breaker", breaker.HALF_OPEN): _named("breaker_half_opened", "It says that it is back: one call will show."),
    ("breaker", breaker.CLOSED): _named("breaker_closed", "It is used again."),
}


def kind_of(machine: str, was: str, now: str) -> type[Transition]:
    """Return the event of a move from row `was` to row `now` of a machine's table."""
    if (
        machine == "request"
        and was in {request.LET_DOWN, request.PREEMPTED}
        and now in {request.ALLOCATED, request.RUNNING}
    ):
        return Resumed
    if was == copy.LAYER and now == copy.CONFIRMED_LAYER:
        return Confirmed
    return _BY_STATE[machine, now]


def _moves(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (row, row) of every move that the machine's table allows."""
    for was, cells in machine.table.items():
        for cell in cells.values():
            yield from ((was, now) for now in machine.leads_to(cell))


KINDS: dict[tuple[str, str, str], type[Transition]] = {
    (m.name, was, now): kind_of(m.name, was, now) for m in MACHINES.values() for was, now in _moves(m)
}
"""The event of every move that is possible at all."""


class Taken(msgspec.Struct, gc=False):
    """An edge as it was taken: all that has to be kept at that moment. `number` is the cursor's in the trace."""

    t_ns: int
    request: str
    epoch: int
    step: int
    machine: Compiled
    number: int
    was: State
    edge: Edge
    why: str

    def event(self, rank: int) -> Transition:
        """Return the fields that are worth a log line."""
        edge, why, name = self.edge, self.why, self.machine.machine.name
        if edge.moves:
            kind = KINDS[name, self.was.row, edge.to.row]
        else:
            kind, why = (Illegal if edge.rejects else NoOp), edge.why
        states = self.was.name, edge.to.name
        return kind(
            self.t_ns, rank, self.request, self.epoch, self.step, 0, "", name, self.number, edge.event, *states, why
        )


def _all(base: type[Event]) -> Iterator[type[Event]]:
    for one in base.__subclasses__():
        if one is not Transition:
            yield one
        yield from _all(one)


def tag_of(event: Event | type[Event]) -> str:
    """Return what a trace calls this kind of event."""
    return str(event.__struct_config__.tag)


EVENTS: dict[str, type[Event]] = {tag_of(one): one for one in _all(Event)}
"""Every event, by its name."""
