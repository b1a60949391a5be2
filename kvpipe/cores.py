"""The CPU cores that kvpipe's threads run on."""

from __future__ import annotations

import contextlib
import os

CPUS_AT_START: frozenset[int] = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
"""The cores this process may use, read at import: vLLM binds its threads to some of them later."""


def spare_cpus() -> frozenset[int]:
    """Return the cores that vLLM has not bound this thread to; empty if vLLM has not bound it, or to all cores."""
    return CPUS_AT_START - frozenset(os.sched_getaffinity(0)) if CPUS_AT_START else frozenset()


def bind_this_thread(cpus: frozenset[int]) -> None:
    """Let the calling thread run on `cpus` only. Does nothing on a system that refuses."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a list of cores as the kernel writes it: ``0-3,8``. Raises ValueError for other texts."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(n for first, _, last in spans for n in range(int(first), int(last or first) + 1))
