"""The worlds of the disk tier: with direct I/O, and without it but with every value synced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvpipe.tiers.disk import DiskSpec
from tests.tiers.worlds import WORLDS, World


@contextmanager
def disk_world(folder: Path, **given: Any) -> Iterator[World]:
    """Set up an empty folder."""
    spec = DiskSpec.model_validate({"path": folder / "tier", "bytes_max": 1 << 30, **given})
    yield World(lambda: spec.make("disk"), spec)


def _world(**given: Any) -> Callable[[Path], AbstractContextManager[World]]:
    return partial(disk_world, **given)


WORLDS["disk"] = _world()
WORLDS["disk, page cache, synced"] = _world(direct="off", fsync=True)
