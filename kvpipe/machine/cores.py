"""This module chooses the CPU cores on which kvpipe's threads run."""

from __future__ import annotations

import contextlib
import os

CPUS_AT_START: frozenset[int] = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
"""The cores that this process may use. The set is read at import, before vLLM binds its threads to some cores."""


def spare_cpus() -> frozenset[int]:
    """Return the process's cores to which vLLM has not bound this thread. The result is empty for an unbound thread."""
    return CPUS_AT_START - frozenset(os.sched_getaffinity(0)) if CPUS_AT_START else frozenset()


def bind_this_thread(cpus: frozenset[int]) -> None:
    """Let the calling thread run on `cpus` only. If the system refuses, do nothing."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a list of cores in the form of the Linux kernel, ``0-3,8``. Raises ValueError for other texts."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(n for first, _, last in spans for n in range(int(first), int(last or first) + 1))
