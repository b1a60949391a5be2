"""The saving machine: how far one request is saved, and whether the next unit that becomes final is to be.

`next_save_at_tokens` on the cursor is a number only: where the next unit is full, as far as tokens are known to come.
It lets a step pass over a request with one comparison; the machine is what the request is in.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

OPEN, WAITING, GIVEN_UP, DONE = "OPEN", "WAITING", "GIVEN_UP", "DONE"

ADMIT, PLANNED, COMPLETE, LOST, GIVE_UP = "admit", "planned", "complete", "lost", "give_up"

_NOT_LOOKED_AT = "no step looks at it"
_HAS_BLOCKS = "a request that was computed is admitted again only after a preemption, which gives it up"

SAVING = Machine(
    name="saving",
    prose="What of one request is saved, on the scheduler's side.",
    initial=OPEN,
    finals=frozenset(),
    states={
        OPEN: "the next step that computes something of it looks for what is final and not saved",
        WAITING: "nothing is new before `next_save_at_tokens`",
        GIVEN_UP: "nothing more is saved before its next admission: its blocks are gone, or are not to be believed",
        DONE: "answers are not saved, and all of the prompt is",
    },
    events={
        ADMIT: "blocks are allocated, for an admission of its own",
        PLANNED: "all that is final is saved, is being saved, or is held already",
        COMPLETE: "so it is, and nothing more will be saved",
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
