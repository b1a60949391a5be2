"""Lookups for operators: how much of a prompt each tier holds by itself. They do not affect the lookups of requests."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import anyio

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.policy import make_policy
from kvpipe.cache.prefixes import Prefixes
from kvpipe.manage import models
from kvpipe.tiers.finder import Place, TierLookup
from kvpipe.trace.log import Counters, bounded

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Request
    from kvpipe.scheduler.side import SchedulerSide

SURVEY_S_MAX: Final = 2.0
"""Time limit of a survey; all tiers are asked at once."""
_SLACK_S: Final = 0.5
"""Grace for the finder's thread, which ends a lookup that is out of time."""
_LOOK_S: Final = 0.002

Found = tuple[dict[bytes, object], ...]
"""Per cache group, the keys that were found."""


class TierSurvey:
    """Asks tiers about prompts. One per engine, used by one event loop."""

    def __init__(self, side: SchedulerSide, hash_tokens: int) -> None:
        """`hash_tokens`: tokens per block hash. The attribute `seconds_max` limits a survey."""
        self._side, self._geometry = side, side.geometry
        self._groups = range(len(side.geometry.groups))
        nothing = Catalog(0, len(self._groups), make_policy("lru", 0), Counters())
        self._alone = Prefixes(nothing, side.geometry, hash_tokens, lambda asked: asked.block_hashes)
        self._one = anyio.Lock()
        self._last: dict[int, TierLookup] = {}
        self.seconds_max = SURVEY_S_MAX

    async def ask(self, asked: Request, why_not: str = "") -> tuple[list[models.HeldByTier], Found]:
        """Return what each tier holds of a prompt by itself, and the keys that any tier holds. One survey at a time.

        `why_not`: if not empty, no tier is asked, for this reason.
        """
        found: Found = tuple({} for _ in self._groups)
        staging = self._side.staging
        if staging is None:
            return [], found
        async with self._one:
            space, also = staging.space.name, staging.space.also
            why_not = why_not or ("" if space else "this engine uses no tiers yet")
            asks = [] if why_not else [place for place, _ in enumerate(staging.names) if self._may_ask(place)]
            lookups = {place: self._lookup(asked, space, also) for place in asks}
            for place, lookup in lookups.items():
                self._last[place] = lookup
                staging.finder.survey(place, lookup)
            await self._answers(lookups.values())
        instead = why_not or "its last answer is still waited for"
        tiers = [self._held(asked, name, lookups.get(at), found, instead) for at, name in enumerate(staging.names)]
        return tiers, found

    def _may_ask(self, place: int) -> bool:
        """Whether the tier with the index `place` has ended its last survey: a tier gets one at a time."""
        return place not in self._last or self._last[place].done

    def _lookup(self, asked: Request, space: str, also: str) -> TierLookup:
        """Return a lookup of everything that a tier may hold of a prompt."""
        prefixes, per_chunk, states = self._alone, self._geometry.units_per_chunk, sorted(self._geometry.states)
        keys = prefixes.unit_keys(asked)
        growing = [group for group in self._groups if group not in self._geometry.states]
        wanted: list[Place] = [(group, end) for group in growing for end in range(per_chunk, len(keys) + 1, per_chunk)]
        wanted += [(group, end) for group in states[:1] for end in range(1, len(keys) + 1)]
        return TierLookup(
            keys, tuple(wanted), groups=growing, space=space, also=also, seconds_max=self.seconds_max,
            states=prefixes.state_keys(asked), state_groups=states, survey=True,
            full=[group for group in growing if self._geometry.groups[group].window_tokens is None],
        )  # fmt: skip

    async def _answers(self, lookups: Collection[TierLookup]) -> None:
        until_s = time.monotonic() + self.seconds_max + _SLACK_S
        while not all(lookup.done for lookup in lookups) and time.monotonic() < until_s:  # noqa: ASYNC110  (a thread's)
            await anyio.sleep(_LOOK_S)

    def _held(
        self, asked: Request, name: str, lookup: TierLookup | None, found: Found, instead: str
    ) -> models.HeldByTier:
        """Return what the tier `name` holds, and add its keys to `found`. `instead`: why it was not asked."""
        if lookup is None or not lookup.done:
            why = "no answer in time" if lookup is not None else instead
            return models.HeldByTier(name=name, held_tokens=None, unknown=why)
        own: Found = tuple({} for _ in self._groups)
        for place in lookup.found:
            for one in (own, found):
                one[place[0]][lookup.key(place)] = lookup
        if lookup.why:
            return models.HeldByTier(name=name, held_tokens=None, unknown=bounded(lookup.why))
        units = self._alone.longest(asked, own)
        return models.HeldByTier(name=name, held_tokens=units * self._geometry.unit_tokens, unknown="")
