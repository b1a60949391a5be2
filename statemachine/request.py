"""The request machine: one vLLM request as the scheduler side sees it, across preemptions.

A lookup promises nothing and takes no lease (`lookup.py`). Leases are taken only when vLLM has allocated blocks
(ADMIT_LOAD), and belong to the load job from then on. LOADED and LOAD_FAILED are of the load of this admission only.

vLLM looks up requests that hold no blocks. Beside another connector such a request may have been admitted before: the
other's asynchronous load for it has failed, and vLLM has taken its blocks without notifying kvpipe.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

NEW, ALLOCATED, LOADING, RUNNING, LET_DOWN = "NEW", "ALLOCATED", "LOADING", "RUNNING", "LET_DOWN"
PREEMPTED, RECOMPUTING, DRAINING, FINISHED = "PREEMPTED", "RECOMPUTING", "DRAINING", "FINISHED"

ASK, ADMIT_LOAD, ADMIT_EMPTY, DISPATCH = "ask", "admit_load", "admit_empty", "dispatch"
LOADED, LOAD_FAILED = "loaded", "load_failed"
PREEMPT, PREEMPT_LATE, FINISH = "preempt", "preempt_late", "finish"

_ASKED = "a lookup's answer is not a promise: nothing is leased before blocks are allocated"
_LATE = "the notice is older than the admission that followed it"
_NO_LOAD = "this admission has no load, or not any more"
_ONE_SCHEDULE = "a load is allocated and dispatched in one pass, and nothing comes between"
_NO_BLOCKS = "it holds no blocks that could be taken back"
_GONE = "the request is gone"
_OVER = "the request is over; its id may be used again by a new cursor"
_EVENTS = {
    ASK: "vLLM looks up what can be loaded",
    ADMIT_LOAD: "blocks allocated, external tokens to load",
    ADMIT_EMPTY: "blocks allocated, nothing to load",
    DISPATCH: "the load went out with the step's metadata",
    LOADED: "every rank finished the load",
    LOAD_FAILED: "a rank failed the load",
    PREEMPT: "vLLM took the request's blocks",
    PREEMPT_LATE: "the notice of a preemption that is known already",
    FINISH: "the request finished or was aborted",
}

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
        LET_DOWN: "lost its blocks with another connector's failed load; may load synchronously only: vLLM's scheduler "
        "counts the blocks of its first load against a second asynchronous one, and may never admit it",
        PREEMPTED: "lost its blocks; vLLM will look it up again",
        RECOMPUTING: "a load failed; it never loads again, so that the scheduler does not retry for ever",
        DRAINING: "finished while its load is with the workers; the leases end with the job",
        FINISHED: "over",
    },
    events=_EVENTS,
    table={
        NEW: {
            ASK: stay(_ASKED),
            ADMIT_LOAD: go(ALLOCATED),
            ADMIT_EMPTY: go(RUNNING),
            DISPATCH: reject(_NO_LOAD),
            LOADED: reject(_NO_LOAD),
            LOAD_FAILED: reject(_NO_LOAD),
            PREEMPT: reject("vLLM preempts only what it has admitted"),
            PREEMPT_LATE: stay("of an earlier request with its id"),
            FINISH: go(FINISHED),
        },
        ALLOCATED: {
            ASK: reject("blocks are allocated; vLLM asks only before"),
            ADMIT_LOAD: reject("one load at a time"),
            ADMIT_EMPTY: reject(_ONE_SCHEDULE),
            DISPATCH: go(LOADING),
            LOADED: reject("the load has not been sent"),
            LOAD_FAILED: reject("the load has not been sent"),
            PREEMPT: reject(_ONE_SCHEDULE),
            PREEMPT_LATE: stay(_LATE),
            FINISH: reject(_ONE_SCHEDULE),
        },
        LOADING: {
            ASK: reject("a load is in flight; vLLM asks only before"),
            ADMIT_LOAD: reject("one load at a time"),
            ADMIT_EMPTY: stay("a session goes on before the report of its load has come"),
            DISPATCH: reject("the load has been sent already"),
            LOADED: go(RUNNING),
            LOAD_FAILED: go(RECOMPUTING),
            PREEMPT: go(PREEMPTED),
            PREEMPT_LATE: reject("the notice comes before the load is sent"),
            FINISH: go(DRAINING),
        },
        RUNNING: {
            ASK: go(LET_DOWN),
            ADMIT_LOAD: reject("it has its blocks; a new load needs a preemption first"),
            ADMIT_EMPTY: stay("more blocks for the same admission"),
            DISPATCH: reject(_NO_LOAD),
            LOADED: reject(_NO_LOAD),
            LOAD_FAILED: go(RECOMPUTING),
            PREEMPT: go(PREEMPTED),
            PREEMPT_LATE: stay(_LATE),
            FINISH: go(FINISHED),
        },
        LET_DOWN: {
            ASK: stay(_ASKED),
            ADMIT_LOAD: go(ALLOCATED),
            ADMIT_EMPTY: go(RUNNING),
            DISPATCH: reject(_NO_LOAD),
            LOADED: reject(_NO_LOAD),
            LOAD_FAILED: reject(_NO_LOAD),
            PREEMPT: reject(_NO_BLOCKS),
            PREEMPT_LATE: reject(_NO_BLOCKS),
            FINISH: go(FINISHED),
        },
        PREEMPTED: {
            ASK: stay(_ASKED),
            ADMIT_LOAD: go(ALLOCATED),
            ADMIT_EMPTY: go(RUNNING),
            DISPATCH: reject("the allocation was lost with the preemption"),
            LOADED: reject(_NO_LOAD),
            LOAD_FAILED: reject(_NO_LOAD),
            PREEMPT: reject("an admission lies between two preemptions"),
            PREEMPT_LATE: stay("noticed already, when it was asked for"),
            FINISH: go(FINISHED),
        },
        RECOMPUTING: {
            ASK: stay("it is answered that nothing is loaded"),
            ADMIT_LOAD: reject("it never loads again"),
            ADMIT_EMPTY: stay("admitted to recompute"),
            DISPATCH: reject(_NO_LOAD),
            LOADED: reject("it never loads again"),
            LOAD_FAILED: stay("a load that was planned to fail, for it would have read what another one has spoiled"),
            PREEMPT: stay("lost its blocks; it will recompute"),
            PREEMPT_LATE: stay(_LATE),
            FINISH: go(FINISHED),
        },
        DRAINING: {**dict.fromkeys(_EVENTS, reject(_GONE)), LOADED: go(FINISHED), LOAD_FAILED: go(FINISHED)},
        FINISHED: dict.fromkeys(_EVENTS, reject(_OVER)),
    },
)
