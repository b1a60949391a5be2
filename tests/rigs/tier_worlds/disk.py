"""The worlds of the disk tier: one uses direct I/O, and one uses the page cache and syncs every value."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvpipe.testing.tier_conformance import TierWorld
from kvpipe.testing.waiting import PATIENT, eventually
from kvpipe.tiers.base import Tier
from kvpipe.tiers.disk.spec import DiskSpec
from kvpipe.tiers.disk.tier import DiskTier

OLDER_S = 120


def grow_old(tier: Tier) -> None:
    """Let a disk tier's index count as old, so that the next lookup lists the files again."""
    assert isinstance(tier, DiskTier)
    assert eventually(lambda: not tier._looks)
    tier._last = tier._last._replace(ended_s=-math.inf)


@contextmanager
def moved(folder: Path) -> Iterator[None]:
    """Move a tier's folder away, and put a file in its place."""
    away = folder.rename(folder.with_name("away"))
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        away.rename(folder)


def aged(folder: Path) -> None:
    """Make every file so much older that its next use renews its mtime. Uses within a short time do not."""
    for file in (file for file in folder.rglob("*") if file.is_file()):
        used_s = file.stat().st_mtime - OLDER_S
        os.utime(file, (used_s, used_s))


@contextmanager
def disk_world(folder: Path, **given: Any) -> Iterator[TierWorld]:
    """Set up an empty folder."""
    spec = DiskSpec.model_validate({"path": folder / "tier", "bytes_max": 1 << 30, **PATIENT, **given})
    yield TierWorld(lambda: spec.make("disk"), spec, broken=partial(moved, spec.path), older=partial(aged, spec.path))


@contextmanager
def synced_world(folder: Path) -> Iterator[TierWorld]:
    """Set up an empty folder, which is used through the page cache and syncs every value."""
    with disk_world(folder, direct="off", fsync=True) as world:
        yield world


WORLDS = {"disk": disk_world, "disk, page cache, synced": synced_world}
