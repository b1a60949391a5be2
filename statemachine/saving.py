"""The saving machine: whether the next unit of one request that becomes final is to be saved.

`next_save_at_tokens` on the cursor is the number of tokens at which the next unit is full. With it a step skips a
request by one comparison. It is a number beside the state, not a state.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

OPEN, WAITING, GIVEN_UP, DONE = "OPEN", "WAITING", "GIVEN_UP", "DONE"

ADMIT, PLANNED, COMPLETE, LOST, GIVE_UP = "admit", "planned", "complete", "lost", "give_up"

_NOT_LOOKED_AT = "no step looks at it"
_HAS_BLOCKS = "a request that was computed is admitted again only after a preemption, which gives it up"

SAVING = Machine(
    name="saving",
    prose="Whether more of one request is to be saved, on the scheduler side.",
    initial=OPEN,
    finals=frozenset(),
    states={
        OPEN: "the next step that computes tokens of it looks for final units that are not saved",
        WAITING: "no new unit is final before `next_save_at_tokens`",
        GIVEN_UP: "nothing more is saved before its next admission: its blocks are gone, or their bytes may be wrong",
        DONE: "all of the prompt is saved, and answers are not to be",
    },
    events={
        ADMIT: "blocks are allocated, for an admission of its own",
        PLANNED: "all that is final is saved, is being saved, or is held already",
        COMPLETE: "the same, and nothing more will be saved",
        LOST: "a save of this admission failed; it may be tried again",
        GIVE_UP: "its load failed, the cache was reset, a plan failed, or it was preempted",
    },
    table={
        OPEN: {
            ADMIT: stay("nothing was planned since the last"),
            PLANNED: go(WAITING),
            COMPLETE: go(DONE),
            LOST: stay("another save of it failed in the same report"),
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
            LOST: stay("given up for this admission"),
            GIVE_UP: stay("given up already"),
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
