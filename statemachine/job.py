"""The job machine: one save, load or tier transfer of all ranks, as the scheduler side counts their reports.

All or nothing: a job is DONE only if every rank has done it and it was not doubted meanwhile. The cursor counts the
reports; whether more are awaited decides which event is fired.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

SENT, DOUBTED, DONE, LOST = "SENT", "DOUBTED", "DONE", "LOST"

SOME, FAILED, TAINTED, ALL, NOT_ALL = "some", "failed", "tainted", "all", "not_all"

_AWAITED = "other ranks have yet to report"
_OVER = "every rank has reported it, once"
_EVENTS = {
    SOME: "a rank has done it; others have yet to report",
    FAILED: "a rank has failed it, or it was reported to the engine as failed; others have yet to report",
    TAINTED: "a load has failed: what this job saves may rest on it",
    ALL: "the last rank has reported; every one has done it",
    NOT_ALL: "the last rank has reported; one or more have failed it",
}

JOB = Machine(
    name="job",
    prose="One save, load or tier transfer, until every rank has reported it.",
    initial=SENT,
    finals=frozenset({DONE, LOST}),
    states={
        SENT: "planned for the ranks, which have yet to report",
        DOUBTED: "will be LOST, whatever the remaining ranks report",
        DONE: "every rank has done it: a save can be found, a load has filled its blocks",
        LOST: "a rank has failed it, or it was doubted: nothing of it can be found, no block of it is read",
    },
    events=_EVENTS,
    table={
        SENT: {
            SOME: stay(_AWAITED),
            FAILED: go(DOUBTED),
            TAINTED: go(DOUBTED),
            ALL: go(DONE),
            NOT_ALL: go(LOST),
        },
        DOUBTED: {
            SOME: stay(_AWAITED),
            FAILED: stay("doubted already"),
            TAINTED: stay("doubted already"),
            ALL: go(LOST),
            NOT_ALL: go(LOST),
        },
        DONE: dict.fromkeys(_EVENTS, reject(_OVER)),
        LOST: dict.fromkeys(_EVENTS, reject(_OVER)),
    },
)
