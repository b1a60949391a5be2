"""The carry machine: one chunk between a rank's slot and a slower tier, in either direction."""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject

PENDING, MOVING = "PENDING", "MOVING"
FINALIZED, MISSED, FAILED, ABORTED = "FINALIZED", "MISSED", "FAILED", "ABORTED"

BEGIN, DONE, MISS, FAULT, REFUSE, CANCEL = "begin", "done", "miss", "fault", "refuse", "cancel"

_EVENTS = {
    BEGIN: "its turn has come",
    DONE: "every byte is where it should be, and was checked",
    MISS: "the tier does not have it, or what it has is damaged",
    FAULT: "the tier cannot be used, or took too long",
    REFUSE: "the tier's breaker is open: it is not even tried",
    CANCEL: "the rank shuts down",
}
_BEFORE = "it has not begun"
_OVER = "one task carries it, and it has ended"

CARRY = Machine(
    name="carry",
    prose="One rank's part of one chunk, between its slot and a slower tier.",
    initial=PENDING,
    finals=frozenset({FINALIZED, MISSED, FAILED, ABORTED}),
    states={
        PENDING: "waits for its turn",
        MOVING: "bytes are on their way; the slot is held",
        FINALIZED: "done: a fetched chunk was verified, a stored one can be found in the tier",
        MISSED: "the tier did not have it after all; the chunk is dropped, the request computes it",
        FAILED: "the tier failed; a fetched chunk is dropped, a stored one stays in memory only",
        ABORTED: "withdrawn (shutdown)",
    },
    events=_EVENTS,
    table={
        PENDING: {
            BEGIN: go(MOVING),
            DONE: reject(_BEFORE),
            MISS: reject(_BEFORE),
            FAULT: go(FAILED),
            REFUSE: go(FAILED),
            CANCEL: go(ABORTED),
        },
        MOVING: {
            BEGIN: reject("it has begun already"),
            DONE: go(FINALIZED),
            MISS: go(MISSED),
            FAULT: go(FAILED),
            REFUSE: reject("it has begun already"),
            CANCEL: go(ABORTED),
        },
        FINALIZED: dict.fromkeys(_EVENTS, reject(_OVER)),
        MISSED: dict.fromkeys(_EVENTS, reject(_OVER)),
        FAILED: dict.fromkeys(_EVENTS, reject(_OVER)),
        ABORTED: dict.fromkeys(_EVENTS, reject(_OVER)),
    },
)
