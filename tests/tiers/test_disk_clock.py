"""The clock of the disk tier's file system differs from this machine's clock."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from kvpipe.testing.buffers import put, some_key
from kvpipe.testing.tier_conformance import run
from kvpipe.tiers.disk import index as disk_index
from kvpipe.tiers.disk.files import list_folder
from kvpipe.tiers.disk.tier import DiskTier
from tests.tiers.disks import file_of, opened


@pytest.mark.parametrize("ahead_s", [-3600.0, -0.06, 0.0, 3600.0])
def test_a_file_system_with_another_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """Two changes with equal times are both found. A folder without changes is soon not listed again.

    `ahead_s` is the number of seconds by which the file system's clock is ahead of this machine's clock.
    """
    taken: list[int] = []
    real = list_folder

    def counted(at: int) -> Any:
        taken.append(at)
        return real(at)

    async def play() -> None:
        async with opened(tmp_path, writes=False) as reader, opened(tmp_path) as other:
            tier, shelf = cast("DiskTier", reader), file_of(tmp_path, 1).parent
            await other.write([put(1, 4096)])
            # the difference between the clocks is no whole number of seconds
            at_ns = time.time_ns() + int(ahead_s * 1e9) | 1
            os.utime(shelf, ns=(at_ns, at_ns))
            tier._pass()
            keys = [some_key(1), some_key(2)._replace(chunk=some_key(1).chunk[:1] + some_key(2).chunk[1:])]
            (shelf / keys[1].text).write_bytes(bytes(4096))
            os.utime(shelf, ns=(at_ns, at_ns))  # this change has the same time as the change before
            tier._pass()
            assert tier._index.holds(keys) == [True, True]
            await anyio.sleep(2 * disk_index._GRAIN_S)
            tier._pass()
            monkeypatch.setattr(disk_index, "list_folder", counted)
            tier._pass()
            assert taken == []

    run(play)
