"""The stage machine follows the chunks of one waiting request that are fetched from slower tiers into host memory.

A stage delays its request by at most `lookup_ms_max` milliseconds, or by the time to compute the fetched tokens if this
time is longer. If reading a tier takes longer than computing, the delay is short. After the delay the request uses the
fetched chunks, and vLLM computes the other tokens. If a stage has fetched too few chunks, and the engine keeps the
request waiting for the same time again, the request gets a new stage.

A stage leases the chunks that it has fetched, and the chunks of the same prefix that were in memory already. The leases
keep these chunks from evicting each other. The stage's leases end when the request is admitted, preempted or over, or
when the cache is reset. The leases also end when a request that is served earlier needs the slots.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

ASKING, FOUND, FETCHING, HELD, OVER = "ASKING", "FOUND", "FETCHING", "HELD", "OVER"

NOTHING, SOME, SENT, NO_ROOM = "nothing", "some", "sent", "no_room"
CAME, CAME_LAST, LOST, DEADLINE, END = "came", "came_last", "lost", "deadline", "end"

_NOT_SENT = "no fetch has been sent"
_ANSWERED = "the tiers have answered already"
_NOT_AWAITED = "the request does not wait any more, so no chunk is the last awaited chunk"
_LATE = "the request does not wait for this chunk any more"

STAGE = Machine(
    name="stage",
    prose="Chunks of one waiting request, from a lookup in slower tiers until its admission.",
    initial=ASKING,
    finals=frozenset({OVER}),
    states={
        ASKING: "the tiers were asked which chunks they hold; the request waits",
        FOUND: "the tiers hold more than memory; the fetches are sent with the next step; the request waits",
        FETCHING: "the ranks fetch; the request waits",
        HELD: "the request does not wait any more; the fetched chunks are leased until its admission",
        OVER: "the stage has ended and leases nothing",
    },
    events={
        NOTHING: "the tiers hold no more than memory",
        SOME: "the tiers hold more than memory",
        SENT: "fetches are sent, as many at once as there are lanes",
        NO_ROOM: "there is nothing to wait for: no slot is free, or the chunks are in memory already",
        CAME: "a chunk has landed on every rank; other chunks are still awaited",
        CAME_LAST: "the last awaited chunk has landed on every rank",
        LOST: "a rank could not fetch a chunk, so the later chunks are useless",
        DEADLINE: "`lookup_ms_max` has passed",
        END: "the request was admitted or preempted, has finished, or gives way to an earlier request, or the "
        "cache was reset",
    },
    table={
        ASKING: {
            NOTHING: go(OVER),
            SOME: go(FOUND),
            SENT: reject("the tiers have not answered yet"),
            NO_ROOM: reject("the tiers have not answered yet"),
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
            DEADLINE: reject("the found chunks are ordered in this step, even if the deadline has passed"),
            END: go(OVER),
        },
        FETCHING: {
            NOTHING: reject(_ANSWERED),
            SOME: reject(_ANSWERED),
            SENT: reject("the fetches were sent already"),
            NO_ROOM: go(HELD),
            CAME: stay("other chunks are awaited"),
            CAME_LAST: go(HELD),
            LOST: go(HELD),
            DEADLINE: go(HELD),
            END: go(OVER),
        },
        HELD: {
            NOTHING: reject(_ANSWERED),
            SOME: reject(_ANSWERED),
            SENT: reject("the request does not wait any more"),
            NO_ROOM: reject("the request does not wait any more"),
            CAME: stay(_LATE),
            CAME_LAST: reject(_NOT_AWAITED),
            LOST: stay(_LATE),
            DEADLINE: reject("the request does not wait any more"),
            END: go(OVER),
        },
        OVER: {
            NOTHING: reject("the stage has ended"),
            SOME: reject("the stage has ended"),
            SENT: reject("the stage has ended"),
            NO_ROOM: reject("the stage has ended"),
            CAME: stay(_LATE),
            CAME_LAST: reject(_NOT_AWAITED),
            LOST: stay(_LATE),
            DEADLINE: reject("the request does not wait any more"),
            END: reject("a stage ends only once"),
        },
    },
)
