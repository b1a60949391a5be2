"""Places beyond host memory that keep chunks: the protocol, its use by an engine, and a folder for each kind.

A `Finder` is a thread that serves the scheduler's thread. A `Carrier` is a thread that serves vLLM's thread on a rank.
Work reaches the loop of a `TierThread` through the loop's inbox. `SHARED` lists every other attribute that one thread
writes and another thread reads.
"""

from typing import Final

SHARED: Final = {
    "unreadable": "the scheduler's thread replaces the set; the finder's loop reads the old or the new set",
    "heads": "the scheduler's thread sets it before the first lookup, and never changes it after that",
    "other_hashes": "the finder's loop writes a number for each tier; the scheduler's thread reads the numbers "
    "for the metrics",
    "done": "of a lookup: the loop writes it last, and then writes no other attribute of the lookup",
    "found": "of a lookup: the loop writes it; other threads read it only when the lookup is `done`",
    "elsewhere": "of a lookup: shared in the same way as `found`",
    "down": "of a lookup: shared in the same way as `found`",
    "misses": "of a lookup: shared in the same way as `found`",
    "why": "of a lookup: shared in the same way as `found`",
    "state": "of a breaker: the loop fires it; other threads read the state. If they make a call too many, the "
    "loop refuses the call",
    "_over": "the loop sets it once, at its end; an item that arrives later is refused",
    "_ended": "the loop counts; the thread that the loop serves counts only after the loop has stopped to take items",
    "_stores_ended": "shared in the same way as `_ended`; it is read only while a shutdown waits, which has a deadline",
    "_outbox": "the loop appends outcomes and vLLM's thread takes them; it is a deque",
    "bytes": "the loop counts, and vLLM's thread reads the number for the metrics",
    "seconds": "the loop counts, and vLLM's thread reads the number for the metrics",
}
"""The attributes that a tier's loop shares with other threads, each with the reason why sharing is safe."""
