"""Waits for tests. A test waits for a condition, never for a fixed time, because the speed of machines differs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

WAIT_S: Final = 120.0
"""A time limit in seconds that only a hang exceeds, even on a busy machine."""
EVENTUALLY_S: float = WAIT_S
"""The time limit of `eventually` in seconds. Tests that expect a hang, such as tests of mutants, lower this limit."""
PATIENT_MS: Final = 120_000
"""A `timeout_ms_max` that only a hang exceeds, for tests that do not test the tier's time limit."""
PATIENT: Final[dict[str, Any]] = {"timeout_ms_max": PATIENT_MS}
"""`PATIENT_MS` as configuration keys of a tier."""


def eventually(true: Callable[[], object], *, every_s: float = 0.001) -> bool:
    """Whether `true()` becomes true within `EVENTUALLY_S` seconds. `true` is called every `every_s` seconds."""
    limit = time.monotonic() + EVENTUALLY_S
    while not true():
        if time.monotonic() > limit:
            return False
        time.sleep(every_s)
    return True
