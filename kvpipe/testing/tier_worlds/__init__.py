"""The stores that the conformance suite is run against: kvpipe's own kinds of tiers, with their real servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from kvpipe.testing.tier_conformance import TierWorld
from kvpipe.testing.tier_worlds import dictionary, disk, mooncake, redis, s3

__all__ = ["WORLDS"]

WORLDS: Final[Mapping[str, Callable[[Path], AbstractContextManager[TierWorld]]]] = {
    **dictionary.WORLDS, **disk.WORLDS, **redis.WORLDS, **s3.WORLDS, **mooncake.WORLDS,
}  # fmt: skip
"""What each is called, and how to set it up in an empty folder."""
