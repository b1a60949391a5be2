"""The request machine follows one vLLM request on the scheduler side, across preemptions.

The result of a lookup is no promise, and a lookup takes no lease (`lookup.py`). Leases are taken when vLLM has
allocated blocks (ADMIT_LOAD), and belong to the load job. LOADED and LOAD_FAILED concern only the load of the current
admission.

vLLM looks up requests that hold no blocks. If vLLM also uses another connector, such a request may have been admitted
already. This happens if an asynchronous load of the other connector has failed: vLLM takes the request's blocks without
notifying kvpipe.
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
_NO_LOAD = "this admission has no load, or its load has ended"
_ONE_SCHEDULE = "vLLM allocates the blocks and sends the load in one pass, without another event between"
_NO_BLOCKS = "the request holds no blocks that vLLM could take back"
_GONE = "the request has finished"
_OVER = "the request has finished; a new cursor may use its id again"
_EVENTS = {
    ASK: "vLLM looks up what can be loaded",
    ADMIT_LOAD: "blocks allocated, external tokens to load",
    ADMIT_EMPTY: "blocks allocated, nothing to load",
    DISPATCH: "the load was sent with the step's metadata",
    LOADED: "every rank finished the load",
    LOAD_FAILED: "a rank failed the load",
    PREEMPT: "vLLM took the request's blocks",
    PREEMPT_LATE: "vLLM reports a preemption that is known already",
    FINISH: "the request finished or was aborted",
}

REQUEST = Machine(
    name="request",
    prose="One vLLM request on the scheduler's side.",
    initial=NEW,
    finals=frozenset({FINISHED}),
    states={
        NEW: "the request is known, but not admitted",
        ALLOCATED: "blocks are allocated for a hit and its chunks are leased, but the load was not sent to the "
        "workers yet",
        LOADING: "the workers carry out the load",
        RUNNING: "the request is scheduled, and its new blocks are saved as they become final",
        LET_DOWN: "the request has lost its blocks with another connector's failed load; it may load only "
        "synchronously, because vLLM's scheduler counts the first load's blocks against a second "
        "asynchronous load, and may never admit it",
        PREEMPTED: "the request has lost its blocks; vLLM will look it up again",
        RECOMPUTING: "a load failed; the request never loads again, so that the scheduler does not retry for ever",
        DRAINING: "the request finished while the workers carry out its load; the leases end with the job",
        FINISHED: "the request has finished, and its load has ended",
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
            PREEMPT_LATE: stay("the notice is about an earlier request with the same id"),
            FINISH: go(FINISHED),
        },
        ALLOCATED: {
            ASK: reject("blocks are allocated; vLLM looks up only before that"),
            ADMIT_LOAD: reject("an admission has only one load at a time"),
            ADMIT_EMPTY: reject(_ONE_SCHEDULE),
            DISPATCH: go(LOADING),
            LOADED: reject("the load has not been sent"),
            LOAD_FAILED: reject("the load has not been sent"),
            PREEMPT: reject(_ONE_SCHEDULE),
            PREEMPT_LATE: stay(_LATE),
            FINISH: reject(_ONE_SCHEDULE),
        },
        LOADING: {
            ASK: reject("a load is in flight; vLLM looks up only before that"),
            ADMIT_LOAD: reject("an admission has only one load at a time"),
            ADMIT_EMPTY: stay("a session continues before its load was reported"),
            DISPATCH: reject("the load has been sent already"),
            LOADED: go(RUNNING),
            LOAD_FAILED: go(RECOMPUTING),
            PREEMPT: go(PREEMPTED),
            PREEMPT_LATE: reject("the notice comes before the load is sent"),
            FINISH: go(DRAINING),
        },
        RUNNING: {
            ASK: go(LET_DOWN),
            ADMIT_LOAD: reject("the request has its blocks; a new load needs a preemption first"),
            ADMIT_EMPTY: stay("vLLM allocates more blocks for the same admission"),
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
            PREEMPT_LATE: stay("kvpipe has noticed the preemption already, at the next lookup"),
            FINISH: go(FINISHED),
        },
        RECOMPUTING: {
            ASK: stay("the answer is that nothing is loaded"),
            ADMIT_LOAD: reject("the request never loads again"),
            ADMIT_EMPTY: stay("the request is admitted to be recomputed"),
            DISPATCH: reject(_NO_LOAD),
            LOADED: reject("the request never loads again"),
            LOAD_FAILED: stay(
                "this load was planned to fail, because it would have used blocks that another load has spoiled"
            ),
            PREEMPT: stay("the request has lost its blocks and will be recomputed"),
            PREEMPT_LATE: stay(_LATE),
            FINISH: go(FINISHED),
        },
        DRAINING: {**dict.fromkeys(_EVENTS, reject(_GONE)), LOADED: go(FINISHED), LOAD_FAILED: go(FINISHED)},
        FINISHED: dict.fromkeys(_EVENTS, reject(_OVER)),
    },
)
