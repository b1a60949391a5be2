"""The management interface of a running engine: state, switches, orders; HTTP on a Unix socket or a local port.

Its thread runs all of this package but `start`. What the scheduler's side owns is touched in two ways. With the turn
(`kvpipe.scheduler.orders`), which the engine lends while it has nothing to do, this thread has it alone and carries
out orders. Without the turn it only reads, puts orders, and sets switches: whatever of that the scheduler's thread
touches, too, is named here. Everything else is one thread's own, or never changes.
"""

from typing import Final

_NUMBER: Final = "the scheduler's thread replaces the number; an answer has the one before or the one after"
_OBJECT: Final = "the scheduler's thread replaces the object; what is read of it is read of one, before or after"
_COPIED: Final = "the scheduler's thread changes it; it is copied or counted, and once more if it has changed meanwhile"
_KEYED: Final = "the scheduler's thread puts keys in and takes them out; they are asked for one by one"
_SPACE: Final = "the scheduler's thread replaces it; under a name of two times a survey finds nothing"
_SWITCH: Final = "operators set it, by one assignment; the scheduler's thread looks at it once for each decision"
_RESULT: Final = "of an order: written before `Order.over` by the thread that has the turn, and read after it"

SHARED: Final = {
    # handed over
    "Turns.away": "the engine's thread writes it; who finds it set must get the lock, too, before it touches anything",
    "Turns._wanted": "the engine's thread writes it; who misses it has the turn for one slice more",
    "Orders.due": "any thread appends, the one that has the turn takes out: a deque, which is copied to be counted",
    "Orders._ended": "set once, before what waits is refused; who puts an order looks at it afterwards",
    "Bell._loop": "set before anybody listens; who rings while it is replaced wakes the loop that was there",
    "Bell._waiting": "the management thread adds to it before it looks at orders; others ask whether it is empty",
    "Order.over": "of an order: written last, and once, by the thread that has the turn or ends the engine",
    "Order.result": _RESULT,
    "Order.refused": _RESULT,
    "Order.failed": _RESULT,
    "Recorder._queue": "any thread appends events, the writer takes them: a deque",
    # operators'
    "Switches.freeze": _SWITCH,
    "Switches.bypass": _SWITCH,
    # read while the scheduler's thread changes it
    "Switches.tier_lost": "the scheduler's thread sets it once, and nothing takes it back",
    "SchedulerSide.counters": "each name is counted by one thread, or too seldom to matter; copied in one operation",
    "Recorder.step": _NUMBER,
    "RequestReporter.hit_tokens": _COPIED,
    "RequestReporter.missed_tokens": _COPIED,
    "Requests.tracked": _COPIED,
    "Tracked.stage": _OBJECT,
    "SaveProgress.saved_units": _NUMBER,
    "Cursor.state": "the scheduler's thread fires it; states never change, and one of them is read",
    "Jobs.in_flight": _COPIED,
    "Patience.rates": _KEYED,
    "Pace.s_per_token": _NUMBER,
    "Pace._work_s": _NUMBER,
    "Staging._transfers": "the scheduler's thread changes it; only its size is read",
    "Adapters._held": _COPIED,
    "Namespace.base": _SPACE,
    "Namespace.second": _SPACE,
    "Namespace._own": _SPACE,
    "TierThread.unreadable": "of a finder: the scheduler's thread replaces the set, and whichever there is counts",
    "Weights._question": _NUMBER,
    "Weights._answered": _NUMBER,
    "Account.used": _NUMBER,
    "Account.sure": _NUMBER,
    "Catalog.ready": "a number that the scheduler's thread makes larger, and never smaller while operators are served",
    "Catalog.stale": _NUMBER,
    "Catalog._era": _OBJECT,
    "Catalog.fresh": _NUMBER,
    "Catalog._free": "the scheduler's thread changes it; only its size is read",
    "Catalog._chunks": "slot by slot: the scheduler's thread replaces what is in one, and never the list",
    "Catalog._index": _KEYED,
    "Catalog._pending": _KEYED,
    "Catalog._before": _KEYED,
    "Catalog._writing": _COPIED,
    "Catalog.leased": _COPIED,
    "Catalog.leased_since_s": _COPIED,
    "Chunk.era": _OBJECT,
    "Chunk.leases": _NUMBER,
    "Chunk.writers": _NUMBER,
    "Chunk.used_s": _NUMBER,
    "Lost.reasons": _KEYED,
    "PromptPins.pins": _COPIED,
    "PromptPins._pinned": "the thread that has the turn changes it; only its size is read",
    "Pin.over": "set once, by the thread that has the turn; a pin that is over is not listed from then on",
    "Pin.tokens": _NUMBER,
    "Pin.chunks": "the thread that has the turn changes it; only its size is read",
}
"""Attributes that the management thread and the scheduler's share without the turn, and why that is safe."""
