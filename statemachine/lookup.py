"""The lookup machine: the last answer to the engine's lookups of one request, on the scheduler side.

An answer promises nothing and takes no lease. It is valid in the scheduling pass in which it was given: within that
pass the lookup may be repeated, and the admission uses the answer up. vLLM looks up requests that are new, preempted,
let down or recomputing, so this machine is apart from the request's.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

UNASKED, ASKED, LATER = "UNASKED", "ASKED", "LATER"

ANSWER, PUT_OFF, ADMIT = "answer", "put_off", "admit"

LOOKUP = Machine(
    name="lookup",
    prose="The lookup of what can be loaded for one request, and its last answer.",
    initial=UNASKED,
    finals=frozenset(),
    states={
        UNASKED: "there is no answer",
        ASKED: "there is an answer, valid in the scheduling pass in which it was given",
        LATER: "the engine was asked to repeat the lookup, and does not admit the request before",
    },
    events={
        ANSWER: "the lookup returns how many tokens can be loaded, perhaps none",
        PUT_OFF: "the lookup returns `LATER`: tiers, ranks or other requests are waited for",
        ADMIT: "the request's blocks are allocated, after a lookup",
    },
    table={
        UNASKED: {
            ANSWER: go(ASKED),
            PUT_OFF: go(LATER),
            ADMIT: reject("there is no answer to use up"),
        },
        ASKED: {
            ANSWER: stay("asked again: the new answer stands"),
            PUT_OFF: go(LATER),
            ADMIT: go(UNASKED),
        },
        LATER: {
            ANSWER: go(ASKED),
            PUT_OFF: stay("asked again, and still not known"),
            ADMIT: reject("the engine was asked not to"),
        },
    },
)
