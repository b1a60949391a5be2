"""Places beyond host memory that keep chunks: the protocol, its use by an engine, and a folder for each kind.

Each `TierThread` serves another thread: a `Finder` the scheduler's, a `Carrier` vLLM's thread on a rank. It gets work
through its loop's inbox. `SHARED` lists everything else that one of the two threads writes and the other uses.
"""

from typing import Final

SHARED: Final = {
    "unreadable": "the scheduler's thread replaces the set; the finder's loop reads whichever there is",
    "heads": "the scheduler's thread sets it before it begins any lookup; never changed after that",
    "other_hashes": "the finder's loop writes a number for a tier; the scheduler's thread reads for the metrics",
    "done": "of a lookup: the loop writes it last, and nothing of the lookup after it",
    "found": "of a lookup: the loop fills it; read by others when it is `done`",
    "elsewhere": "of a lookup: as `found`",
    "down": "of a lookup: as `found`",
    "why": "of a lookup: as `found`",
    "state": "of a breaker: the loop fires it; others read which there is, and a call too many is refused on the loop",
    "_over": "the loop sets it once, at its end; an item that comes later is refused",
    "_ended": "the loop counts; the thread that it serves counts only once the loop takes no items any more",
    "_stores_ended": "as `_ended`; read only while a shutdown waits, which has a deadline",
    "_outbox": "the loop appends outcomes, vLLM's thread takes them: a deque",
    "bytes": "the loop counts; vLLM's thread reads for the metrics",
    "seconds": "the loop counts; vLLM's thread reads for the metrics",
}
"""Attributes that a tier's loop and other threads share, and why that is safe."""
