"""The worlds of the disk tier: with direct I/O, and without it but with every value synced."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpipe.testing.tier_conformance import TierWorld
from kvpipe.testing.waiting import PATIENT, eventually
from kvpipe.tiers.base import Tier
from kvpipe.tiers.disk.spec import DiskSpec
from kvpipe.tiers.disk.tier import DiskTier


def grow_old(tier: Tier) -> None:
    """Let what a disk tier knows of its files be old, so that its next lookup looks at them anew."""
    assert isinstance(tier, DiskTier)
    assert eventually(lambda: not tier._looks)
    tier._last = tier._last._replace(ended_s=-math.inf)


@contextmanager
def disk_world(folder: Path, **given: Any) -> Iterator[TierWorld]:
    """Set up an empty folder."""
    spec = DiskSpec.model_validate({"path": folder / "tier", "bytes_max": 1 << 30, **PATIENT, **given})
    yield TierWorld(lambda: spec.make("disk"), spec)


@contextmanager
def synced_world(folder: Path) -> Iterator[TierWorld]:
    """Set up an empty folder, through the page cache, with every value synced."""
    with disk_world(folder, direct="off", fsync=True) as world:
        yield world


WORLDS = {"disk": disk_world, "disk, page cache, synced": synced_world}
