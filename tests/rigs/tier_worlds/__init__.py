"""The stores on which the conformance suite runs: all kinds of kvpipe's tiers, with real servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from kvpipe.testing.tier_conformance import TierWorld
from tests.rigs.tier_worlds import dictionary, disk, mooncake, redis, s3

__all__ = ["WORLDS"]

WORLDS: Final[Mapping[str, Callable[[Path], AbstractContextManager[TierWorld]]]] = {
    **dictionary.WORLDS, **disk.WORLDS, **redis.WORLDS, **s3.WORLDS, **mooncake.WORLDS,
}  # fmt: skip
"""For the name of each world, the function that sets the world up in an empty folder."""
