"""The ticket machine: one submitted copy of one layer, shared by several threads.

A thread that moves a ticket out of `QUEUED` holds a lock. Only the thread that completes the ticket leaves any other
state. `Ticket` in `kvpipe/transfer/base.py` implements the table itself, because a cursor may be fired by one thread
only; a test compares the two.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

QUEUED, BEGUN, WITHDRAWN, OVER, DONE = "QUEUED", "BEGUN", "WITHDRAWN", "OVER", "DONE"

BEGIN, WITHDRAW, COMPLETE, NOTIFY = "begin", "withdraw", "complete", "notify"

_NOT_OVER = "nobody is notified before the copy is over"
_LATE = stay("it was completed: nothing begins any more")
_QUIET = stay("no copy touches memory any more")
_TWICE = reject("it was completed twice")

TICKET = Machine(
    name="ticket",
    prose=(
        "One submitted copy of one layer. The engine begins and completes it, on any thread; whoever gives it up "
        "withdraws it, unless it has begun."
    ),
    initial=QUEUED,
    finals=frozenset({DONE}),
    states={
        QUEUED: "submitted; the engine has not reported that its copy has begun",
        BEGUN: "its copy may touch memory",
        WITHDRAWN: "given up before it had begun: its copy will never touch memory; the engine completes it still",
        OVER: "its copy touches memory no more; the loop thread is being notified",
        DONE: "over, and the completion is in the loop thread's inbox",
    },
    events={
        BEGIN: "its copy is about to touch memory",
        WITHDRAW: "it is given up",
        COMPLETE: "the engine reports how its copy has ended; it need not have reported that it began",
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
            BEGIN: reject("its copy has begun already"),
            WITHDRAW: stay("what has begun cannot be taken back: it is waited for"),
            COMPLETE: go(OVER),
            NOTIFY: reject(_NOT_OVER),
        },
        WITHDRAWN: {
            BEGIN: stay("it was given up: its copy does not begin"),
            WITHDRAW: stay("it was given up before"),
            COMPLETE: go(OVER),
            NOTIFY: reject(_NOT_OVER),
        },
        OVER: {BEGIN: _LATE, WITHDRAW: _QUIET, COMPLETE: _TWICE, NOTIFY: go(DONE)},
        DONE: {BEGIN: _LATE, WITHDRAW: _QUIET, COMPLETE: _TWICE, NOTIFY: reject("the loop thread was notified before")},
    },
)  # fmt: skip
