"""Fetches prompts from tiers into memory before a request asks for them, one prompt after the other.

A prefetch uses the same lookups, tier orders and machines as the fetches of a waiting request (`fetches.py`). A
prefetch uses only lanes that no waiting request needs, and a share of the pool. A failed prefetch has no effect on
requests, because no request waits for it. Prompts that operators warm are fetched before prompts that clients have
announced (`announced.py`).
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.cache.policy.hints import Action
from kvpipe.features.announced import HASHES_MAX, HASHES_MAX_WITH_REQUESTS, Announcement, Announcements, KnownPrompt
from kvpipe.features.orders import WAITS, OrderRefusedError, Work
from kvpipe.scheduler.events import Subscriber
from kvpipe.scheduler.stages import AHEAD_S_MAX
from kvpipe.trace.events import ResumePrefetched
from kvpipe.trace.log import bounded

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Chunk
    from kvpipe.features.pins import PromptPins
    from kvpipe.protocol.engine import LookupAnswer, Request
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.fetches import Staging
    from kvpipe.scheduler.hooks import Published
    from kvpipe.scheduler.records import Tracked
    from kvpipe.scheduler.stages import AheadStage
    from kvpipe.scheduler.switches import Switches
    from kvpipe.scheduler.weights import Weights

PREFETCHES_MAX: Final = 8
"""The number of prefetches that may be running or waiting."""
IDLE_S_MAX: Final = 2.0
"""The longest time in which an engine without other work makes steps for announced prompts, in seconds.

The limit exists because the engine may be about to end or to pause. In this case vLLM waits until no work is pending,
and kills processes after 5 seconds.
"""
_NEVER: Final = float("inf")


class Prefetch:
    """The prefetch of one prompt.

    `stage` is the prefetch's stage, or None until the prefetch begins. `over` says that the prefetch has ended.
    """

    def __init__(self, asked: KnownPrompt, request: Request | None, announced: Announcement | None = None) -> None:
        """Create a prefetch that waits for its turn. `request` is explained in `WantedPrompt`.

        `announced` is the announcement, if a hint has made one.
        """
        self.asked, self.request, self.announced = asked, request, announced
        self.stage: AheadStage | None = None
        self.over = False
        # The stage's deadline includes the wait for the turn, because the engine makes steps during this wait, too.
        self.until_s = time.monotonic() + AHEAD_S_MAX


class WarmedPrompt(NamedTuple):
    """The result of warming a prompt. `pin` is the number of the prompt's pin, or 0 if the prompt was not pinned."""

    tokens: int
    fetched_tokens: int
    pin: int
    left_s: float


