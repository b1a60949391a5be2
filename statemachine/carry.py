"""The carry machine follows one chunk between a rank's slot and a slower tier, in either direction."""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject

PENDING, MOVING = "PENDING", "MOVING"
FINALIZED, MISSED, FAILED, ABORTED = "FINALIZED", "MISSED", "FAILED", "ABORTED"

BEGIN, DONE, MISS, FAULT, REFUSE, CANCEL = "begin", "done", "miss", "fault", "refuse", "cancel"

_EVENTS = {
    BEGIN: "the transfer's turn has come",
    DONE: "every byte has arrived and was checked",
    MISS: "the tier does not have the chunk, or has a damaged value",
    FAULT: "the tier cannot be used, or took too long",
    REFUSE: "the tier's breaker is open, so the transfer is not tried",
    CANCEL: "the rank shuts down",
}
_BEFORE = "the transfer has not begun"
_OVER = "one task makes the transfer, and that task has ended"

CARRY = Machine(
    name="carry",
    prose="A transfer of one rank's part of one chunk, between its slot and a slower tier.",
    initial=PENDING,
    finals=frozenset({FINALIZED, MISSED, FAILED, ABORTED}),
    states={
        PENDING: "the transfer waits for its turn",
        MOVING: "bytes are being transferred; the slot is held",
        FINALIZED: "done: a fetched chunk was verified, or a stored chunk can be found in the tier",
        MISSED: "the tier did not have the chunk after all, so the chunk is dropped and the request computes it",
        FAILED: "the tier failed: a fetched chunk is dropped, a chunk to be stored stays in memory only",
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
            BEGIN: reject("the transfer has begun already"),
            DONE: go(FINALIZED),
            MISS: go(MISSED),
            FAULT: go(FAILED),
            REFUSE: reject("the transfer has begun already"),
            CANCEL: go(ABORTED),
        },
        FINALIZED: dict.fromkeys(_EVENTS, reject(_OVER)),
        MISSED: dict.fromkeys(_EVENTS, reject(_OVER)),
        FAILED: dict.fromkeys(_EVENTS, reject(_OVER)),
        ABORTED: dict.fromkeys(_EVENTS, reject(_OVER)),
    },
)
