"""Fetches prompts from tiers into memory before a request asks for them: one prompt after the other, in the steps.

A prefetch uses the same lookups, orders and machines as a waiting request's fetch (`fetches.py`), but only the lanes
that those leave free, and a share of the pool. A prefetch that fails costs nothing: no request waits for it. The
prompts are those that operators warm, and after these those that clients have announced (`announced.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.cache.hints import Action
from kvpipe.cache.prefixes import Prefixes
from kvpipe.scheduler.announced import HASHES_MAX, HASHES_MAX_WITH_REQUESTS, Announcement, Announcements
from kvpipe.scheduler.orders import WAITS, OrderRefusedError, Work
from kvpipe.scheduler.stages import AHEAD_S_MAX
from kvpipe.trace.events import ResumePrefetched
from kvpipe.trace.log import bounded

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Catalog, Chunk
    from kvpipe.cache.tenants import AdapterIdentity
    from kvpipe.geometry import Geometry
    from kvpipe.scheduler.base import Published, Request
    from kvpipe.scheduler.fetches import Staging
    from kvpipe.scheduler.hints import Wish
    from kvpipe.scheduler.pins import PromptPins
    from kvpipe.scheduler.stages import Stage
    from kvpipe.scheduler.switches import Switches
    from kvpipe.scheduler.weights import Weights
    from kvpipe.trace.recorder import Recorder

PREFETCHES_MAX: Final = 8
"""How many prefetches there may be, running or waiting."""
IDLE_S_MAX: Final = 2.0
"""For so long at most an engine that has nothing else to do makes steps for announced prompts.

It may be about to end, or to pause: vLLM waits until nothing is pending, and ends processes by force 5 seconds later.
"""
_NEVER: Final = float("inf")


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

    def __init__(self, asked: KnownPrompt, request: Request | None, announced: Announcement | None = None) -> None:
        """It waits for its turn. `request`: as in `Stage`. `announced`: a request is, by a hint."""
        self.asked, self.request, self.announced = asked, request, announced
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
        weights: Weights, pins: PromptPins, published: Published | None, trace: Recorder,
    ) -> None:  # fmt: skip
        """`hash_tokens`: tokens per block hash. `staging`: of an engine with tiers. `published`: as in `Staging`."""
        self._catalog, self._geometry, self._staging, self._counters = catalog, geometry, staging, catalog.counters
        self._hash_tokens, self._routed, self._trace = hash_tokens, published, trace
        hashes_max = HASHES_MAX if published is None else HASHES_MAX_WITH_REQUESTS
        self.announced = Announcements(catalog.counters, hashes_max=hashes_max, account=catalog.account_of)
        self.prefixes = Prefixes(
            catalog, geometry, hash_tokens, lambda asked: asked.block_hashes,
            lambda asked: catalog.tenants.named(asked.cache_salt or "", getattr(asked, "adapter", None)),
        )  # fmt: skip
        """Of prompts whose hashes are keys."""
        self._switches, self._weights, self._pins = switches, weights, pins
        self._due: deque[Prefetch] = deque()  # the first has its turn
        self.idle_s_max = IDLE_S_MAX
        self._stops_s = _NEVER  # when an engine that has nothing else to do stops

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

    def announce(self, request: Request, prefixes: Prefixes, wishes: Sequence[Wish]) -> None:
        """A request is over, and its client may have announced another that begins with all of it.

        `prefixes` still knows its keys.
        """
        pause_s = next((wish.in_s for wish in wishes if wish.action is Action.RESUME), None)
        if pause_s is None or self._staging is None:
            return
        keys = prefixes.hashes(request)
        place = min(len(keys), request.num_prompt_tokens // self._hash_tokens) - 1  # answers may be cut
        kept = self._routed.kept(request) if self._routed is not None else None
        if place < 0 or (self._routed is not None and kept is None):
            return
        tenant = prefixes.tenant(request)
        asked = KnownPrompt(keys, request.num_tokens, tenant.salt, tenant.adapter)
        now_s = self._catalog.now_s
        self.announced.add(Announcement(asked, bounded(request.request_id), kept, place, now_s, pause_s, tenant))

    def came(self, hashes: Sequence[bytes]) -> None:
        """A request with these hashes is looked up: what it brings itself is not brought ahead of it."""
        came = self.announced.came(hashes)
        for one in self._due if came else ():
            if one.announced in came:
                one.until_s = 0.0

    def _take_turn(self, *, idle: bool) -> None:
        """Begin with the announced prompt whose turn it is, if there is one."""
        now_s = self._catalog.now_s
        if self._has_turn(now_s, idle=idle):
            one = self.announced.take(now_s, idle=idle)
            if one is not None:
                self._due.append(Prefetch(one.asked, one.request, one))

    def _has_turn(self, now_s: float, *, idle: bool) -> bool:
        """Whether one may begin with an announced prompt now."""
        announced = self.announced.has_turn(now_s, idle=idle)
        return announced and not self._why_not() and time.monotonic() < self._stops_s

    def plan_step(self, *, idle: bool) -> None:
        """Go on with the first that waits, before the step's orders are planned. Never raises.

        `idle`: the step computes nothing.
        """
        if not idle:
            self._stops_s = _NEVER
        elif self._stops_s == _NEVER:
            self._stops_s = time.monotonic() + self.idle_s_max
        if self.announced.prompts and not self._due:
            self._take_turn(idle=idle)
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
        until_s = one.until_s if one.announced is None else min(one.until_s, self._stops_s)
        if self._why_not() or time.monotonic() >= until_s:
            staging.end(one.stage)
        elif one.stage is None:
            if one.announced is not None:
                self._catalog.ahead.count_anew(self._held(one.asked))
            one.stage = staging.ahead(one.asked, self.prefixes, one.request, announced=one.announced is not None)
        else:
            staging.look(one.stage)
        if one.stage is not None and one.stage.holds_up:
            return True
        staging.end(one.stage)
        if one.announced is not None and one.until_s:
            self._end_turn(one, one.announced)
        return False

    def _held(self, asked: KnownPrompt) -> list[Chunk]:
        """Return what memory has of a prompt, in the order of its prefix."""
        reach = self.prefixes.longest(asked, continued=True)
        return [*self._pins.needed(self.prefixes, asked, reach)]

    def _end_turn(self, one: Prefetch, announced: Announcement) -> None:
        """What was fetched is there. Where nothing was, at least what memory has is not evicted first.

        As far as there is room for what is announced; a policy that takes hints knows without it.
        """
        catalog, stage = self._catalog, one.stage
        if stage is not None and stage.taken and self._trace.lifecycle:
            self._trace.put(ResumePrefetched(
                *self._trace.of(announced.request_id, 0), tokens=sum(stage.taken.values()),
                left_ms=round((announced.at_s - catalog.now_s) * 1000, 3), turn=announced.turns,
            ))  # fmt: skip
        room = catalog.room_ahead(self.prefixes.tenant(one.asked))
        if room and not catalog.takes_hints and (stage is None or not stage.leased):
            kept = self._held(one.asked)[:room]
            catalog.refresh(reversed(kept), over=False, hit=False)
            catalog.ahead.keep(kept)

    def warm(self, asked: KnownPrompt, request: Request | None, seconds: float) -> Work:
        """Bring what tiers have of a prompt, then hold it for so long, if that is not 0. Returns a `WarmedPrompt`."""
        self._pins.check(seconds)
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
        if self._due or not self.announced.prompts:
            return bool(self._due)
        return self._has_turn(self._catalog.now_s, idle=True)
