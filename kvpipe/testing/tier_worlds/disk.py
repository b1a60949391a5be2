"""The worlds of the disk tier: with direct I/O, and without it but with every value synced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpipe.testing.tier_conformance import TierWorld
from kvpipe.tiers.disk.spec import DiskSpec


@contextmanager
def disk_world(folder: Path, **given: Any) -> Iterator[TierWorld]:
    """Set up an empty folder."""
    spec = DiskSpec.model_validate({"path": folder / "tier", "bytes_max": 1 << 30, **given})
    yield TierWorld(lambda: spec.make("disk"), spec)


@contextmanager
def synced_world(folder: Path) -> Iterator[TierWorld]:
    """Set up an empty folder, through the page cache, with every value synced."""
    with disk_world(folder, direct="off", fsync=True) as world:
        yield world


WORLDS = {"disk": disk_world, "disk, page cache, synced": synced_world}
