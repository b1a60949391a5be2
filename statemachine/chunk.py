"""The chunk machine: one slot of the pool, from reservation to reuse.

A chunk is filled piece by piece (chunked prefill, decode). It can be found as soon as its first piece has landed on
every rank, and only as far as pieces have landed. An evicted chunk that is still read or written is EVICTING: out of
the index at once, its slot reused only when the last reader and writer are gone.
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
        RESERVED: "a first piece is being written; nothing can be found",
        READY: "can be found; nobody writes",
        GROWING: "can be found as far as it has landed; a further piece is being written",
        EVICTING: "cannot be found; readers or writers remain, the slot is not free",
    },
    events={
        RESERVE: "a save claims the slot",
        GROW: "a save claims the next piece of the slot",
        LANDED_LAST: "a piece has landed on every rank; no other is being written",
        LANDED_MORE: "a piece has landed on every rank; others are being written",
        LOST_LAST: "a piece failed; no other is being written",
        LOST_MORE: "a piece failed; others are being written",
        LEASE: "a load takes a lease",
        EVICT_IDLE: "evicted with no reader and no writer",
        EVICT_HELD: "evicted or reset while read or written",
        DRAINED: "the last reader or writer is gone",
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
            GROW: stay("a further piece before the first has landed"),
            LANDED_LAST: go(READY),
            LANDED_MORE: go(GROWING),
            LOST_LAST: go(ABSENT),
            LOST_MORE: stay("later pieces of a lost beginning will be dropped too"),
            LEASE: reject("nothing has landed"),
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
            DRAINED: stay("the last reader left; the chunk stays"),
        },
        GROWING: {
            RESERVE: reject("the slot is taken"),
            GROW: stay("one more piece in flight"),
            LANDED_LAST: go(READY),
            LANDED_MORE: stay("others are in flight"),
            LOST_LAST: go(READY),
            LOST_MORE: stay("others are in flight"),
            LEASE: stay("readers see only what has landed"),
            EVICT_IDLE: reject("a piece is being written"),
            EVICT_HELD: go(EVICTING),
            DRAINED: reject("a reader that leaves while a writer remains changes nothing"),
        },
        EVICTING: {
            RESERVE: reject("readers or writers remain"),
            GROW: reject("evicted: a new slot is needed"),
            LANDED_LAST: reject("a piece of an evicted chunk is lost"),
            LANDED_MORE: reject("a piece of an evicted chunk is lost"),
            LOST_LAST: stay("evicted: the piece is dropped"),
            LOST_MORE: stay("evicted: the piece is dropped"),
            LEASE: reject("evicted: it cannot be found"),
            EVICT_IDLE: reject("readers or writers remain"),
            EVICT_HELD: reject("it can be found no more, and is in no policy"),
            DRAINED: go(ABSENT),
        },
    },
)
