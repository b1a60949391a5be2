"""The worker side of a rank carries out the plan of each step, layer by layer. This package imports no engine.

vLLM's thread runs the modules `side`, `pipeline` (the calls of a step, in order), `outcomes` and `async_loads`. The
loop thread runs `copies` and `watchdog`, which record how each copy ends. vLLM's thread sends events to the loop thread
through the loop thread's inbox. A thread that has completed a batch's last ticket, or vLLM's thread at a step's end,
handles the inbox itself instead of waking the loop thread. A thread handles the inbox only while it holds the lock
`LoopThread.turn`. So no two threads handle the inbox at once. `SHARED` lists the attributes that vLLM's thread and the
loop thread share. Every other attribute belongs to one thread or never changes.
"""

from typing import Final

SHARED: Final = {
    "counters": "one thread counts each name, or two threads so seldom that a lost count does not matter",
    "outbox": "the loop thread appends outcomes and vLLM's thread takes them; it is a deque",
    "open": "vLLM's thread appends each ticket before the ticket's copy begins, and the loop thread removes "
    "completed tickets; it is a deque",
    "tickets": "vLLM's thread adds layers; the watchdog reads a copy, and reads again soon",
    "last": "vLLM's thread replaces the ticket; the watchdog reads its time, and reads again soon. A thread that "
    "completes a ticket and finds another last ticket notifies nobody, because vLLM's thread or the "
    "completion of the last ticket does so later",
    "stuck": "the loop thread sets it once; after that vLLM's thread begins no copy, and waits for the copies "
    "that have begun",
    "state": "the loop thread moves the cursors of copies; vLLM's thread reads the cursor of its step, and the "
    "states of tickets",
    "bytes": "the loop thread counts, and vLLM's thread reads the number for the metrics",
    "ns": "the loop thread counts, and vLLM's thread reads the number for the metrics",
    "done_ns": "the thread that completes a ticket sets it, and the loop thread sets it again for a load that has "
    "waited for digests; vLLM's thread reads it only in `submit`, before any digest is compared",
    "bytes_per_s": "the loop thread measures, and vLLM's thread reads the number",
}
"""The attributes that the loop thread and vLLM's thread share, each with the reason why sharing is safe."""
