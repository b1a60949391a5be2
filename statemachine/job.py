"""The job machine follows one save, load or tier transfer of all ranks. The scheduler side counts the ranks' reports.

A job is DONE only if every rank has done the job and no doubt has arisen before the last report. The cursor counts the
reports, because the last report fires another event than the earlier reports.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

SENT, DOUBTED, DONE, LOST = "SENT", "DOUBTED", "DONE", "LOST"

SOME, FAILED, TAINTED, ALL, NOT_ALL = "some", "failed", "tainted", "all", "not_all"

_AWAITED = "other ranks have yet to report"
_OVER = "every rank has reported the job, and reports it only once"
_EVENTS = {
    SOME: "a rank has done the job; other ranks have yet to report",
    FAILED: "a rank has failed the job, or the job was reported to the engine as failed; other ranks have yet to "
    "report",
    TAINTED: "a load has failed, and the KV that this job saves may depend on that load",
    ALL: "the last rank has reported; every rank has done the job",
    NOT_ALL: "the last rank has reported; one or more ranks have failed the job",
}

JOB = Machine(
    name="job",
    prose="One save, load or tier transfer, until every rank has reported it.",
    initial=SENT,
    finals=frozenset({DONE, LOST}),
    states={
        SENT: "the job was planned; the ranks have yet to report",
        DOUBTED: "the job will be LOST, whatever the remaining ranks report",
        DONE: "every rank has done the job: saved chunks can be found, loaded blocks are filled",
        LOST: "a rank has failed the job, or the job was doubted: its chunks are not found, and its blocks are "
        "not read",
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
            FAILED: stay("the job is in doubt already"),
            TAINTED: stay("the job is in doubt already"),
            ALL: go(LOST),
            NOT_ALL: go(LOST),
        },
        DONE: dict.fromkeys(_EVENTS, reject(_OVER)),
        LOST: dict.fromkeys(_EVENTS, reject(_OVER)),
    },
)
