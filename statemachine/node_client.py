"""The node_client machine follows one engine that uses a node's shared memory. The holder keeps this machine.

A client consists of the scheduler's process and the ranks' processes of one engine. The holder has a pidfd of each
process. A rank may have started helpers, such as a tier's client. The end of a helper is an event of this machine only
if the helper was the client's last process.
"""

from __future__ import annotations

from kvpipe.statemachine.cursors import PlainCell, PlainTable

go, reject, stay = PlainCell.go, PlainCell.reject, PlainCell.stay

DETACHED, ATTACHED, ENDING, GONE = "DETACHED", "ATTACHED", "ENDING", "GONE"

ATTACH, JOIN, BATCH, HANGUP = "attach", "join", "batch", "hangup"
DIED, LAST_DIED, LEAVE, LAST_LEFT = "died", "last_died", "leave", "last_left"

_ENDS = reject("a process of the client has exited or left; a restarted engine is another client")
_OVER = reject("every process of the client has ended")

NODE_CLIENT = PlainTable(
    name="node_client",
    prose="One engine that uses a node's shared memory. The holder keeps this machine.",
    initial=DETACHED,
    finals=frozenset({GONE}),
    states={
        DETACHED: "the scheduler has no connection (new, hung up, or read from a table); leases and grants remain",
        ATTACHED: "the scheduler is connected: it may take slots and publish chunks",
        ENDING: "a process has exited or left; leases and quarantine remain until every process has exited or left",
        GONE: "every process has exited or left; leases, grants and the client's row in the table are released",
    },
    events={
        ATTACH: "the scheduler's process connects, for the first time or again",
        JOIN: "a rank's process, or a helper that a rank has started, connects",
        BATCH: "the scheduler sends the batch of a step",
        HANGUP: "the scheduler's connection has ended; the process may still run",
        DIED: "the pidfd of a process has fired; other processes remain",
        LAST_DIED: "the pidfd of the last process has fired",
        LEAVE: "a process reports that it will not touch the memory again; other processes remain",
        LAST_LEFT: "the last process reports that it will not touch the memory again",
    },
    table={
        DETACHED: {
            ATTACH: go(ATTACHED),
            JOIN: stay("a rank has no say about slots"),
            BATCH: reject("the client has no connection"),
            HANGUP: reject("the client has no connection"),
            DIED: go(ENDING),
            LAST_DIED: go(GONE),
            LEAVE: go(ENDING),
            LAST_LEFT: go(GONE),
        },
        ATTACHED: {
            ATTACH: stay("the newest connection replaces the one before"),
            JOIN: stay("a rank has no say about slots"),
            BATCH: stay("a batch changes states of slots, not of the client"),
            HANGUP: go(DETACHED),
            DIED: go(ENDING),
            LAST_DIED: go(GONE),
            LEAVE: go(ENDING),
            LAST_LEFT: go(GONE),
        },
        ENDING: {
            ATTACH: _ENDS,
            JOIN: _ENDS,
            BATCH: stay("the batch is ignored: the client's slots are in quarantine"),
            HANGUP: stay("the connection of an ending client ends, too"),
            DIED: stay("other processes remain"),
            LAST_DIED: go(GONE),
            LEAVE: stay("other processes remain"),
            LAST_LEFT: go(GONE),
        },
        GONE: {
            ATTACH: _OVER,
            JOIN: _OVER,
            BATCH: _OVER,
            HANGUP: stay("the client's connection may end after its process"),
            DIED: _OVER,
            LAST_DIED: _OVER,
            LEAVE: _OVER,
            LAST_LEFT: _OVER,
        },
    },
)
