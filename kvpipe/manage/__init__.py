"""The management interface of a running engine: its state, switches and orders, over HTTP.

HTTP is served at a Unix socket or a local port. The management thread runs this package, except `start` and `reads`.
The turn (`kvpipe.features.orders`) is the right to use the objects of the scheduler side. The engine's thread gives the
turn away while the engine is idle. With the turn, the management thread carries out orders. Without the turn, the
management thread only queues orders, takes their results, and sets switches. `SHARED` names the attributes that both
threads use without the turn. Every other attribute belongs to one thread, or never changes.
"""

from typing import Final

_SWITCH: Final = "operators set it by one assignment; the scheduler's thread reads it once for each decision"
_RESULT: Final = "of an order: the thread that has the turn writes it before `Order.over`; others read it after that"

SHARED: Final = {
    # The turn, and orders with their results.
    "Turns.away": "the engine's thread writes it; a thread that finds it set must also get the lock before it "
    "touches anything",
    "Turns._wanted": "the engine's thread writes it; a thread that misses the change keeps the turn for one more slice",
    "Orders.due": "any thread appends, and the thread that has the turn takes items; it is a deque, which is "
    "copied to count items",
    "Orders.reads": "any thread appends, and the thread that has the turn takes items; it is a deque, whose size "
    "is read",
    "Orders._ended": "set once, before the waiting orders are refused; a thread that puts an order reads it afterwards",
    "Bell._loop": "set before any thread listens; a thread that rings while it is replaced wakes the old loop",
    "Bell._waiting": "the management thread adds to it before it reads orders; other threads test whether it is empty",
    "Order.unwanted": "the management thread sets it once; a thread that misses the change only does unneeded work",
    "Order.over": "of an order: written once and last, by the thread that has the turn or that ends the engine",
    "Order.result": _RESULT,
    "Order.refused": _RESULT,
    "Order.failed": _RESULT,
    # Switches, which operators set.
    "Switches.freeze": _SWITCH,
    "Switches.bypass": _SWITCH,
    # The trace.
    "Recorder.step": "the scheduler's thread replaces the number; an event has the old or the new number",
    "Recorder._queue": "any thread appends events, and the writer takes them; it is a deque",
}
"""The attributes that the management thread and the scheduler's thread share without the turn, each with the reason why
sharing is safe."""
