"""The stage machine: chunks of one waiting request on their way from slower tiers into host memory.

A stage delays its request by at most `lookup_ms_max`, or as long as it takes to compute what has come, and hardly where
a tier is slower than that: what has come by then is used, the rest is computed. A request that came short, and that the
engine then keeps waiting for as long again, gets a new stage. The chunks that it has fetched, and those of the same
prefix that were in memory already, are leased to it until the request is admitted, preempted or over, the cache is
reset, or a request that came before needs the room. So they do not evict each other.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

ASKING, FOUND, FETCHING, HELD, OVER = "ASKING", "FOUND", "FETCHING", "HELD", "OVER"

NOTHING, SOME, SENT, NO_ROOM = "nothing", "some", "sent", "no_room"
CAME, CAME_LAST, LOST, DEADLINE, END = "came", "came_last", "lost", "deadline", "end"

_NOT_SENT = "no fetch has been sent"
_ANSWERED = "the tiers have answered already"
_NOT_AWAITED = "the request waits no longer, so no chunk is the last one awaited"
_LATE = "the request does not wait for it any more; it is in memory for the next request"

STAGE = Machine(
    name="stage",
    prose="Chunks of one waiting request, from a lookup in slower tiers until its admission.",
    initial=ASKING,
    finals=frozenset({OVER}),
    states={
        ASKING: "the tiers were asked what they hold; the request waits",
        FOUND: "they hold more than memory does; the fetches go out with the next step; the request waits",
        FETCHING: "the ranks fetch; the request waits",
        HELD: "the request waits no longer; what has come is leased until it is admitted",
        OVER: "nothing is leased any more",
    },
    events={
        NOTHING: "the tiers hold no more than memory does",
        SOME: "the tiers hold more than memory does",
        SENT: "fetches go out, as many at once as there are lanes for",
        NO_ROOM: "nothing is left to wait for: no slot is free, or other stages fetch it",
        CAME: "a chunk has landed on every rank; others are still awaited",
        CAME_LAST: "the last chunk that was awaited has landed on every rank",
        LOST: "a rank could not fetch a chunk: the chunks behind it are of no use",
        DEADLINE: "`lookup_ms_max` has passed",
        END: "the request was admitted or preempted, is over, or gives way to one before; or the cache was reset",
    },
    table={
        ASKING: {
            NOTHING: go(OVER),
            SOME: go(FOUND),
            SENT: reject("nothing was found yet"),
            NO_ROOM: reject("nothing was found yet"),
            CAME: reject(_NOT_SENT),
            CAME_LAST: reject(_NOT_SENT),
            LOST: reject(_NOT_SENT),
            DEADLINE: go(OVER),
            END: go(OVER),
        },
        FOUND: {
            NOTHING: reject(_ANSWERED),
            SOME: reject(_ANSWERED),
            SENT: go(FETCHING),
            NO_ROOM: go(HELD),
            CAME: reject(_NOT_SENT),
            CAME_LAST: reject(_NOT_SENT),
            LOST: reject(_NOT_SENT),
            DEADLINE: reject("what was found is ordered in this step, whatever the time"),
            END: go(OVER),
        },
        FETCHING: {
            NOTHING: reject(_ANSWERED),
            SOME: reject(_ANSWERED),
            SENT: reject("sent already"),
            NO_ROOM: go(HELD),
            CAME: stay("others are awaited"),
            CAME_LAST: go(HELD),
            LOST: go(HELD),
            DEADLINE: go(HELD),
            END: go(OVER),
        },
        HELD: {
            NOTHING: reject(_ANSWERED),
            SOME: reject(_ANSWERED),
            SENT: reject("the request waits no longer"),
            NO_ROOM: reject("the request waits no longer"),
            CAME: stay(_LATE),
            CAME_LAST: reject(_NOT_AWAITED),
            LOST: stay(_LATE),
            DEADLINE: reject("the request waits no longer"),
            END: go(OVER),
        },
        OVER: {
            NOTHING: reject("nobody asks any more"),
            SOME: reject("nobody asks any more"),
            SENT: reject("nobody asks any more"),
            NO_ROOM: reject("nobody asks any more"),
            CAME: stay(_LATE),
            CAME_LAST: reject(_NOT_AWAITED),
            LOST: stay(_LATE),
            DEADLINE: reject("the request waits no longer"),
            END: reject("what is over is not ended again"),
        },
    },
)
