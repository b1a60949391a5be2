"""Measures the memory that a client of a hostile server takes. The client runs in a process that reports its peak."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import anyio

from kvpipe.testing.buffers import get, put, some_key
from kvpipe.testing.tier_conformance.worlds import tried
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import TierError
from kvpipe.tiers.registry import parse_tier

GROWTH_BYTES_MAX = 96 << 20
"""The limit on growth. The bounded buffers of all lanes need less, and a flood takes far more."""
CLIENT_BYTES_MAX = 384 << 20
"""The most memory of a client's process: its code, its memory limit, and its memory before the limit was set."""
CALL_S = 1.0
"""The number of seconds after which a call is cancelled.

A client that kept a flood in memory would exceed the limits long before.
"""


class Growth(NamedTuple):
    """Bytes by which this process grew, and the peak in bytes of a process that it had started."""

    here: int
    there: int


def peak_growth(table: dict[str, Any]) -> Growth:
    """Return the growth of a process since its tier was connected. The process makes every kind of call of the tier."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tiers.memory_growth", json.dumps(table)],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return Growth(*json.loads(done.stdout))


def _peak(whose: int = resource.RUSAGE_SELF) -> int:
    return resource.getrusage(whose).ru_maxrss << 10


async def _play(table: dict[str, Any]) -> Growth:
    tier = parse_tier(table).make("tier")
    try:
        await tried(tier.open) if not table.get("cluster") else await tier.open()
    except TierError:
        if not table.get("cluster"):
            raise
    before = _peak()

    async def scan() -> None:
        async for _ in tier.scan():
            pass

    calls = (
        lambda: tier.exists([some_key(i) for i in range(100)]), lambda: tier.read([get(1, 65536), get(2, 4096)]),
        lambda: tier.write([put(1, 4096)]), lambda: tier.delete([some_key(1)]), tier.capacity, scan, tier.health,
    )  # fmt: skip
    for call in calls:
        with anyio.move_on_after(CALL_S):
            try:
                await call()
            except TierError:
                with suppress(TierError):  # restarts a client that has ended
                    await tier.health()
    with anyio.move_on_after(CALL_S):
        await tier.close()
    return Growth(_peak() - before, _peak(resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # other programs need the machine's memory, too
    os.environ |= {"TESTS_S3_ACCESS": "access", "TESTS_S3_SECRET": "hush-hush"}
    sys.stdout.write(json.dumps(anyio.run(_play, json.loads(sys.argv[1]))))
    sys.stdout.flush()
    os._exit(0)  # the test does not check how a client under attack exits
