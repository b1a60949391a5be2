"""The ticket machine follows one submitted copy of one layer. Several threads share a ticket.

A thread that moves a ticket out of `QUEUED` holds a lock. Only the thread that completes the ticket moves the ticket
out of any other state. `Ticket` in `kvpipe/transfer/base.py` implements this table itself, because only one thread may
fire a cursor. A test checks that `Ticket` does what the table says.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

QUEUED, BEGUN, WITHDRAWN, OVER, DONE = "QUEUED", "BEGUN", "WITHDRAWN", "OVER", "DONE"

BEGIN, WITHDRAW, COMPLETE, NOTIFY = "begin", "withdraw", "complete", "notify"

_NOT_OVER = "the loop thread is notified only after the copy has ended"
_LATE = stay("the ticket was completed, so its copy does not begin")
_QUIET = stay("no copy touches memory any more")
_TWICE = reject("a ticket is completed only once")

TICKET = Machine(
    name="ticket",
    prose=(
        "One submitted copy of one layer. The engine begins and completes the ticket, on any thread. A thread "
        "that gives up waiting withdraws the ticket, unless the copy has begun."
    ),
    initial=QUEUED,
    finals=frozenset({DONE}),
    states={
        QUEUED: "the copy was submitted; the engine has not reported that it has begun",
        BEGUN: "the copy may touch memory",
        WITHDRAWN: "the ticket was withdrawn before the copy had begun: the copy will never touch memory, but "
                   "the engine still completes the ticket",
        OVER: "the copy does not touch memory any more; the loop thread is being notified",
        DONE: "the copy has ended, and the completion is in the loop thread's inbox",
    },
    events={
        BEGIN: "the copy is about to touch memory",
        WITHDRAW: "a thread gives up waiting for the copy",
        COMPLETE: "the engine reports how the copy has ended, even if it has not reported that the copy began",
        NOTIFY: "the completion was put into the loop thread's inbox",
    },
    table={
        QUEUED: {
            BEGIN: go(BEGUN),
            WITHDRAW: go(WITHDRAWN),
            COMPLETE: go(OVER),
            NOTIFY: reject(_NOT_OVER),
        },
        BEGUN: {
            BEGIN: reject("the copy has begun already"),
            WITHDRAW: stay("a copy that has begun cannot be withdrawn, so its end is awaited"),
            COMPLETE: go(OVER),
            NOTIFY: reject(_NOT_OVER),
        },
        WITHDRAWN: {
            BEGIN: stay("the ticket was withdrawn, so its copy does not begin"),
            WITHDRAW: stay("the ticket was withdrawn already"),
            COMPLETE: go(OVER),
            NOTIFY: reject(_NOT_OVER),
        },
        OVER: {BEGIN: _LATE, WITHDRAW: _QUIET, COMPLETE: _TWICE, NOTIFY: go(DONE)},
        DONE: {BEGIN: _LATE, WITHDRAW: _QUIET, COMPLETE: _TWICE, NOTIFY: reject("the loop thread was notified "
                                                                                "already")},
    },
)  # fmt: skip
