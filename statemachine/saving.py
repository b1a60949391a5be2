"""The saving machine decides whether kvpipe saves the next unit of one request that becomes final.

The cursor's attribute `next_save_at_tokens` is the number of tokens at which the next unit is full. With this number, a
step skips a request after one comparison. The number is not a part of the state.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

OPEN, WAITING, GIVEN_UP, DONE = "OPEN", "WAITING", "GIVEN_UP", "DONE"

ADMIT, PLANNED, COMPLETE, LOST, GIVE_UP = "admit", "planned", "complete", "lost", "give_up"

_NOT_LOOKED_AT = "no step plans saves of the request"
_HAS_BLOCKS = "a computed request is admitted again only after a preemption, which gives up its saves"

SAVING = Machine(
    name="saving",
    prose="Whether more of one request is to be saved, on the scheduler side.",
    initial=OPEN,
    finals=frozenset(),
    states={
        OPEN: "the next step that computes tokens of the request looks for final units that are not saved",
        WAITING: "no new unit is final before `next_save_at_tokens`",
        GIVEN_UP: "nothing more is saved before the next admission, because the blocks are lost or their bytes "
        "may be wrong",
        DONE: "all of the prompt is saved, and answers are not saved",
    },
    events={
        ADMIT: "blocks are allocated for a new admission",
        PLANNED: "all that is final is saved, is being saved, or is held already",
        COMPLETE: "all that is final is saved, is being saved, or is held already, and nothing more will be saved",
        LOST: "a save of this admission failed; it may be tried again",
        GIVE_UP: "the request's load failed, the cache was reset, a plan failed, or the request was preempted",
    },
    table={
        OPEN: {
            ADMIT: stay("no save was planned since the last admission"),
            PLANNED: go(WAITING),
            COMPLETE: go(DONE),
            LOST: stay("another save of the request failed in the same report"),
            GIVE_UP: go(GIVEN_UP),
        },
        WAITING: {
            ADMIT: reject(_HAS_BLOCKS),
            PLANNED: stay("one more unit became final"),
            COMPLETE: go(DONE),
            LOST: go(OPEN),
            GIVE_UP: go(GIVEN_UP),
        },
        GIVEN_UP: {
            ADMIT: go(OPEN),
            PLANNED: reject(_NOT_LOOKED_AT),
            COMPLETE: reject(_NOT_LOOKED_AT),
            LOST: stay("saving was given up for this admission"),
            GIVE_UP: stay("saving was given up already"),
        },
        DONE: {
            ADMIT: reject(_HAS_BLOCKS),
            PLANNED: reject(_NOT_LOOKED_AT),
            COMPLETE: reject(_NOT_LOOKED_AT),
            LOST: go(OPEN),
            GIVE_UP: go(GIVEN_UP),
        },
    },
)
