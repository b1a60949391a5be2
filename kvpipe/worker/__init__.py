"""The worker side, on a rank: carries out a step's plan, layer by layer. It knows no engine.

vLLM's thread runs `side` and `pipeline` (the calls of a step, in order), `outcomes` and `async_loads`; the loop thread
runs `copies` and `watchdog` (how each copy ends). vLLM's thread sends to the loop thread through its inbox; the
transfer engine's threads only complete tickets. `SHARED` lists what one of the two writes and the other uses;
everything else belongs to one thread, or never changes.
"""

from typing import Final

SHARED: Final = {
    "counters": "each name is counted by one thread, or so seldom by two that a lost count does not matter",
    "outbox": "the loop thread appends outcomes, vLLM's thread takes them: a deque",
    "open": "vLLM's thread appends each ticket before its copy begins, the loop thread takes out what is over: a deque",
    "tickets": "vLLM's thread adds layers; the watchdog looks at a copy of them, and soon again",
    "last": "vLLM's thread replaces it; the watchdog reads when it was made, and soon again; who completes a ticket "
    "and finds another one there wakes nobody: vLLM's thread, or that one's completion, does so later",
    "stuck": "the loop thread sets it once; vLLM's thread begins no copy after that, and one that it has is waited for",
    "bytes": "the loop thread counts; vLLM's thread reads for the metrics",
    "ns": "the loop thread counts; vLLM's thread reads for the metrics",
    "bytes_per_s": "the loop thread measures; vLLM's thread reads",
}
"""Attributes that the loop thread and vLLM's thread share, and why that is safe."""
