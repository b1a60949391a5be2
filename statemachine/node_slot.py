"""The node_slot machine follows one slot of a node's memory. The holder keeps this machine.

A client may write a granted slot at any time without a message to the holder. So the holder's machine has no state for
"is being written". The client's machine node_grant has such a state.
"""

from __future__ import annotations

from kvpipe.statemachine.cursors import PlainCell, PlainTable

go, reject, stay = PlainCell.go, PlainCell.reject, PlainCell.stay

FREE, GRANTED, PUBLISHED, EVICTING, QUARANTINE = "FREE", "GRANTED", "PUBLISHED", "EVICTING", "QUARANTINE"

GRANT, PUBLISH, LATE, GIVE_BACK = "grant", "publish", "late", "give_back"
EVICT, DRAINED, OWNER_LOST, OWNER_GONE = "evict", "drained", "owner_lost", "owner_gone"

_NO_GRANT = "no client was granted the slot"
_NOT_FOUND = "no chunk of the slot can be found"
_NOT_EVICTED = "the slot was not evicted"
_NODES = reject("a complete chunk belongs to the node, not to its writer")
_EARLY = reject("OWNER_LOST comes before OWNER_GONE")

NODE_SLOT = PlainTable(
    name="node_slot",
    prose="One slot of the memory that the engines of a node share. The holder keeps this machine.",
    initial=FREE,
    finals=frozenset(),
    states={
        FREE: "no client may touch the slot",
        GRANTED: "one client may write the slot; no lookup finds a chunk in it",
        PUBLISHED: "every client can find and read the chunk; no process writes",
        EVICTING: "the chunk cannot be found any more; a client still has a lease",
        QUARANTINE: "a process of the slot's client has exited; another process, or its DMA, may still write",
    },
    events={
        GRANT: "the slot goes into a client's stock",
        PUBLISH: "the slot's client reports that the chunk has landed on all ranks; no other slot has the chunk's key",
        LATE: "the slot's client reports a chunk whose key another slot has already",
        GIVE_BACK: "the slot's client does not need the slot, and no process of the client touches it",
        EVICT: "the policy or an operator evicts the chunk; the slot's generation was raised",
        DRAINED: "after the fence, no client has a lease",
        OWNER_LOST: "a process of the slot's client has exited, or the client leaves",
        OWNER_GONE: "the last process of the slot's client has exited",
    },
    table={
        FREE: {
            GRANT: go(GRANTED),
            PUBLISH: reject(_NO_GRANT),
            LATE: reject(_NO_GRANT),
            GIVE_BACK: reject(_NO_GRANT),
            EVICT: reject(_NOT_FOUND),
            DRAINED: reject(_NOT_EVICTED),
            OWNER_LOST: reject(_NO_GRANT),
            OWNER_GONE: reject(_NO_GRANT),
        },
        GRANTED: {
            GRANT: reject("a client has the slot"),
            PUBLISH: go(PUBLISHED),
            LATE: stay("the slot remains in its client's stock"),
            GIVE_BACK: go(FREE),
            EVICT: reject(_NOT_FOUND),
            DRAINED: reject(_NOT_EVICTED),
            OWNER_LOST: go(QUARANTINE),
            OWNER_GONE: _EARLY,
        },
        PUBLISHED: {
            GRANT: reject("the slot has a chunk"),
            PUBLISH: reject("the chunk was published before"),
            LATE: reject("the chunk was published before"),
            GIVE_BACK: reject("the chunk belongs to the node"),
            EVICT: go(EVICTING),
            DRAINED: reject(_NOT_EVICTED),
            OWNER_LOST: _NODES,
            OWNER_GONE: _NODES,
        },
        EVICTING: {
            GRANT: reject("a client may still read the slot"),
            PUBLISH: reject(_NO_GRANT),
            LATE: reject(_NO_GRANT),
            GIVE_BACK: reject(_NO_GRANT),
            EVICT: reject("the chunk was evicted before"),
            DRAINED: go(FREE),
            OWNER_LOST: reject("leases keep the slot, its writer does not"),
            OWNER_GONE: reject("leases keep the slot, its writer does not"),
        },
        QUARANTINE: {
            GRANT: reject("a DMA may still write the slot"),
            PUBLISH: reject("the slot's client is ending"),
            LATE: reject("the slot's client is ending"),
            GIVE_BACK: reject("the slot's client is ending"),
            EVICT: reject(_NOT_FOUND),
            DRAINED: reject(_NOT_EVICTED),
            OWNER_LOST: reject("the slot's client has lost a process already"),
            OWNER_GONE: go(FREE),
        },
    },
)
