"""The lookup machine: the last answer to the engine's lookups of one request, on the scheduler's side.

An answer promises nothing and holds nothing. It stands for the scheduling pass in which it was given: it may be asked
for again, and is used up by the admission. A request is asked for whether it is new, preempted, let down or
recomputing, which is why this is a machine of its own beside the request's.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

UNASKED, ASKED, LATER = "UNASKED", "ASKED", "LATER"

ANSWER, PUT_OFF, ADMIT = "answer", "put_off", "admit"

LOOKUP = Machine(
    name="lookup",
    prose="The question what can be loaded for one request, and its answer.",
    initial=UNASKED,
    finals=frozenset(),
    states={
        UNASKED: "no answer stands",
        ASKED: "the answer of the last pass that asked stands, if that is this one",
        LATER: "the engine was asked to ask again, and does not admit the request before",
    },
    events={
        ANSWER: "so many tokens can be loaded, or none",
        PUT_OFF: "tiers, ranks or other requests are waited for",
        ADMIT: "the request's blocks are allocated",
    },
    table={
        UNASKED: {
            ANSWER: go(ASKED),
            PUT_OFF: go(LATER),
            ADMIT: stay("more blocks for the same admission"),
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
