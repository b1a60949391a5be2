"""The moves of machines in a trace. This module has the event of each move of each machine, and a list of all events.

A `Transition` is the move of one machine's cursor. Cursor `cursor` of `machine` moved from state `was` to state `now`
because of event `on`. `cursor` is a job's id, a slot, or a request's serial number. A trace has every transition in
order. `replay` checks the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import msgspec

from kvpipe.statemachine import breaker, carry, chunk, copy, job, lookup, node_grant, node_link, request, saving, stage
from kvpipe.statemachine.core import Compiled, Edge, Machine, State
from kvpipe.trace.events import INFO, WARNING, Event, tag_of

MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        copy.SAVE, copy.LOAD, request.REQUEST, lookup.LOOKUP, saving.SAVING, job.JOB, chunk.CHUNK, stage.STAGE,
        carry.CARRY, breaker.BREAKER, node_link.NODE_LINK, node_grant.NODE_GRANT,
    )
}  # fmt: skip


class Transition(Event):
    """A cursor has taken an edge. The cursor has moved, unless the event is `no_op` or `illegal`."""

    machine: str = ""
    cursor: int = 0
    on: str = ""
    was: str = ""
    now: str = ""
    why: str = ""


class NoOp(Transition, tag="no_op"):
    """The event changes nothing in this state. `why` is the table's reason."""


class Illegal(Transition, tag="illegal"):
    """The table rejects the event in this state, which is a contained bug of kvpipe. The cursor has not moved."""

    level = WARNING
    throttled = True


class LayerLanded(Transition, tag="layer_landed"):
    """The rank's loop thread has handled the landing of one more layer of the job. `layer_copied` has the time."""


class Confirmed(Transition, tag="confirmed"):
    """The job's step has confirmed the job before all layers of the job have landed."""


class Finalized(Transition, tag="finalized"):
    """All layers of the job have landed, and the job's step has confirmed the job."""


class Aborted(Transition, tag="aborted"):
    """The job was withdrawn."""


class Failed(Transition, tag="failed"):
    """The job has failed. `why` is the reason."""


JOB_ENDS = (Finalized, Failed, Aborted)
"""The events with which a save or load ends on a rank."""


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


class ChunkPublished(Transition, tag="published"):
    """Every rank has the pieces that were being written to the chunk, so that lookups can find the chunk."""


class Evicted(Transition, tag="evicted"):
    """The slot is free."""


class HolderLost(Transition, tag="holder_lost"):
    """The holder of the node's memory has ended or is silent. Hits continue, and saves use the stock."""

    level = WARNING


class HolderReplaced(Transition, tag="holder_replaced"):
    """Another holder has taken over the node's memory."""

    level = INFO


class NodeStranded(Transition, tag="node_stranded"):
    """The node's new holder has another memory. Hits continue until the engine ends, and saves end with the stock."""

    level = WARNING


