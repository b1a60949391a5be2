"""The node_grant machine follows one slot that an engine was granted. The engine keeps this machine."""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject

STOCKED, WRITING, SENT, SETTLED = "STOCKED", "WRITING", "SENT", "SETTLED"

TAKE, LANDED, FAILED, LATE, DONE, GIVE_BACK = "take", "landed", "failed", "late", "done", "give_back"

_UNUSED = reject("no save uses the slot")
_WRITES = reject("a copy may touch the slot")
_OVER = reject("the slot belongs to the holder")

NODE_GRANT = Machine(
    name="node_grant",
    prose="One slot of a node's memory that an engine was granted. The engine keeps this machine.",
    initial=STOCKED,
    finals=frozenset({SETTLED}),
    states={
        STOCKED: "the next save may take the slot, without a message to the holder",
        WRITING: "copies of a save may write the slot",
        SENT: "the chunk has landed on all ranks; the engine repeats the report until a holder answers",
        SETTLED: "the slot belongs to the holder again: it was published or given back",
    },
    events={
        TAKE: "a save takes the slot",
        LANDED: "every rank has landed its part",
        FAILED: "the save failed, and no copy touches the slot any more",
        LATE: "the holder answers that another slot has the chunk's key already",
        DONE: "the holder answers that the chunk is published, or that the report is too old",
        GIVE_BACK: "the engine needs fewer slots in stock",
    },
    table={
        STOCKED: {
            TAKE: go(WRITING),
            LANDED: _UNUSED,
            FAILED: _UNUSED,
            LATE: reject("nothing was reported"),
            DONE: reject("nothing was reported"),
            GIVE_BACK: go(SETTLED),
        },
        WRITING: {
            TAKE: reject("a save has the slot"),
            LANDED: go(SENT),
            FAILED: go(STOCKED),
            LATE: reject("nothing was reported"),
            DONE: reject("nothing was reported"),
            GIVE_BACK: _WRITES,
        },
        SENT: {
            TAKE: reject("the chunk is reported"),
            LANDED: reject("the chunk was reported already"),
            FAILED: reject("every rank has landed"),
            LATE: go(STOCKED),
            DONE: go(SETTLED),
            GIVE_BACK: reject("the chunk is reported"),
        },
        SETTLED: {TAKE: _OVER, LANDED: _OVER, FAILED: _OVER, LATE: _OVER, DONE: _OVER, GIVE_BACK: _OVER},
    },
)
