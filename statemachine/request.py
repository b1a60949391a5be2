"""The request machine: one vLLM request as the scheduler side sees it, across preemptions.

A lookup promises nothing and holds nothing, so it may be repeated, answered and never followed up. Leases are taken
only when vLLM has allocated blocks (ADMIT_LOAD), and belong to the load job from then on.

vLLM asks for a request that holds no blocks. Beside another connector that may be one that was admitted: the other's
asynchronous load for it has failed, and vLLM has taken its blocks back without a word (ASKED_ANEW).
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

NEW, ALLOCATED, LOADING, RUNNING, LET_DOWN = "NEW", "ALLOCATED", "LOADING", "RUNNING", "LET_DOWN"
PREEMPTED, RECOMPUTING, DRAINING, FINISHED = "PREEMPTED", "RECOMPUTING", "DRAINING", "FINISHED"

LOOKUP_HIT, LOOKUP_MISS, LOOKUP_LATER = "lookup_hit", "lookup_miss", "lookup_later"
ADMIT_LOAD, ADMIT_EMPTY, DISPATCH = "admit_load", "admit_empty", "dispatch"
LOADED, LOAD_FAILED = "loaded", "load_failed"
PREEMPT, PREEMPT_LATE, ASKED_ANEW, FINISH = "preempt", "preempt_late", "asked_anew", "finish"

_ASKED = "an answer is not a promise: nothing is leased before blocks are allocated"
_LATE = "the notice is older than the admission that followed it"
_EARLIER = "the load of an earlier admission; its job returns the leases"
_FREE = "it holds no blocks that could be taken back"
_GONE = "the request is gone"
_OVER = "the request is over; its id may be used again by a new cursor"

REQUEST = Machine(
    name="request",
    prose="One vLLM request on the scheduler's side.",
    initial=NEW,
    finals=frozenset({FINISHED}),
    states={
        NEW: "known, not admitted",
        ALLOCATED: "blocks allocated for a hit, chunks leased, the load not yet sent to the workers",
        LOADING: "the load is with the workers",
        RUNNING: "scheduled; its new blocks are saved as they become final",
        LET_DOWN: "lost its blocks with another connector's failed load; may load within a step, and only so: vLLM's "
        "scheduler counts the blocks of its first load against a second one between steps, and may never admit it",
        PREEMPTED: "lost its blocks; will be looked up again",
        RECOMPUTING: "a load failed; it never loads again, which keeps the scheduler from retrying for ever",
        DRAINING: "finished while its load is with the workers; the leases end with the job",
        FINISHED: "over",
    },
    events={
        LOOKUP_HIT: "looked up, some tokens are held",
        LOOKUP_MISS: "looked up, nothing beyond what vLLM has",
        LOOKUP_LATER: "looked up, the answer is not known yet",
        ADMIT_LOAD: "blocks allocated, external tokens to load",
        ADMIT_EMPTY: "blocks allocated, nothing to load",
        DISPATCH: "the load went out with the step's metadata",
        LOADED: "every rank finished the load",
        LOAD_FAILED: "a rank failed the load",
        PREEMPT: "vLLM took the request's blocks",
        PREEMPT_LATE: "the notice of a preemption that a later admission has overtaken",
        ASKED_ANEW: "vLLM asks for the request though it has admitted it",
        FINISH: "the request finished or was aborted",
    },
    table={
        NEW: {
            LOOKUP_HIT: stay(_ASKED),
            LOOKUP_MISS: stay(_ASKED),
            LOOKUP_LATER: stay(_ASKED),
            ADMIT_LOAD: go(ALLOCATED),
            ADMIT_EMPTY: go(RUNNING),
            DISPATCH: reject("nothing was allocated"),
            LOADED: reject("nothing was loading"),
            LOAD_FAILED: reject("nothing was loading"),
            PREEMPT: stay("never admitted, so nothing is lost"),
            PREEMPT_LATE: stay(_LATE),
            ASKED_ANEW: stay(_FREE),
            FINISH: go(FINISHED),
        },
        ALLOCATED: {
            LOOKUP_HIT: reject("blocks are allocated; vLLM asks only before"),
            LOOKUP_MISS: reject("blocks are allocated; vLLM asks only before"),
            LOOKUP_LATER: reject("blocks are allocated; vLLM asks only before"),
            ADMIT_LOAD: reject("one load at a time"),
            ADMIT_EMPTY: stay("more blocks for the same admission"),
            DISPATCH: go(LOADING),
            LOADED: reject("the load has not been sent"),
            LOAD_FAILED: reject("the load has not been sent"),
            PREEMPT: go(PREEMPTED),
            PREEMPT_LATE: stay(_LATE),
            ASKED_ANEW: reject("blocks are allocated; vLLM asks only before"),
            FINISH: go(FINISHED),
        },
        LOADING: {
            LOOKUP_HIT: reject("a load is in flight; vLLM asks only before"),
            LOOKUP_MISS: reject("a load is in flight; vLLM asks only before"),
            LOOKUP_LATER: reject("a load is in flight; vLLM asks only before"),
            ADMIT_LOAD: reject("one load at a time"),
            ADMIT_EMPTY: stay("more blocks for the same admission"),
            DISPATCH: reject("the load has been sent already"),
            LOADED: go(RUNNING),
            LOAD_FAILED: go(RECOMPUTING),
            PREEMPT: go(PREEMPTED),
            PREEMPT_LATE: stay(_LATE),
            ASKED_ANEW: reject("a load is in flight; vLLM asks only before"),
            FINISH: go(DRAINING),
        },
        RUNNING: {
            LOOKUP_HIT: reject("it has its blocks, unless it is asked for anew"),
            LOOKUP_MISS: reject("it has its blocks, unless it is asked for anew"),
            LOOKUP_LATER: reject("it has its blocks, unless it is asked for anew"),
            ADMIT_LOAD: reject("it has its blocks; a new load needs a preemption first"),
            ADMIT_EMPTY: stay("more blocks for the same admission"),
            DISPATCH: reject("nothing was allocated for a load"),
            LOADED: stay("reported again"),
            LOAD_FAILED: go(RECOMPUTING),
            PREEMPT: go(PREEMPTED),
            PREEMPT_LATE: stay(_LATE),
            ASKED_ANEW: go(LET_DOWN),
            FINISH: go(FINISHED),
        },
        LET_DOWN: {
            LOOKUP_HIT: stay(_ASKED),
            LOOKUP_MISS: stay(_ASKED),
            LOOKUP_LATER: stay(_ASKED),
            ADMIT_LOAD: go(ALLOCATED),
            ADMIT_EMPTY: go(RUNNING),
            DISPATCH: reject("nothing was allocated for a load"),
            LOADED: stay(_EARLIER),
            LOAD_FAILED: stay(_EARLIER),
            PREEMPT: stay(_FREE),
            PREEMPT_LATE: stay(_LATE),
            ASKED_ANEW: stay(_FREE),
            FINISH: go(FINISHED),
        },
        PREEMPTED: {
            LOOKUP_HIT: stay(_ASKED),
            LOOKUP_MISS: stay(_ASKED),
            LOOKUP_LATER: stay(_ASKED),
            ADMIT_LOAD: go(ALLOCATED),
            ADMIT_EMPTY: go(RUNNING),
            DISPATCH: reject("the allocation was lost with the preemption"),
            LOADED: stay(_EARLIER),
            LOAD_FAILED: stay(_EARLIER),
            PREEMPT: stay("already preempted"),
            PREEMPT_LATE: stay(_LATE),
            ASKED_ANEW: stay(_FREE),
            FINISH: go(FINISHED),
        },
        RECOMPUTING: {
            LOOKUP_HIT: reject("it never loads again"),
            LOOKUP_MISS: stay("it never loads again"),
            LOOKUP_LATER: reject("it never loads again"),
            ADMIT_LOAD: reject("it never loads again"),
            ADMIT_EMPTY: stay("admitted to recompute"),
            DISPATCH: reject("nothing was allocated for a load"),
            LOADED: stay("another rank's good news after a failure"),
            LOAD_FAILED: stay("failed already"),
            PREEMPT: stay("lost its blocks; it will recompute"),
            PREEMPT_LATE: stay(_LATE),
            ASKED_ANEW: stay("the blocks of a failed load are given back; it never loads again"),
            FINISH: go(FINISHED),
        },
        DRAINING: {
            LOOKUP_HIT: reject(_GONE),
            LOOKUP_MISS: reject(_GONE),
            LOOKUP_LATER: reject(_GONE),
            ADMIT_LOAD: reject(_GONE),
            ADMIT_EMPTY: reject(_GONE),
            DISPATCH: reject(_GONE),
            LOADED: go(FINISHED),
            LOAD_FAILED: go(FINISHED),
            PREEMPT: stay(_GONE),
            PREEMPT_LATE: stay(_GONE),
            ASKED_ANEW: reject(_GONE),
            FINISH: stay("finished already"),
        },
        FINISHED: {
            LOOKUP_HIT: reject(_OVER),
            LOOKUP_MISS: reject(_OVER),
            LOOKUP_LATER: reject(_OVER),
            ADMIT_LOAD: reject(_OVER),
            ADMIT_EMPTY: reject(_OVER),
            DISPATCH: reject(_OVER),
            LOADED: stay(_OVER),
            LOAD_FAILED: stay(_OVER),
            PREEMPT: stay(_OVER),
            PREEMPT_LATE: stay(_OVER),
            ASKED_ANEW: reject(_OVER),
            FINISH: stay("finished already"),
        },
    },
)