def _named(tag: str, sentence: str) -> type[Transition]:
    """Make an event class for a move for which this module defines none."""
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
    ("request", request.ALLOCATED): _named("allocated", "Blocks were allocated for a hit, and its chunks were leased."),
    ("request", request.LOADING): _named("dispatched", "The load was sent with the step's metadata."),
    ("request", request.RUNNING): Running,
    ("request", request.LET_DOWN): _named(
        "let_down", "Another connector's load for the request has failed, and vLLM has taken its blocks back."
    ),
    ("request", request.PREEMPTED): Preempted,
    ("request", request.RECOMPUTING): Recomputing,
    ("request", request.DRAINING): _named("draining", "The request has finished before its load."),
    ("request", request.FINISHED): Finished,
    ("lookup", lookup.ASKED): _named(
        "answered", "The lookup returned how many tokens can be loaded for the request, perhaps none."
    ),
    ("lookup", lookup.LATER): _named("put_off", "The engine was asked to repeat the request's lookup."),
    ("lookup", lookup.UNASKED): _named("answer_used", "The request was admitted with the lookup's answer."),
    ("saving", saving.OPEN): _named(
        "saving_opened", "The next step of the request looks for final units that are not saved."
    ),
    ("saving", saving.WAITING): _named("saving_waits", "All final units of the request are saved, or are being saved."),
    ("saving", saving.GIVEN_UP): _named(
        "saving_given_up", "Nothing more of the request is saved before its next admission."
    ),
    ("saving", saving.DONE): _named(
        "saving_done", "All of the request's prompt is saved, or is being saved, and its answer will not be saved."
    ),
    ("job", job.DOUBTED): _named(
        "job_doubted", "A job is in doubt: it will fail, although ranks have yet to report it."
    ),
    ("job", job.DONE): _named("job_done", "Every rank has done the job."),
    ("job", job.LOST): _named("job_lost", "Every rank has reported the job, and the job has failed."),
    ("chunk", chunk.RESERVED): Reserved,
    ("chunk", chunk.GROWING): _named("growing", "A further piece of a chunk is being written."),
    ("chunk", chunk.READY): ChunkPublished,
    ("chunk", chunk.EVICTING): _named("evicting", "A chunk was evicted while it is read or written."),
    ("chunk", chunk.ABSENT): Evicted,
    ("stage", stage.FOUND): _named("tier_found", "Tiers hold more of the request's prefix than memory."),
    ("stage", stage.FETCHING): _named("fetching", "The ranks were ordered to fetch chunks while the request waits."),
    ("stage", stage.HELD): _named(
        "staged", "The request does not wait any more. The fetched chunks are leased for it."
    ),
    ("stage", stage.OVER): _named("unstaged", "The leases for the waiting request have ended."),
    ("carry", carry.MOVING): _named("carry_begun", "A chunk's bytes are being transferred from or to a tier."),
    ("carry", carry.FINALIZED): Finalized,
    ("carry", carry.MISSED): _named(
        "missed", "The tier did not have the chunk after all. `why` says what it had instead."
    ),
    ("carry", carry.FAILED): Failed,
    ("carry", carry.ABORTED): Aborted,
    ("breaker", breaker.OPEN): _named("breaker_opened", "A tier failed and is not used any more."),
    ("breaker", breaker.HALF_OPEN): _named(
        "breaker_half_opened", "A probe of a tier succeeded. The result of the next call closes or opens the breaker."
    ),
    ("breaker", breaker.CLOSED): _named("breaker_closed", "A tier is used again."),
    ("node_link", node_link.ATTACHED): _named("node_attached", "The engine uses the memory of its node from now on."),
    ("node_link", node_link.ORPHANED): HolderLost,
    ("node_link", node_link.STRANDED): NodeStranded,
    ("node_link", node_link.REFUSED): _named("node_refused", "No holder has accepted the engine."),
    ("node_link", node_link.CLOSED): _named("node_left", "The engine does not use the memory of its node any more."),
    ("node_grant", node_grant.WRITING): _named("slot_taken", "A save took a granted slot of the node's memory."),
    ("node_grant", node_grant.SENT): _named("slot_reported", "All ranks have landed a chunk, so its slot is reported."),
    ("node_grant", node_grant.STOCKED): _named("slot_stocked", "A granted slot is free again for the next save."),
    ("node_grant", node_grant.SETTLED): _named("slot_settled", "A granted slot belongs to the holder again."),
}


def event_of_move(machine: str, was: str, now: str) -> type[Transition]:
    """Return the event of a move from row `was` to row `now` of a machine's table."""
    if (
        machine == "request"
        and was in {request.LET_DOWN, request.PREEMPTED}
        and now in {request.ALLOCATED, request.RUNNING}
    ):
        return Resumed
    if was == copy.LAYER and now == copy.CONFIRMED_LAYER:
        return Confirmed
    if was == node_link.ORPHANED and now == node_link.ATTACHED:
        return HolderReplaced
    return _BY_STATE[machine, now]


def _moves(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (row before, row after) for every move that the machine's table allows."""
    for was, cells in machine.table.items():
        for cell in cells.values():
            yield from ((was, now) for now in machine.leads_to(cell))


KINDS: dict[tuple[str, str, str], type[Transition]] = {
    (m.name, was, now): event_of_move(m.name, was, now) for m in MACHINES.values() for was, now in _moves(m)
}
"""The event class of every move that the tables allow."""


class TakenEdge(msgspec.Struct, gc=False):
    """An edge that a cursor has taken. The writer's thread makes an event from the edge.

    `number` is the cursor's number.
    """

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
        """Return the event of this edge. `rank` is the rank of this process."""
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
"""Every event class, by the event's name."""
