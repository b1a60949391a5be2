"""The world of the reference tier: clients share one dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from kvpipe.testing.dict_tier import DictTier
from kvpipe.testing.tier_conformance import Limit, TierWorld
from kvpipe.testing.waiting import PATIENT
from kvpipe.tiers.spec import TierSpec


class SharedDictSpec(TierSpec):
    """A dictionary that lives as long as this object."""

    kind: Literal["dict"] = "dict"
    _values: dict[str, bytes] = {}

    def make(self, name: str, *, writes: bool = True) -> DictTier:  # noqa: ARG002
        """See `TierSpec.make`."""
        tier = DictTier(name)
        tier.values = self._values
        return tier


LIMITS: Final[frozenset[Limit]] = frozenset({"refuses_closed", "unbounded", "age", "unbroken", "blocks"})


@contextmanager
def dict_world(_folder: Path) -> Iterator[TierWorld]:
    """Set up an empty dictionary."""
    spec = SharedDictSpec.model_validate(PATIENT)
    yield TierWorld(lambda: spec.make("dict"), spec, LIMITS)


WORLDS = {"dict": dict_world}
