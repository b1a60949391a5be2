"""The machines `SAVE` and `LOAD` follow one job of one request, copied layer by layer. `_machine` builds both machines.

``LAYER_k`` means that the copies of layers 0 to k *have landed*. Completed copies cause the transitions, not calls of
hooks. A job is FINALIZED when two conditions are true. They may become true in either order:

* Every layer has landed.
* The job's step has *confirmed* the job. A save is confirmed if every layer was submitted and no earlier sync load of
  the step has failed. KV that is computed from a failed load is garbage. A sync load is confirmed if every attention
  layer waited for its copy. If the hook of a layer did not run (as in a replayed full CUDA graph), the load fails,
  because the layer may have read a block before the copy. An async load is confirmed at its beginning, because no
  forward reads its blocks before the load is reported.

If the device waits instead of the host, the job is confirmed before its layers land. Such a job passes through the
``CONFIRMED`` states.
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
_ONCE: Final = reject("a step ends only once: it is confirmed, denied or withdrawn")
_WHOLE: Final = reject("every layer has landed already")
_NONE: Final = reject("no layer has landed yet")
_GIVEN_UP: Final = reject("a job that has ended early counts no landed layers")


def _machine(
    name: str, prose: str, states: dict[str, str], events: dict[str, str], *, denied: Cell, late_fault: Cell
) -> Machine:
    """Build `SAVE` or `LOAD`. `denied` is the cell (LANDED, deny), and `late_fault` is the cell (FINALIZED, fault)."""

    def row(*landed: Cell, ended: bool = False, **other: Cell) -> dict[str, Cell]:
        end = dict.fromkeys((CONFIRM, DENY, CANCEL), _ONCE) if ended else {DENY: go(FAILED), CANCEL: go(ABORTED)}
        cells = dict(zip(_LANDED, landed, strict=True)) | end | {FAULT: go(FAILED)} | other
        return {event: cells[event] for event in events}

    redelivered = stay("redelivered")
    withdrawn, failed = (
        stay("the job was withdrawn: a late event changes nothing"),
        stay("the job has failed: a late event changes nothing"),
    )
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
        PENDING: "the job was planned; no layer has landed",
        LAYER: "layers 0..k have landed",
        LANDED: "every layer has landed; the step has not ended, so its loads may still turn out to have failed",
        CONFIRMED: "the step has ended and every layer was submitted; none has landed",
        CONFIRMED_LAYER: "the step has ended and every layer was submitted; layers 0..k have landed",
        FINALIZED: "every layer has landed and the step has ended: this rank guarantees the bytes",
        ABORTED: "the job was withdrawn before its step ended, because of a shutdown or because the step never ended",
        FAILED: "a copy or a load of the step failed, or a layer was never submitted; the chunk cannot be found",
    },
    _LANDED | {
        CONFIRM: "the step ended and every layer had been submitted",
        DENY: "the step ended and a layer had not been submitted",
        CANCEL: "the job is withdrawn because its step never ended",
        FAULT: "a copy of this job failed, or a load of the same step failed",
    },
    denied=reject("every layer has landed, so every layer was submitted"),
    late_fault=stay("the wait timed out just when the last copy landed: the bytes are right"),
)  # fmt: skip
LOAD: Final = _machine(
    "load",
    "One load job: copies of one request's hit, layer by layer, from leased host slots into paged blocks.",
    {
        PENDING: "the job was planned; no layer has landed",
        LAYER: "layers 0..k have landed",
        LANDED: "every layer has landed; the step has not confirmed that attention waited",
        CONFIRMED: "every reader waits, or there is no reader; no layer has landed",
        CONFIRMED_LAYER: "every reader waits, or there is no reader; layers 0..k have landed",
        FINALIZED: "every layer had landed before it was read",
        FAILED: "a copy failed, a slot had other bytes, or a layer was read without waiting: the blocks are reported "
                "and recomputed",
    },
    _LANDED | {
        CONFIRM: "every reader waits for its copy (end of the step of a sync load), or no reader has begun "
                 "(async load)",
        DENY: "the step ended, but an attention layer had not waited for its copy",
        FAULT: "a copy failed, a slot had other bytes, or the step was withdrawn",
    },
    denied=go(FAILED),
    late_fault=reject("every copy has completed already"),
)  # fmt: skip


class LayerCursor(Cursor):
    """A cursor over a layered machine. The cursor fires the event that fits a landed layer."""

    __slots__ = ()

    def landed(self, k: int, why: str = "") -> Edge:
        """Fire `LANDED_NEXT`, `LANDED_AGAIN` or `LANDED_GAP` for layer `k`. Layers count from 0 in submission order.

        Returns the edge that the cursor took. Raises IllegalTransition if the table rejects the event.
        """
        ahead = k - self.state.k
        return self.fire(LANDED_NEXT if ahead == 1 else LANDED_AGAIN if ahead <= 0 else LANDED_GAP, why)
