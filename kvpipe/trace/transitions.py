"""The moves of machines in a trace: the event of each move of each machine; and a list of all events.

A `Transition` is the move of one machine's cursor: in `machine`, cursor `cursor` (a job's id, a slot, a request's
serial number) went from state `was` to `now` because of event `on`. A trace holds every one of them, in order: `replay`
proves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import msgspec

from kvpipe.statemachine import breaker, carry, chunk, copy, job, lookup, request, saving, stage
from kvpipe.statemachine.core import Compiled, Edge, Machine, State
from kvpipe.trace.events import WARNING, Event, tag_of

MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        copy.SAVE, copy.LOAD, request.REQUEST, lookup.LOOKUP, saving.SAVING, job.JOB, chunk.CHUNK, stage.STAGE,
        carry.CARRY, breaker.BREAKER,
    )
}  # fmt: skip


class Transition(Event):
    """A cursor has taken an edge: it moved, or (`no_op`, `illegal`) did not."""

    machine: str = ""
    cursor: int = 0
    on: str = ""
    was: str = ""
    now: str = ""
    why: str = ""


class NoOp(Transition, tag="no_op"):
    """The event changes nothing in this state; `why` is the table's reason."""


class Illegal(Transition, tag="illegal"):
    """The table rejects the event here: a bug of kvpipe, contained. The cursor has not moved."""

    level = WARNING
    throttled = True


class LayerLanded(Transition, tag="layer_landed"):
    """The rank's loop has seen one more layer of the job land: `layer_copied` says when that was."""


class Confirmed(Transition, tag="confirmed"):
    """The job's step has confirmed it, before all of its layers have landed."""


class Finalized(Transition, tag="finalized"):
    """All layers of the job have landed, and its step has confirmed it."""


class Aborted(Transition, tag="aborted"):
    """The job was withdrawn."""


class Failed(Transition, tag="failed"):
    """The job failed; `why` is the reason."""


JOB_ENDS = (Finalized, Failed, Aborted)
"""The events in which a save or load ends on a rank."""


class Running(Transition, tag="running"):
    """The request computes."""


class Preempted(Transition, tag="preempted"):
    """vLLM took the request's blocks."""


class Resumed(Transition, tag="resumed"):
    """A request that had lost its blocks was admitted again."""


class Recomputing(Transition, tag="recomputing"):
    """A load of the request failed."""


class Finished(Transition, tag="finished"):
    """The request is over."""


class Reserved(Transition, tag="reserved"):
    """A slot was claimed for a new chunk."""


class Published(Transition, tag="published"):
    """Every rank has what was being written to the chunk: it can be found."""


class Evicted(Transition, tag="evicted"):
    """The slot is free."""


def _named(tag: str, sentence: str) -> type[Transition]:
    """Make an event class for a move; for those that this package does not name by class."""
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
        "answered", "The lookup was answered: what can be loaded for the request, or that nothing can."
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
    ("carry", carry.MISSED): _named("missed", "The tier did not have the chunk after all; `why`: what it had instead."),
    ("carry", carry.FAILED): Failed,
    ("carry", carry.ABORTED): Aborted,
    ("breaker", breaker.OPEN): _named("breaker_opened", "A tier is left alone."),
    ("breaker", breaker.HALF_OPEN): _named("breaker_half_opened", "A probe succeeded: the next call decides."),
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
"""The event of every move that the tables allow."""


class Taken(msgspec.Struct, gc=False):
    """An edge that a cursor has taken, of which the writer's thread makes the event. `number`: of the cursor."""

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
        """Return the event. `rank`: of this process."""
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


EVENTS: dict[str, type[Event]] = {tag_of(one): one for one in _all(Event)}
"""Every event, by its name."""
