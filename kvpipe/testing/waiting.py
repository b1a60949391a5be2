"""How tests wait: for what must come, however slow the machine is, and never for a time that should be enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

WAIT_S: Final = 120.0
"""A limit that no load of the machine reaches: only what hangs."""
EVENTUALLY_S: float = WAIT_S
"""The limit of `eventually`. Where a hang is expected, as with a mutant, it is lower."""
PATIENT_MS: Final = 120_000
"""The same, as the `timeout_ms_max` of a tier whose limit is not what a test is about."""
PATIENT: Final[dict[str, Any]] = {"timeout_ms_max": PATIENT_MS}
"""It as keys of a tier."""


def eventually(true: Callable[[], object], *, every_s: float = 0.001) -> bool:
    """Whether `true` becomes true within `EVENTUALLY_S`. It is asked every `every_s` seconds until then."""
    limit = time.monotonic() + EVENTUALLY_S
    while not true():
        if time.monotonic() > limit:
            return False
        time.sleep(every_s)
    return True
