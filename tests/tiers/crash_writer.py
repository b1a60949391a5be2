"""Forks children that save values to a disk tier until they are killed, and that report each finished value.

`python -m tests.tiers.crash_writer FOLDER BYTES_MAX`: for each number on stdin, the program forks a child and prints
`pid ID`. The child opens a tier, prints `open`, and writes values from that number on. The child prints `+NUMBER`
when a value is stored, and `-NUMBER` before it deletes a value.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import anyio

from kvpipe.testing.buffers import aligned, content, some_key
from kvpipe.tiers.base import ALIGN_BYTES, Get, Put, Read, TierFullError, Written
from kvpipe.tiers.disk.spec import DiskSpec
from kvpipe.tiers.disk.tier import DiskTier
from kvpipe.tiers.envelope import HEADER_BYTES, Sealer

SEALER, UNITS = Sealer(), 16
DELETE_EACH = 13


def spec_of(folder: Path, bytes_max: int) -> DiskSpec:
    """Return the specification that all processes use."""
    return DiskSpec.model_validate({"path": folder, "bytes_max": bytes_max, "timeout_ms_max": 30_000})


def _report(line: str) -> None:
    os.write(1, line.encode() + b"\n")  # the line is short, so one call writes it as a whole


async def _save(tier: DiskTier, number: int) -> None:
    key, body = some_key(number), aligned(ALIGN_BYTES * (1 + number % 15))
    body[:] = content(number, body.nbytes)
    try:
        ends = await tier.write([Put(key, SEALER.seal(key, UNITS, body))])
    except TierFullError:  # the disk is full of unfinished values of other children
        return
    assert ends == [Written.STORED]
    _report(f"+{number}")
    into = (aligned(HEADER_BYTES), aligned(body.nbytes))
    (read,) = await tier.read([Get(key, into)])
    if read is not Read.MISS:  # the value may have been evicted
        SEALER.unseal(key, UNITS, *into)
    if number % DELETE_EACH == 0:
        _report(f"-{number}")
        await tier.delete([key])


async def _work(spec: DiskSpec, first: int) -> None:
    tier, numbers = spec.make("disk"), itertools.count(first)
    await tier.open()
    _report("open")

    async def write() -> None:
        for number in numbers:
            await _save(tier, number)

    async with anyio.create_task_group() as group:
        for _ in range(spec.lanes):
            group.start_soon(write)


def main(folder: str, bytes_max: str) -> None:
    """Serve until stdin ends."""
    # the kernel removes a dead child at once, without a wait by this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            anyio.run(_work, spec_of(Path(folder), int(bytes_max)), int(line))
        _report(f"pid {pid}")


if __name__ == "__main__":
    main(*sys.argv[1:])
