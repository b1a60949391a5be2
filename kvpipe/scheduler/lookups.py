"""Answers lookups: how many tokens of a request can be loaded, and whether by a sync or an async load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpipe.protocol.engine import LATER, MISS, Hit, LookupAnswer
from kvpipe.scheduler.records import NO_TIERS, Tracked
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import request as m
from kvpipe.trace import miss_reasons

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Recovery, Request
    from kvpipe.scheduler.adapters import Adapters
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.fetches import Staging
    from kvpipe.scheduler.loads import Loading
    from kvpipe.scheduler.requests import Requests
    from kvpipe.scheduler.switches import Switches
    from kvpipe.scheduler.weights import Weights

LATER_STEPS_MAX: Final = 100
"""The number of steps for which the lookup of a request may be postponed after the last admission.

After these steps the lookup returns a miss.
"""
FIRST_STEPS_MAX: Final = 100
"""The number of an engine's first steps in which lookups are postponed until the ranks have reported their weights."""


class Lookups:
    """Answers the lookups of one engine. A lookup takes no lease."""

    def __init__(
        self,
        context: Context,
        *,
        requests: Requests,
        loading: Loading,
        staging: Staging | None,
        switches: Switches,
        weights: Weights,
        adapters: Adapters,
        recovery: Recovery,
    ) -> None:
        """Keep the parts that an answer depends on. `staging` is None without tiers."""
        self._unit, self._prefixes, self._counters = context.geometry.unit_tokens, context.prefixes, context.counters
        self._requests, self._loading, self._recovery = requests, loading, recovery
        self._staging, self._switches, self._weights, self._adapters = staging, switches, weights, adapters
        self._shares = staging is not None or context.catalog.shared is not None

    def answer(self, request: Request, local_tokens: int, step: int, *, elsewhere: bool = False) -> LookupAnswer:
        """Return a `Hit` with the number of tokens to load beyond the engine's own `local_tokens`, or `LATER`.

        `step` is the number of the step that is planned next. `elsewhere` is explained in `SchedulerSide.lookup`.
        """
        answer = self._answer(request, local_tokens, step, elsewhere=elsewhere)
        if answer is LATER and elsewhere:
            asking = self._requests.tracked[request.request_id].asking
            asking.reply(step, local_tokens, asking.missed, asking.why)
            return MISS
        return answer

    def _answer(self, request: Request, local_tokens: int, step: int, *, elsewhere: bool) -> LookupAnswer:
        tracked = self._requests.add(request)
        if request.num_preemptions != tracked.preemptions:
            self._requests.notice_preemption(tracked)
        tracked.fire(m.ASK)
        why = self._why_not(tracked)
        unknown = self._unknown(tracked, local_tokens, why, step)
        if unknown is not None and not request.skip_reading_prefix_cache:  # requests that skip the cache never wait
            return unknown
        if why:
            tracked.asking.reply(step, local_tokens, request.num_tokens - local_tokens, why)
            return MISS
        staging = self._staging
        if staging is not None and not elsewhere and self._adapters.known(request):
            local = local_tokens // self._unit
            tracked.stage, waits = staging.ask(
                tracked.stage, request, local, step, precedence=tracked.precedence, limits=tracked.limits
            )
            if waits:
                return _later(tracked, local_tokens, miss_reasons.TIER_ASKED, step)
        units, waits, withheld = self._held(tracked, local_tokens, elsewhere=elsewhere)
        tokens = units * self._unit
        # the last token does not count as missed if it is held, although it is computed
        missed = max(0, request.num_tokens - max(local_tokens, tokens))
        if not waits:
            # The step must compute at least one token. After an async load the engine itself ensures this.
            tokens = min(tokens, request.num_tokens - 1)
        external = max(0, tokens - local_tokens)
        why = self._prefixes.why_short(request, max(units, local_tokens // self._unit)) if missed else ""
        staged = NO_TIERS
        if staging is not None:
            why, staged = staging.why(tracked.stage, why), staging.brought(tracked.stage, external)
        why = withheld or why
        if not external:
            tracked.asking.reply(step, local_tokens, missed, why, 0, units, waits=waits, staged=staged)
            self._counters["lookup_miss"] += 1
            return MISS
        waiting = self._requests.waiting
        if waits and waiting and not self._recovery.may_wait(request, waiting | self._requests.sessions):
            return self._ask_later(tracked, local_tokens, miss_reasons.NO_ROOM, step)
        tracked.asking.reply(step, local_tokens, missed, why, external, units, waits=waits, staged=staged)
        self._counters["lookup_hit"] += 1
        return Hit(external, waits)

    def _held(self, tracked: Tracked, local_tokens: int, *, elsewhere: bool) -> tuple[int, bool, str]:
        """Return (units of the prefix to load, whether the load is async, why other held units are not loaded)."""
        units_max = tracked.limits.load_units_max(local_tokens, self._unit)
        units = self._prefixes.longest(tracked.request, units_max=units_max)
        beyond = units * self._unit - local_tokens
        if elsewhere and beyond > 0 and tracked.request.num_tokens - units * self._unit > self._unit:
            return local_tokens // self._unit, False, miss_reasons.ELSEWHERE
        waits = tracked.state.row != m.LET_DOWN and self._loading.waits(beyond)
        why = self._cannot_wait(tracked.request) if waits else ""
        if self._loading.between_steps:
            if why:
                return 0, False, why if beyond > 0 else ""
            if self._loading.drops(beyond, local_tokens):
                return local_tokens // self._unit, False, miss_reasons.BELOW_MINIMUM
        limited = units_max is not None and self._is_limited(tracked.request, units, units_max)
        return units, waits and not why, miss_reasons.LIMIT if limited else ""

    def _is_limited(self, request: Request, units: int, units_max: int) -> bool:
        """Whether the limit `units_max` is the reason why a hit of `units` units does not cover the whole request."""
        if units >= self._prefixes.final_units(request, request.num_tokens):
            return False
        return units >= units_max or self._prefixes.longest(request) > units

    def _cannot_wait(self, request: Request) -> str:
        """Return why no asynchronous load of the request can begin: a miss reason, or ""."""
        if not self._adapters.certain(request):  # the load could land before the ranks hold another adapter
            return miss_reasons.ADAPTER
        sessions = self._requests.sessions  # sessions may keep their blocks
        return miss_reasons.NO_ROOM if sessions and not self._recovery.may_wait(request, sessions) else ""

    def raised(self, request: Request, local_tokens: int, step: int) -> None:
        """Record a miss, because `answer` has raised and the engine continues as after a miss."""
        tracked = self._requests.tracked.get(request.request_id)
        if tracked is None:
            try:
                tracked = self._requests.add(request)
            except Exception:  # noqa: BLE001  (the error that the answer has raised is reported)
                return
        if tracked.state.row not in {m.ALLOCATED, m.LOADING}:  # requests in these states hold blocks
            tracked.asking.reply(step, local_tokens, request.num_tokens - local_tokens, "")

    def _why_not(self, tracked: Tracked) -> str:
        """Return why nothing is loaded for this request even if chunks are held: a miss reason, or ""."""
        switches = self._switches
        if switches.bypass:
            return miss_reasons.BYPASS
        if tracked.request.skip_reading_prefix_cache:  # the engine would not use a hit of this request
            return miss_reasons.NOT_READ
        if not switches.loads:
            return miss_reasons.NO_CONSUMER
        if switches.tier_lost:
            return miss_reasons.TIER_DOWN
        row, between = tracked.state.row, self._loading.between_steps
        return miss_reasons.LOAD_FAILED if row == m.RECOMPUTING or (row == m.LET_DOWN and between) else ""

    def _unknown(self, tracked: Tracked, local_tokens: int, why: str, step: int) -> LookupAnswer | None:
        """Return the answer if weights or adapter are not known yet, or if a session has no room.

        Otherwise return None.
        """
        # the engine's own prefix cache may have KV of old weights, too
        if self._weights.doubtful and why != miss_reasons.LOAD_FAILED:
            if not self._weights.awaited or step < FIRST_STEPS_MAX:
                return self._ask_later(tracked, local_tokens, miss_reasons.WEIGHTS, step)
            tracked.asking.reply(step, local_tokens, tracked.request.num_tokens - local_tokens, miss_reasons.WEIGHTS)
            return MISS
        request = tracked.request
        if request.lora_request is not None:
            worth = self._shares and not self._switches.bypass
            if self._adapters.waits(request, step, worth=worth):
                return _later(tracked, local_tokens, miss_reasons.ADAPTER, step)
        if request.resumable:
            # The lookup is postponed without a limit of steps, because the session holds no blocks yet. While a session
            # exists, a load begins only if both the load and the session have room.A session whose own load has failed
            # is in `waiting`: other requests wait for it, and it waits for no other request.
            waiting = self._requests.waiting
            beside = waiting | self._requests.sessions if waiting and request.request_id not in waiting else None
            if beside is not None and not self._recovery.may_wait(request, beside):
                return _later(tracked, local_tokens, miss_reasons.NO_ROOM, step)
        return None

    def _ask_later(self, tracked: Tracked, local_tokens: int, why: str, step: int) -> LookupAnswer:
        """Postpone the lookup for the reason `why`. After `LATER_STEPS_MAX` steps, return a miss."""
        asking, missed = tracked.asking, tracked.request.num_tokens - local_tokens
        again = asking.state.row == lookup_m.LATER and asking.asked_step == step
        asking.put_off_steps += not again  # counts steps: the engine may repeat or skip lookups
        if asking.put_off_steps <= LATER_STEPS_MAX:
            self._counters["lookup_later"] += 1
            return _later(tracked, local_tokens, why, step)
        self._counters["lookup_gave_up"] += 1
        # a miss, even if chunks are held now: they may be evicted before the request is computed
        asking.reply(step, local_tokens, missed, why)
        return MISS


def _later(tracked: Tracked, local_tokens: int, why: str, step: int) -> LookupAnswer:
    """Record that the lookup is postponed for the reason `why`, and return `LATER`."""
    missed = tracked.request.num_tokens - local_tokens
    tracked.asking.put_off(step, local_tokens, missed, why)
    return LATER
