"""The ticket machine: one submitted copy of one layer, of which several threads know.

Whoever takes a ticket out of `QUEUED` holds a lock; every other state is left by the thread that completes it, alone.
`Ticket` in `kvpipe/transfer/base.py` stores the states by itself, as firing a cursor is for one thread; a test holds it
to this table.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

QUEUED, BEGUN, WITHDRAWN, OVER, DONE = "QUEUED", "BEGUN", "WITHDRAWN", "OVER", "DONE"

BEGIN, WITHDRAW, COMPLETE, TELL = "begin", "withdraw", "complete", "tell"

_UNTOLD = "nothing is told before the copy is over"
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
        QUEUED: "submitted; the engine has not said that its copy has begun",
        BEGUN: "its copy may touch memory",
        WITHDRAWN: "given up before it had begun: its copy will never touch memory; the engine completes it still",
        OVER: "its copy touches memory no more; the news is being handed on",
        DONE: "over, and the news is in the inbox",
    },
    events={
        BEGIN: "its copy is about to touch memory",
        WITHDRAW: "it is given up",
        COMPLETE: "the engine says how its copy has ended; it need not have said that it began",
        TELL: "the news was handed on",
    },
    table={
        QUEUED: {
            BEGIN: go(BEGUN),
            WITHDRAW: go(WITHDRAWN),
            COMPLETE: go(OVER),
            TELL: reject(_UNTOLD),
        },
        BEGUN: {
            BEGIN: reject("its copy has begun already"),
            WITHDRAW: stay("what has begun cannot be taken back: it is waited for"),
            COMPLETE: go(OVER),
            TELL: reject(_UNTOLD),
        },
        WITHDRAWN: {
            BEGIN: stay("it was given up: its copy does not begin"),
            WITHDRAW: stay("it was given up before"),
            COMPLETE: go(OVER),
            TELL: reject(_UNTOLD),
        },
        OVER: {BEGIN: _LATE, WITHDRAW: _QUIET, COMPLETE: _TWICE, TELL: go(DONE)},
        DONE: {BEGIN: _LATE, WITHDRAW: _QUIET, COMPLETE: _TWICE, TELL: reject("it was told before")},
    },
)  # fmt: skip
