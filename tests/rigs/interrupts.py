"""Interrupts of processes that tests start."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_enabled() -> Iterator[None]:
    """Let processes that the context starts react to SIGINT.

    In a background job they would inherit a setting to ignore SIGINT.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
