"""Lookups for operators: how much of a prompt memory and tiers hold. These lookups do not affect requests.

The management thread computes the answers from the keys that were found in memory (`kvpipe.manage.reads.HeldKeys`) and
in tiers.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

import anyio

from kvpipe.cache.prefixes import Prefixes
from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.manage import models
from kvpipe.tiers.finder import Place, TierLookup
from kvpipe.tiers.prefix_keys import PrefixKeys
from kvpipe.trace.log import bounded

if TYPE_CHECKING:
    from kvpipe.manage.reads import HeldKeys
    from kvpipe.protocol.engine import Request
    from kvpipe.scheduler.side import SchedulerSide

SURVEY_S_MAX: Final = 2.0
"""The time limit of a survey in seconds. All tiers are queried in parallel."""
_SLACK_S: Final = 0.5
"""The additional wait, in seconds, for the finder's thread to end the lookup after the time limit."""
_LOOK_S: Final = 0.002

Found = tuple[dict[bytes, object], ...]
"""By cache group: the keys that were found."""


class _NoChunks:
    """An empty catalog. It replaces the pool's catalog, which only the scheduler's thread may use."""

    def index(self, _: int) -> dict[bytes, object]:
        """Return the empty index of a cache group."""
        return {}


def _nobody(_: Request) -> Tenant:
    return ANYBODY


class TierSurvey:
    """Asks tiers about prompts. Each engine has one `TierSurvey`, which one event loop uses."""

    def __init__(self, side: SchedulerSide, hash_tokens: int) -> None:
        """`hash_tokens` is the number of tokens per block hash. The attribute `seconds_max` limits a survey."""
        self._side, self._geometry = side, side.geometry
        self._groups = range(len(side.geometry.groups))
        nothing: Any = _NoChunks()
        self.prefixes = Prefixes(nothing, side.geometry, hash_tokens, lambda asked: asked.block_hashes, _nobody)
        """Finds how long a prefix of a prompt is held, judging only by keys that the caller passes."""
        self._one = anyio.Lock()
        self._last: dict[int, TierLookup] = {}
        self.seconds_max = SURVEY_S_MAX

    async def ask(self, asked: Request, memory: HeldKeys, why_not: str = "") -> tuple[list[models.HeldByTier], Found]:
        """Return how much of a prompt each tier holds by itself, and all keys found in memory or a tier.

        Surveys run one at a time. `memory` has the keys found in memory. If `why_not` is not empty, no tier is asked,
        and `why_not` is the reason.
        """
        found: Found = tuple(map(dict, memory.found))
        staging = self._side.staging
        if staging is None:
            return [], found
        async with self._one:
            space, also = memory.space, memory.also
            why_not = why_not or ("" if space else "this engine uses no tiers yet")
            asks = [] if why_not else [place for place, _ in enumerate(staging.names) if self._may_ask(place)]
            lookups = {place: self._lookup(asked, space, also) for place in asks}
            for place, lookup in lookups.items():
                self._last[place] = lookup
                staging.finder.survey(place, lookup)
            await self._answers(lookups.values())
        instead = why_not or "the previous lookup in this tier has not ended"
        tiers = [self._held(asked, name, lookups.get(at), found, instead) for at, name in enumerate(staging.names)]
        return tiers, found

    def _may_ask(self, place: int) -> bool:
        """Whether the tier with the index `place` has ended its last survey, so that it may get the next survey."""
        return place not in self._last or self._last[place].done

    def _lookup(self, asked: Request, space: str, also: str) -> TierLookup:
        """Return a lookup of all keys of a prompt that a tier may hold."""
        prefixes, per_chunk, states = self.prefixes, self._geometry.units_per_chunk, sorted(self._geometry.states)
        keys = prefixes.unit_keys(asked)
        growing = [group for group in self._groups if group not in self._geometry.states]
        wanted: list[Place] = [(group, end) for group in growing for end in range(per_chunk, len(keys) + 1, per_chunk)]
        wanted += [(group, end) for group in states[:1] for end in range(1, len(keys) + 1)]
        full = [group for group in growing if self._geometry.groups[group].window_tokens is None]
        prefix = PrefixKeys(keys, growing, prefixes.state_keys(asked), states, full)
        return TierLookup(prefix, tuple(wanted), space=space, also=also, seconds_max=self.seconds_max, survey=True)

    async def _answers(self, lookups: Collection[TierLookup]) -> None:
        until_s = time.monotonic() + self.seconds_max + _SLACK_S
        while not all(lookup.done for lookup in lookups) and time.monotonic() < until_s:  # noqa: ASYNC110  (a thread sets `done`)
            await anyio.sleep(_LOOK_S)

    def _held(
        self, asked: Request, name: str, lookup: TierLookup | None, found: Found, instead: str
    ) -> models.HeldByTier:
        """Return how much the tier `name` holds, and add the tier's keys to `found`.

        If the tier was not asked, `instead` is the reason.
        """
        if lookup is None or not lookup.done:
            why = "no answer in time" if lookup is not None else instead
            return models.HeldByTier(name=name, held_tokens=None, unknown=why)
        own: Found = tuple({} for _ in self._groups)
        for place in lookup.found:
            for one in (own, found):
                one[place[0]][lookup.key(place)] = lookup
        if lookup.why:
            return models.HeldByTier(name=name, held_tokens=None, unknown=bounded(lookup.why))
        units = self.prefixes.longest(asked, own)
        return models.HeldByTier(name=name, held_tokens=units * self._geometry.unit_tokens, unknown="")
