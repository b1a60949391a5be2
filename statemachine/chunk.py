"""The chunk machine follows the content of one slot of the pool, from the slot's reservation to its reuse.

A chunk is filled piece by piece (chunked prefill, decode). A lookup finds the chunk as soon as its first piece has
landed on every rank, and finds only the landed pieces. An evicted chunk that is still read or written is EVICTING. An
EVICTING chunk leaves the index at once, but its slot is reused only when the last reader and writer have finished.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

ABSENT, RESERVED, READY, GROWING, EVICTING = "ABSENT", "RESERVED", "READY", "GROWING", "EVICTING"

RESERVE, GROW = "reserve", "grow"
LANDED_LAST, LANDED_MORE, LOST_LAST, LOST_MORE = "landed_last", "landed_more", "lost_last", "lost_more"
LEASE, EVICT_IDLE, EVICT_HELD, DRAINED = "lease", "evict_idle", "evict_held", "drained"

_NOBODY = "no piece is being written"

CHUNK = Machine(
    name="chunk",
    prose="One chunk of KV in one slot of the pool, on every rank.",
    initial=ABSENT,
    finals=frozenset(),
    states={
        ABSENT: "the slot is free",
        RESERVED: "the first piece is being written; no part of the chunk can be found",
        READY: "the chunk can be found; no piece is being written",
        GROWING: "the landed part of the chunk can be found; a further piece is being written",
        EVICTING: "the chunk cannot be found; readers or writers remain, so the slot is not free",
    },
    events={
        RESERVE: "a save claims the slot",
        GROW: "a save claims the next piece of the slot",
        LANDED_LAST: "a piece has landed on every rank; no other piece is being written",
        LANDED_MORE: "a piece has landed on every rank; other pieces are being written",
        LOST_LAST: "a piece failed; no other piece is being written",
        LOST_MORE: "a piece failed; other pieces are being written",
        LEASE: "a load takes a lease",
        EVICT_IDLE: "the chunk is evicted, with no reader and no writer",
        EVICT_HELD: "the chunk is evicted or reset, while it is read or written",
        DRAINED: "the last reader or writer has ended",
    },
    table={
        ABSENT: {
            RESERVE: go(RESERVED),
            GROW: reject("the slot is free"),
            LANDED_LAST: reject("the slot is free"),
            LANDED_MORE: reject("the slot is free"),
            LOST_LAST: reject("the slot is free"),
            LOST_MORE: reject("the slot is free"),
            LEASE: reject("the slot is free"),
            EVICT_IDLE: reject("the slot is free"),
            EVICT_HELD: reject("the slot is free"),
            DRAINED: reject("the slot is free"),
        },
        RESERVED: {
            RESERVE: reject("the slot is taken"),
            GROW: stay("a further piece is reserved before the first piece has landed"),
            LANDED_LAST: go(READY),
            LANDED_MORE: go(GROWING),
            LOST_LAST: go(ABSENT),
            LOST_MORE: stay("the later pieces of a chunk without beginning will be dropped, too"),
            LEASE: reject("no piece has landed"),
            EVICT_IDLE: reject("a piece is being written"),
            EVICT_HELD: go(EVICTING),
            DRAINED: reject("a piece is being written"),
        },
        READY: {
            RESERVE: reject("the slot is taken"),
            GROW: go(GROWING),
            LANDED_LAST: reject(_NOBODY),
            LANDED_MORE: reject(_NOBODY),
            LOST_LAST: reject(_NOBODY),
            LOST_MORE: reject(_NOBODY),
            LEASE: stay("readers do not change what can be found"),
            EVICT_IDLE: go(ABSENT),
            EVICT_HELD: go(EVICTING),
            DRAINED: stay("the last reader has ended; the chunk stays"),
        },
        GROWING: {
            RESERVE: reject("the slot is taken"),
            GROW: stay("one more piece in flight"),
            LANDED_LAST: go(READY),
            LANDED_MORE: stay("other pieces are in flight"),
            LOST_LAST: go(READY),
            LOST_MORE: stay("other pieces are in flight"),
            LEASE: stay("a reader reads only landed pieces"),
            EVICT_IDLE: reject("a piece is being written"),
            EVICT_HELD: go(EVICTING),
            DRAINED: reject("no event is fired when a reader ends while a writer remains"),
        },
        EVICTING: {
            RESERVE: reject("readers or writers remain"),
            GROW: reject("the chunk was evicted: a new slot is needed"),
            LANDED_LAST: reject("a piece of an evicted chunk always counts as lost"),
            LANDED_MORE: reject("a piece of an evicted chunk always counts as lost"),
            LOST_LAST: stay("the chunk was evicted: the piece is dropped"),
            LOST_MORE: stay("the chunk was evicted: the piece is dropped"),
            LEASE: reject("the chunk was evicted: it cannot be found"),
            EVICT_IDLE: reject("readers or writers remain"),
            EVICT_HELD: reject("the chunk cannot be found any more, and the policy does not know it"),
            DRAINED: go(ABSENT),
        },
    },
)
