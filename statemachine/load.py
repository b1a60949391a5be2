"""The load machine: one load job, the hit of one request on its way back into the paged KV cache.

It mirrors the save machine, with one more state: a layerwise (sync) load that has LANDED is FINALIZED only when
the step's end confirms that every attention layer waited for its copy. A layer whose hook did not run (a replayed
full CUDA graph, say) may have read the block before the copy, and nothing but a failure is then the truth.

Where waiting is done by the device (CUDA events), the confirmation comes ahead of the landings: it changes nothing
yet, and the pipeline gives it again once the last layer has landed. No order of the two finalizes early.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Advance, Machine, go, reject, stay
from kvpipe.statemachine.save import LANDED_AGAIN, LANDED_GAP, LANDED_NEXT

PENDING, LAYER, LANDED = "PENDING", "LAYER", "LANDED"
FINALIZED, ABORTED, FAILED = "FINALIZED", "ABORTED", "FAILED"

CONFIRM, UNWAITED = "confirm", "unwaited"
EMPTY_STEP, PREEMPT, ABORT, CANCEL, FAULT = "empty_step", "preempt", "abort", "cancel", "fault"

_BLOCKS = "the destination blocks are held until the job is reported, so the copy may finish"
_EARLY = "the device waits, not the host: confirmed again when the last layer has landed"
_DONE = "the job is over"

_EVENTS = {
    LANDED_NEXT: "the copy of layer k+1 completed",
    LANDED_AGAIN: "a completion of layer <= k was delivered again",
    LANDED_GAP: "a completion beyond layer k+1 arrived",
    CONFIRM: "every reader waits for its copy (step end of a sync load), or nobody reads yet (async load)",
    UNWAITED: "the step ended and an attention layer had not waited for its copy",
    EMPTY_STEP: "a step ended that has no work for this job",
    PREEMPT: "the request was preempted",
    ABORT: "the request finished or was aborted",
    CANCEL: "the job is withdrawn",
    FAULT: "a copy failed",
}

LOAD = Machine(
    name="load",
    prose="One load job: copies of one request's hit, layer by layer, from leased host slots into paged blocks.",
    initial=PENDING,
    finals=frozenset({FINALIZED, ABORTED, FAILED}),
    layered=LAYER,
    after_last=LANDED,
    whole=frozenset({LANDED, FINALIZED}),
    states={
        PENDING: "planned; no layer has landed",
        LAYER: "layers 0..k have landed",
        LANDED: "every layer has landed; the step has not confirmed that attention waited",
        FINALIZED: "every layer was in place before it was read",
        ABORTED: "withdrawn (shutdown)",
        FAILED: "a copy failed, or a layer was read without waiting: the blocks are reported and recomputed",
    },
    events=_EVENTS,
    table={
        PENDING: {
            LANDED_NEXT: Advance(),
            LANDED_AGAIN: reject("no layer has landed yet"),
            LANDED_GAP: go(FAILED),
            CONFIRM: stay(_EARLY),
            UNWAITED: go(FAILED),
            EMPTY_STEP: stay("the copies are still landing"),
            PREEMPT: stay(_BLOCKS),
            ABORT: stay(_BLOCKS),
            CANCEL: go(ABORTED),
            FAULT: go(FAILED),
        },
        LAYER: {
            LANDED_NEXT: Advance(),
            LANDED_AGAIN: stay("redelivered"),
            LANDED_GAP: go(FAILED),
            CONFIRM: stay(_EARLY),
            UNWAITED: go(FAILED),
            EMPTY_STEP: stay("the copies are still landing"),
            PREEMPT: stay(_BLOCKS),
            ABORT: stay(_BLOCKS),
            CANCEL: go(ABORTED),
            FAULT: go(FAILED),
        },
        LANDED: {
            LANDED_NEXT: reject("every layer has landed already"),
            LANDED_AGAIN: stay("redelivered"),
            LANDED_GAP: reject("every layer has landed already"),
            CONFIRM: go(FINALIZED),
            UNWAITED: go(FAILED),
            EMPTY_STEP: stay("waits for its own step's end"),
            PREEMPT: stay(_BLOCKS),
            ABORT: stay(_BLOCKS),
            CANCEL: go(ABORTED),
            FAULT: go(FAILED),
        },
        FINALIZED: {
            LANDED_NEXT: reject("every layer has landed already"),
            LANDED_AGAIN: stay("redelivered"),
            LANDED_GAP: reject("every layer has landed already"),
            CONFIRM: stay("already confirmed"),
            UNWAITED: reject("the step's end has been confirmed already"),
            EMPTY_STEP: stay(_DONE),
            PREEMPT: stay(_DONE),
            ABORT: stay(_DONE),
            CANCEL: stay("already in place"),
            FAULT: reject("every copy has completed already"),
        },
        ABORTED: dict.fromkeys(_EVENTS, stay("withdrawn: late news changes nothing")),
        FAILED: dict.fromkeys(_EVENTS, stay("failed: late news changes nothing")),
    },
)