class Prefetching(Subscriber):
    """The prefetches of one engine."""

    def __init__(
        self, context: Context, *, hash_tokens: int, staging: Staging | None, switches: Switches, weights: Weights,
        pins: PromptPins, published: Published | None,
    ) -> None:  # fmt: skip
        """Start without prefetches. `hash_tokens` is the number of tokens per block hash.

        `staging` is None if the engine has no tiers. `published` notifies routers, and is None without routers.
        """
        catalog, geometry = context.catalog, context.geometry
        self._context, self._staging, self._hash_tokens, self._routed = context, staging, hash_tokens, published
        hashes_max = HASHES_MAX if published is None else HASHES_MAX_WITH_REQUESTS
        self.announced = Announcements(catalog.counters, hashes_max=hashes_max, account=catalog.account_of)
        self.prefixes = type(context.prefixes)(
            catalog, geometry, hash_tokens, lambda asked: asked.block_hashes,
            lambda asked: catalog.tenants.named(asked.cache_salt or "", getattr(asked, "adapter", None)),
        )  # fmt: skip
        """Searches the prefixes of announced prompts, whose block hashes are whole keys."""
        self._switches, self._weights, self._pins = switches, weights, pins
        self._due: deque[Prefetch] = deque()  # the first prefetch is running
        self.idle_s_max = IDLE_S_MAX
        self._stops_s = _NEVER  # the time at which an engine without other work stops prefetching

    def queue(self, asked: KnownPrompt, request: Request | None = None) -> Prefetch:
        """Queue a prefetch of a prompt's chunks in tiers.

        Raises `OrderRefusedError` if a prefetch is impossible now.
        """
        if why := self._why_not():
            raise OrderRefusedError(why)
        if len(self._due) >= PREFETCHES_MAX:
            raise OrderRefusedError(f"{PREFETCHES_MAX} prompts are being fetched, or wait to be fetched, already")
        self._due.append(Prefetch(asked, request))
        return self._due[-1]

    def _why_not(self) -> str:
        """Return why tiers cannot serve requests now, or "" if tiers can."""
        if self._staging is None:
            return "this engine has no tiers: there is nothing to fetch from"
        if self._switches.bypass or not self._switches.loads or self._switches.tier_lost:
            return "this engine loads nothing now"
        return "the ranks are checking whether the weights have changed" if self._weights.doubtful else ""

    def finished(self, tracked: Tracked, chunks: dict[Chunk, None]) -> None:  # noqa: ARG002  (as of the event)
        """If the client has announced a request that begins with all of this request, record the announcement."""
        pause_s = next((wish.in_s for wish in tracked.wishes if wish.action is Action.RESUME), None)
        if pause_s is None or self._staging is None:
            return
        request, prefixes = tracked.request, self._context.prefixes
        keys = prefixes.hashes(request)
        # `key` is the last hash of the prompt, because a later prompt may contain only a part of the answer.
        place = min(len(keys), request.num_prompt_tokens // self._hash_tokens) - 1
        kept = self._routed.kept(request) if self._routed is not None else None
        if place < 0 or (self._routed is not None and kept is None):
            return
        tenant = prefixes.tenant(request)
        asked = KnownPrompt(keys, request.num_tokens, tenant.salt, tenant.adapter)
        now_s = self._context.catalog.now_s
        self.announced.add(Announcement(asked, bounded(request.request_id), kept, place, now_s, pause_s, tenant))

    def looked_up(self, tracked: Tracked, answer: LookupAnswer) -> None:  # noqa: ARG002  (as of the event)
        """End the prefetches for a request that has arrived, because the request's own stage fetches from now on."""
        if not self.announced.prompts:
            return
        came = self.announced.came(self._context.prefixes.hashes(tracked.request))
        for one in self._due if came else ():
            if one.announced in came:
                one.until_s = 0.0

    def reset(self) -> None:
        """Forget the announced prompts, because their chunks cannot be found after a reset."""
        self.announced.clear()

    def _take_turn(self, *, idle: bool) -> None:
        """If it is the turn of an announced prompt, queue a prefetch of this prompt."""
        now_s = self._context.catalog.now_s
        if self._has_turn(now_s, idle=idle):
            one = self.announced.take(now_s, idle=idle)
            if one is not None:
                self._due.append(Prefetch(one.asked, one.request, one))

    def _has_turn(self, now_s: float, *, idle: bool) -> bool:
        """Whether the prefetch of an announced prompt may begin now."""
        announced = self.announced.has_turn(now_s, idle=idle)
        return announced and not self._why_not() and time.monotonic() < self._stops_s

    def plan_step(self, *, idle: bool) -> None:
        """Continue the first prefetch, before the step's orders are planned. Never raises.

        `idle` says that the step computes nothing.
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
            except Exception as error:  # noqa: BLE001  (the rest of the step's plan is made)
                self._context.counters.fault("fetch_not_planned", error=repr(error))
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
                self._context.catalog.ahead.count_anew(self._held(one.asked))
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
        """Return the chunks of a prompt that memory holds, in the order of its prefix."""
        reach = self.prefixes.longest(asked, continued=True)
        return [*self._pins.needed(self.prefixes, asked, reach)]

    def _end_turn(self, one: Prefetch, announced: Announcement) -> None:
        """End the turn of an announced prompt, and record its fetch.

        If no chunk was fetched, refresh the prompt's chunks in memory, so that they are evicted later. The number of
        refreshed chunks is limited to the number that announced resumes may hold. If the policy takes hints, no refresh
        is needed.
        """
        catalog, stage = self._context.catalog, one.stage
        if stage is not None and stage.taken and self._context.trace.lifecycle:
            self._context.trace.put(ResumePrefetched(
                *self._context.trace.of(announced.request_id, 0), tokens=sum(stage.taken.values()),
                left_ms=round((announced.at_s - catalog.now_s) * 1000, 3), turn=announced.turns,
            ))  # fmt: skip
        room = catalog.room_ahead(self.prefixes.tenant(one.asked))
        if room and not catalog.takes_hints and (stage is None or not stage.leased):
            kept = self._held(one.asked)[:room]
            catalog.refresh(reversed(kept), over=False, hit=False)
            catalog.ahead.keep(kept)

    def warm(self, asked: KnownPrompt, request: Request | None, seconds: float) -> Work:
        """Fetch a prompt's chunks from tiers. If `seconds` is not 0, pin the chunks for this number of seconds.

        Returns a `WarmedPrompt`.
        """
        self._pins.check(seconds)
        one = self.queue(asked, request)
        while not one.over:
            yield WAITS
        tokens = self.prefixes.longest(asked, continued=True) * self._context.geometry.unit_tokens
        fetched = sum(one.stage.taken.values()) if one.stage is not None else 0
        if not seconds:
            return WarmedPrompt(tokens, fetched, 0, 0.0)
        pin = yield from self._pins.pin(self.prefixes, asked, seconds)
        return WarmedPrompt(pin.tokens, fetched, pin.pin, pin.left_s)

    def has_work(self) -> bool:
        """Whether a prefetch waits for steps. While the result is True, an engine without other work makes steps."""
        if self._due or not self.announced.prompts:
            return bool(self._due)
        return self._has_turn(self._context.catalog.now_s, idle=True)
