"""How much memory a client takes that meets a hostile server: in a process of its own, which tells its peak."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

import anyio

from kvpipe.tiers.base import TierError
from kvpipe.tiers.registry import parse_tier
from tests.tiers.buffers import get, put, some_key

GROWTH_BYTES_MAX = 96 << 20
"""Generous: what bounded buffers of all lanes come to, and an allocator's habits. Floods are far more."""
CALL_S = 1.5


def peak_growth(table: dict[str, Any]) -> int:
    """Return by how many bytes a process grew that has used this tier in every way, after it had connected."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tiers.memory_growth", json.dumps(table)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


async def _play(table: dict[str, Any]) -> int:
    tier = parse_tier(table).make("tier")
    try:
        await tier.open()
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
                continue
    with anyio.move_on_after(CALL_S):
        await tier.close()
    return _peak() - before


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # the machine is others' too
    os.environ |= {"TESTS_S3_ACCESS": "access", "TESTS_S3_SECRET": "hush-hush"}
    sys.stdout.write(f"{anyio.run(_play, json.loads(sys.argv[1]))}\n")
    sys.stdout.flush()
    os._exit(0)  # how a client ends that is under attack is another matter
