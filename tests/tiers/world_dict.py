"""The world of the reference tier: clients share one dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult

from kvpipe.testing.dict_tier import DictTier
from kvpipe.tiers.spec import TierSpec
from tests.tiers.worlds import WORLDS, World


class DictSpec(TierSpec):
    """A dictionary that lives as long as this object."""

    kind: Literal["dict"] = "dict"
    _values: dict[str, bytes] = {}

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """See `TierSpec.from_url`: there are no further keys."""
        raise AssertionError(url)

    def make(self, name: str, *, writes: bool = True) -> DictTier:  # noqa: ARG002
        """See `TierSpec.make`."""
        tier = DictTier(name)
        tier.values = self._values
        return tier


@contextmanager
def dict_world(_folder: Path) -> Iterator[World]:
    """Set up an empty dictionary."""
    spec = DictSpec.model_validate({})
    yield World(lambda: spec.make("dict"), spec, frozenset({"refuses_closed"}))


WORLDS["dict"] = dict_world
