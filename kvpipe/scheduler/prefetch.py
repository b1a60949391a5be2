"""Fetches prompts from tiers into memory before a request asks for them: one prompt after the other, in the steps.

A prefetch uses the same lookups, orders and machines as a waiting request's fetch (`fetches.py`), but only the lanes
that those leave free, and a share of the pool. A prefetch that fails costs nothing: no request waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.cache.prefixes import Prefixes
from kvpipe.scheduler.fetches import AHEAD_S_MAX
from kvpipe.scheduler.orders import WAITS, OrderRefusedError, Work

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Catalog
    from kvpipe.cache.tenants import AdapterIdentity
    from kvpipe.geometry import Geometry
    from kvpipe.scheduler.base import Request
    from kvpipe.scheduler.fetches import Stage, Staging
    from kvpipe.scheduler.pins import PromptPins
    from kvpipe.scheduler.switches import Switches
    from kvpipe.scheduler.weights import Weights

PREFETCHES_MAX: Final = 8
"""How many prefetches there may be, running or waiting."""


class KnownPrompt:
    """A prompt from outside, not of a request of the engine's. Its block hashes are whole keys, of its adapter too."""

    request_id, lora_request = "", None
    num_computed_tokens = num_preemptions = 0
    skip_reading_prefix_cache = resumable = False

    def __init__(
        self, keys: Sequence[bytes], tokens: int, salt: str = "", adapter: AdapterIdentity | None = None
    ) -> None:
        """`keys`: of its blocks, made of `salt` and `adapter`, too."""
        self.block_hashes, self.cache_salt, self.adapter = keys, salt, adapter
        self.num_tokens = self.num_prompt_tokens = tokens


class Prefetch:
    """One prompt's. The stage machine has its state, from its turn on. `over`: nothing more comes of it."""

    def __init__(self, asked: KnownPrompt, request: Request | None) -> None:
        """It waits for its turn. `request`: as in `Stage`."""
        self.asked, self.request = asked, request
        self.stage: Stage | None = None
        self.over = False
        self.until_s = time.monotonic() + AHEAD_S_MAX  # also while it waits for its turn: the engine makes steps for it


class WarmedPrompt(NamedTuple):
    """The result of warming a prompt. `pin`: the number of its pin; 0: none."""

    tokens: int
    fetched_tokens: int
    pin: int
    left_s: float


class Prefetching:
    """One per scheduler side."""

    def __init__(
        self, catalog: Catalog, geometry: Geometry, hash_tokens: int, staging: Staging | None, switches: Switches,
        weights: Weights, pins: PromptPins,
    ) -> None:  # fmt: skip
        """`hash_tokens`: tokens per block hash. `staging`: of an engine with tiers."""
        self._catalog, self._geometry, self._staging, self._counters = catalog, geometry, staging, catalog.counters
        self.prefixes = Prefixes(
            catalog, geometry, hash_tokens, lambda asked: asked.block_hashes,
            lambda asked: catalog.tenants.named(asked.cache_salt or "", getattr(asked, "adapter", None)),
        )  # fmt: skip
        """Of prompts whose hashes are keys."""
        self._switches, self._weights, self._pins = switches, weights, pins
        self._due: deque[Prefetch] = deque()  # the first has its turn

    def begin(self, asked: KnownPrompt, request: Request | None = None) -> Prefetch:
        """Queue a prefetch of what tiers hold of a prompt. Raises `OrderRefusedError` if that is impossible now."""
        if why := self._why_not():
            raise OrderRefusedError(why)
        if len(self._due) >= PREFETCHES_MAX:
            raise OrderRefusedError(f"{PREFETCHES_MAX} prompts are fetched, or wait for it, already")
        self._due.append(Prefetch(asked, request))
        return self._due[-1]

    def _why_not(self) -> str:
        """Return why no request would be served from tiers, or nothing."""
        if self._staging is None:
            return "this engine has no tiers: there is nothing to fetch from"
        if self._switches.bypass or not self._switches.loads or self._switches.tier_lost:
            return "this engine loads nothing now"
        return "whether the weights are the same is being found out" if self._weights.doubtful else ""

    def plan_step(self) -> None:
        """Go on with the first that waits, before the step's orders are planned. Never raises."""
        while self._due:
            first = self._due[0]
            try:
                if self._goes_on(first):
                    return
            except Exception as error:  # noqa: BLE001  (the plan of the step goes on)
                self._counters.fault("fetch_not_planned", error=repr(error))
                if self._staging is not None:
                    self._staging.end(first.stage)
            self._due.popleft()
            first.over = True

    def _goes_on(self, one: Prefetch) -> bool:
        staging = self._staging
        if staging is None:
            return False
        if self._why_not() or time.monotonic() >= one.until_s:
            staging.end(one.stage)
        elif one.stage is None:
            one.stage = staging.ahead(one.asked, self.prefixes, one.request)
        else:
            staging.look(one.stage)
        if one.stage is not None and not one.stage.holds_up:
            staging.end(one.stage)
        return one.stage is not None and one.stage.holds_up

    def warm(self, asked: KnownPrompt, request: Request | None, seconds: float) -> Work:
        """Bring what tiers have of a prompt, then hold it for so long, if that is not 0. Returns a `WarmedPrompt`."""
        one = self.begin(asked, request)
        while not one.over:
            yield WAITS
        tokens = self.prefixes.longest(asked, continued=True) * self._geometry.unit_tokens
        fetched = sum(one.stage.taken.values()) if one.stage is not None else 0
        if not seconds:
            return WarmedPrompt(tokens, fetched, 0, 0.0)
        pin = yield from self._pins.pin(self.prefixes, asked, seconds)
        return WarmedPrompt(pin.tokens, fetched, pin.pin, pin.left_s)

    def has_work(self) -> bool:
        """Whether anything waits for steps: an engine that has nothing else to do goes on making them."""
        return bool(self._due)
