"""The lookup machine keeps the state of the last answer to the engine's lookups of one request, on the scheduler side.

An answer is no promise and takes no lease. An answer is valid only in the scheduling pass of its lookup. Within this
pass, the engine may repeat the lookup. The request's admission ends the answer's validity. vLLM looks up requests in
the states new, preempted, let down and recomputing, so this machine is separate from the request machine.
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
        UNASKED: "the lookup has no answer",
        ASKED: "the lookup has an answer, which is valid in the scheduling pass in which it was given",
        LATER: "the engine was asked to repeat the lookup, and does not admit the request before that",
    },
    events={
        ANSWER: "the lookup returns how many tokens can be loaded, perhaps none",
        PUT_OFF: "the lookup returns `LATER`, because it waits for tiers, ranks or other requests",
        ADMIT: "the request's blocks are allocated, after a lookup",
    },
    table={
        UNASKED: {
            ANSWER: go(ASKED),
            PUT_OFF: go(LATER),
            ADMIT: reject("there is no answer to use up"),
        },
        ASKED: {
            ANSWER: stay("the lookup was repeated: the new answer replaces the old answer"),
            PUT_OFF: go(LATER),
            ADMIT: go(UNASKED),
        },
        LATER: {
            ANSWER: go(ASKED),
            PUT_OFF: stay("the lookup was repeated, and its answer is still not known"),
            ADMIT: reject("the engine must repeat the lookup before it admits the request"),
        },
    },
)
