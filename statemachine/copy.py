"""The copy machines, `SAVE` and `LOAD`: one job of one request, copied layer by layer. One builder makes both.

``LAYER_k`` means that the copies of layers 0 to k *have landed*: completion events cause the transitions, never the
number of times that vLLM called a hook. A job is FINALIZED when two conditions hold; they may come in either order:

* every layer has landed;
* its step has *confirmed* it. For a save: every layer was submitted, and no sync load of the step has failed before
  (what was computed over a failed load is worthless). For a sync load: every attention layer waited for its copy. A
  layer whose hook did not run (as in a replayed full CUDA graph) may have read the block before the copy; its load has
  failed. An async load is confirmed as it begins: nobody reads its blocks before it is reported.

If the device waits, and not the host, the confirmation comes before the landings: those are the ``CONFIRMED`` states.
"""

from __future__ import annotations

from typing import Final

from kvpipe.statemachine.core import Cell, Cursor, Edge, Machine, advance, go, reject, stay

PENDING, LAYER, LANDED = "PENDING", "LAYER", "LANDED"
CONFIRMED, CONFIRMED_LAYER = "CONFIRMED", "CONFIRMED_LAYER"
FINALIZED, ABORTED, FAILED = "FINALIZED", "ABORTED", "FAILED"

LANDED_NEXT, LANDED_AGAIN, LANDED_GAP = "landed_next", "landed_again", "landed_gap"
CONFIRM, DENY, CANCEL, FAULT = "confirm", "deny", "cancel", "fault"

_LANDED: Final = {
    LANDED_NEXT: "the copy of layer k+1 completed",
    LANDED_AGAIN: "a completion of layer <= k was delivered again",
    LANDED_GAP: "a completion beyond layer k+1 arrived",
}
_ONCE: Final = reject("a step ends once: it is confirmed, denied or withdrawn")
_WHOLE: Final = reject("every layer has landed already")
_NONE: Final = reject("no layer has landed yet")
_GIVEN_UP: Final = reject("a job that was given up early counts from before the first layer")


def _machine(
    name: str, prose: str, states: dict[str, str], events: dict[str, str], *, denied: Cell, late_fault: Cell
) -> Machine:
    """Build `SAVE` or `LOAD`. `denied`: the cell LANDED x deny; `late_fault`: the cell FINALIZED x fault."""

    def row(*landed: Cell, ended: bool = False, **other: Cell) -> dict[str, Cell]:
        end = dict.fromkeys((CONFIRM, DENY, CANCEL), _ONCE) if ended else {DENY: go(FAILED), CANCEL: go(ABORTED)}
        cells = dict(zip(_LANDED, landed, strict=True)) | end | {FAULT: go(FAILED)} | other
        return {event: cells[event] for event in events}

    redelivered = stay("redelivered")
    withdrawn, failed = stay("withdrawn: a late event changes nothing"), stay("failed: a late event changes nothing")
    table = {
        PENDING: row(advance(LAYER), _NONE, go(FAILED), confirm=go(CONFIRMED)),
        LAYER: row(advance(LAYER), redelivered, go(FAILED), confirm=go(CONFIRMED_LAYER)),
        LANDED: row(_WHOLE, redelivered, _WHOLE, confirm=go(FINALIZED), deny=denied),
        CONFIRMED: row(advance(CONFIRMED_LAYER), _NONE, go(FAILED), ended=True),
        CONFIRMED_LAYER: row(advance(CONFIRMED_LAYER), redelivered, go(FAILED), ended=True),
        FINALIZED: row(_WHOLE, redelivered, _WHOLE, ended=True, fault=late_fault),
        ABORTED: row(withdrawn, _GIVEN_UP, withdrawn, ended=True, fault=withdrawn),
        FAILED: row(failed, _GIVEN_UP, failed, confirm=failed, deny=failed, cancel=failed, fault=failed),
    }
    return Machine(
        name=name,
        prose=prose,
        initial=PENDING,
        finals=frozenset({FINALIZED, ABORTED, FAILED} & set(states)),
        layered={LAYER: LANDED, CONFIRMED_LAYER: FINALIZED},
        whole=frozenset({LANDED, FINALIZED}),
        states=states,
        events=events,
        table={state: table[state] for state in states},
    )


SAVE: Final = _machine(
    "save",
    "One save job: copies of one request's newly final blocks, layer by layer, into host slots.",
    {
        PENDING: "planned; no layer has landed",
        LAYER: "layers 0..k have landed",
        LANDED: "every layer has landed; the step has not ended, so its loads may still turn out to have failed",
        CONFIRMED: "the step has ended and every layer was submitted; none has landed",
        CONFIRMED_LAYER: "the step has ended and every layer was submitted; layers 0..k have landed",
        FINALIZED: "every layer has landed and the step has ended; this rank vouches for the bytes",
        ABORTED: "withdrawn before its step ended (shutdown, or the step never did)",
        FAILED: "a copy or a load of the step failed, or a layer was never submitted; the chunk stays invisible",
    },
    _LANDED | {
        CONFIRM: "the step ended and every layer had been submitted",
        DENY: "the step ended and a layer had not been submitted",
        CANCEL: "the job is withdrawn, its step never having ended",
        FAULT: "a copy failed, or a load of the same step did",
    },
    denied=reject("every layer has landed, so every layer was submitted"),
    late_fault=stay("the wait was given up just as the last copy landed: the bytes are true"),
)  # fmt: skip
LOAD: Final = _machine(
    "load",
    "One load job: copies of one request's hit, layer by layer, from leased host slots into paged blocks.",
    {
        PENDING: "planned; no layer has landed",
        LAYER: "layers 0..k have landed",
        LANDED: "every layer has landed; the step has not confirmed that attention waited",
        CONFIRMED: "every reader waits, or there is none; no layer has landed",
        CONFIRMED_LAYER: "every reader waits, or there is none; layers 0..k have landed",
        FINALIZED: "every layer was in place before it was read",
        FAILED: "a copy failed, or a layer was read without waiting: the blocks are reported and recomputed",
    },
    _LANDED | {
        CONFIRM: "every reader waits for its copy (step end of a sync load), or nobody reads yet (async load)",
        DENY: "the step ended and an attention layer had not waited for its copy",
        FAULT: "a copy failed, or the step was withdrawn",
    },
    denied=go(FAILED),
    late_fault=reject("every copy has completed already"),
)  # fmt: skip


class LayerCursor(Cursor):
    """A cursor over a layered machine: fires the event that fits a layer which has landed."""

    __slots__ = ()

    def landed(self, k: int, why: str = "") -> Edge:
        """Fire `LANDED_NEXT`, `LANDED_AGAIN` or `LANDED_GAP` for layer `k`, from 0 on, in the order of submission.

        Returns the edge taken. Raises IllegalTransition where the table rejects it.
        """
        ahead = k - self.state.k
        return self.fire(LANDED_NEXT if ahead == 1 else LANDED_AGAIN if ahead <= 0 else LANDED_GAP, why)
