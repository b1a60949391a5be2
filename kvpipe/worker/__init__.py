"""A rank's side: carries out a step's plan, layer by layer. It knows no engine.

vLLM's thread runs `side` and `pipeline` (its calls, in the order of a step), the loop thread `copies` and `watchdog`
(what becomes of each copy). They talk through the loop's inbox; the engine's threads only complete tickets. What one
of the two writes and the other touches is named here; everything else is one thread's own, or never changes.
"""

from typing import Final

SHARED: Final = {
    "counters": "each name is counted by one thread, or twice too seldom to matter; nothing is decided by a count",
    "outbox": "the loop thread appends outcomes, vLLM's thread takes them: a deque",
    "open": "vLLM's thread appends each ticket before its copy begins, the loop thread takes out what is over: a deque",
    "tickets": "vLLM's thread adds layers; the watchdog looks at a copy of them, and soon again",
    "last": "vLLM's thread replaces it; the watchdog reads when it was made, and soon again",
    "stuck": "the loop thread sets it once; vLLM's thread begins no copy after that, and one that it has is waited for",
    "bytes": "the loop thread counts; vLLM's thread reads for the metrics",
    "ns": "the loop thread counts; vLLM's thread reads for the metrics",
    "bytes_per_s": "the loop thread measures; vLLM's thread reads",
}
"""Attributes that the loop thread and vLLM's thread share, and why that is safe."""
