"""The node_link machine follows an engine's connection to the holder of a node's memory.

The engine keeps this machine.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

CONNECTING, ATTACHED, ORPHANED = "CONNECTING", "ATTACHED", "ORPHANED"
REFUSED, STRANDED, CLOSED = "REFUSED", "STRANDED", "CLOSED"

WELCOME, ANSWER, HOLDER_LOST, REFUSE, GIVE_UP, CLOSE = "welcome", "answer", "holder_lost", "refuse", "give_up", "close"

_OVER = reject("the engine has no connection any more")
_LOST = reject("the connection was lost already")

NODE_LINK = Machine(
    name="node_link",
    prose="An engine's connection to the holder of its node's memory. The engine keeps this machine.",
    initial=CONNECTING,
    finals=frozenset({REFUSED, CLOSED}),
    states={
        CONNECTING: "the engine has no memory yet; it starts a holder if none runs",
        ATTACHED: "the engine is connected to a holder",
        ORPHANED: "the holder is lost: hits continue, saves use the stock; the engine finds or starts a holder",
        REFUSED: "no holder has accepted the engine, so the engine uses a private pool",
        STRANDED: "the new holder has another memory: hits continue until the engine ends; saves end with the stock",
        CLOSED: "the engine has left",
    },
    events={
        WELCOME: "a holder has accepted the engine",
        ANSWER: "the holder has answered a batch",
        HOLDER_LOST: "the connection has ended, or the holder's clock has stopped, or its boot token has changed",
        REFUSE: "the holder has another version or memory than the engine, or no room for one more slot size or client",
        GIVE_UP: "no holder was found within the longest wait",
        CLOSE: "the engine shuts down",
    },
    table={
        CONNECTING: {
            WELCOME: go(ATTACHED),
            ANSWER: reject("no batch was sent"),
            HOLDER_LOST: reject("the engine has no connection yet"),
            REFUSE: go(REFUSED),
            GIVE_UP: go(REFUSED),
            CLOSE: go(CLOSED),
        },
        ATTACHED: {
            WELCOME: reject("the engine is attached"),
            ANSWER: stay("an answer changes states of slots, not of the connection"),
            HOLDER_LOST: go(ORPHANED),
            REFUSE: reject("a holder refuses only an engine's first message"),
            GIVE_UP: reject("the engine is attached"),
            CLOSE: go(CLOSED),
        },
        ORPHANED: {
            WELCOME: go(ATTACHED),
            ANSWER: _LOST,
            HOLDER_LOST: _LOST,
            REFUSE: go(STRANDED),
            GIVE_UP: stay("the engine tries again; it can still use the memory"),
            CLOSE: go(CLOSED),
        },
        REFUSED: {
            WELCOME: _OVER,
            ANSWER: _OVER,
            HOLDER_LOST: _OVER,
            REFUSE: _OVER,
            GIVE_UP: _OVER,
            CLOSE: stay("there is no connection to close"),
        },
        STRANDED: {
            WELCOME: _OVER,
            ANSWER: _LOST,
            HOLDER_LOST: _LOST,
            REFUSE: _OVER,
            GIVE_UP: _OVER,
            CLOSE: go(CLOSED),
        },
        CLOSED: {
            WELCOME: _OVER,
            ANSWER: _OVER,
            HOLDER_LOST: _OVER,
            REFUSE: _OVER,
            GIVE_UP: _OVER,
            CLOSE: stay("the engine has left already"),
        },
    },
)
