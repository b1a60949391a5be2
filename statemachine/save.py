"""The save machine: one save job, the blocks of one request that became final in one engine step.

``LAYER_k`` means that the copy of layer k *has landed*: transitions come from completion events, never from the
number of times that vLLM called a hook. The step's end only states what was submitted; before it nothing is final,
because a sync load of the same step that turns out to have failed makes what the step computed worthless.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Advance, Cursor, Edge, Machine, go, reject, stay

PENDING, LAYER, LANDED = "PENDING", "LAYER", "LANDED"
FINALIZED, ABORTED, FAILED = "FINALIZED", "ABORTED", "FAILED"

LANDED_NEXT, LANDED_AGAIN, LANDED_GAP = "landed_next", "landed_again", "landed_gap"
STEP_END_COMPLETE, STEP_END_MISSING = "step_end_complete", "step_end_missing"
EMPTY_STEP, PREEMPT, ABORT, CANCEL, FAULT = "empty_step", "preempt", "abort", "cancel", "fault"

_CONTENT = "chunks are addressed by content and the source blocks are fenced: the bytes stay true without the request"
_DONE = "the job is over"

_EVENTS = {
    LANDED_NEXT: "the copy of layer k+1 completed",
    LANDED_AGAIN: "a completion of layer <= k was delivered again",
    LANDED_GAP: "a completion beyond layer k+1 arrived",
    STEP_END_COMPLETE: "the step ended and every layer had been submitted",
    STEP_END_MISSING: "the step ended and a layer had not been submitted",
    EMPTY_STEP: "a later step ended that has no work for this job",
    PREEMPT: "the request was preempted",
    ABORT: "the request finished or was aborted",
    CANCEL: "the job is withdrawn",
    FAULT: "a copy failed, or a load of the same step did",
}

SAVE = Machine(
    name="save",
    prose="One save job: copies of one request's newly final blocks, layer by layer, into host slots.",
    initial=PENDING,
    finals=frozenset({FINALIZED, ABORTED, FAILED}),
    layered=LAYER,
    after_last=LANDED,
    whole=frozenset({LANDED, FINALIZED}),
    states={
        PENDING: "planned; no layer has landed",
        LAYER: "layers 0..k have landed",
        LANDED: "every layer has landed; the step has not ended, so its loads may still turn out to have failed",
        FINALIZED: "every layer has landed and the step has ended; this rank vouches for the bytes",
        ABORTED: "withdrawn before it was whole (shutdown, or its step never ended)",
        FAILED: "a copy or a load of the step failed, or a layer was never submitted; the chunk stays invisible",
    },
    events=_EVENTS,
    table={
        PENDING: {
            LANDED_NEXT: Advance(),
            LANDED_AGAIN: reject("no layer has landed yet"),
            LANDED_GAP: go(FAILED),
            STEP_END_COMPLETE: stay("the copies are still landing"),
            STEP_END_MISSING: go(FAILED),
            EMPTY_STEP: stay("the copies are still landing"),
            PREEMPT: stay(_CONTENT),
            ABORT: stay(_CONTENT),
            CANCEL: go(ABORTED),
            FAULT: go(FAILED),
        },
        LAYER: {
            LANDED_NEXT: Advance(),
            LANDED_AGAIN: stay("redelivered"),
            LANDED_GAP: go(FAILED),
            STEP_END_COMPLETE: stay("the copies are still landing"),
            STEP_END_MISSING: go(FAILED),
            EMPTY_STEP: stay("the copies are still landing"),
            PREEMPT: stay(_CONTENT),
            ABORT: stay(_CONTENT),
            CANCEL: go(ABORTED),
            FAULT: go(FAILED),
        },
        LANDED: {
            LANDED_NEXT: reject("every layer has landed already"),
            LANDED_AGAIN: stay("redelivered"),
            LANDED_GAP: reject("every layer has landed already"),
            STEP_END_COMPLETE: go(FINALIZED),
            STEP_END_MISSING: reject("every layer has landed, so every layer was submitted"),
            EMPTY_STEP: stay("waits for its own step's end"),
            PREEMPT: stay(_CONTENT),
            ABORT: stay(_CONTENT),
            CANCEL: go(ABORTED),
            FAULT: go(FAILED),
        },
        FINALIZED: {
            LANDED_NEXT: reject("every layer has landed already"),
            LANDED_AGAIN: stay("redelivered"),
            LANDED_GAP: reject("every layer has landed already"),
            STEP_END_COMPLETE: stay("already whole"),
            STEP_END_MISSING: reject("every layer has landed, so every layer was submitted"),
            EMPTY_STEP: stay(_DONE),
            PREEMPT: stay(_CONTENT),
            ABORT: stay(_CONTENT),
            CANCEL: stay("already whole"),
            FAULT: stay("the wait was given up just as the last copy landed: the bytes are true"),
        },
        ABORTED: dict.fromkeys(_EVENTS, stay("withdrawn: late news changes nothing")),
        FAILED: dict.fromkeys(_EVENTS, stay("failed: late news changes nothing")),
    },
)


class LayerCursor(Cursor):
    """A cursor over a layered machine: turns 'layer k landed' into the right column."""

    __slots__ = ()

    def landed(self, k: int, why: str = "") -> Edge:
        """Report that the copy of layer `k` (0-based, in submission order) completed."""
        ahead = k - self.state.k
        return self.fire(LANDED_NEXT if ahead == 1 else LANDED_AGAIN if ahead <= 0 else LANDED_GAP, why)
