"""Answers lookups: how many tokens of a request can be loaded, and whether by a sync or an async load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpipe.cache import miss_reasons
from kvpipe.scheduler.base import LATER, MISS, Answer, Hit
from kvpipe.scheduler.records import NO_TIERS, Tracked
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import request as m

if TYPE_CHECKING:
    from kvpipe.cache.prefixes import Prefixes
    from kvpipe.scheduler.adapters import Adapters
    from kvpipe.scheduler.answers import Answers
    from kvpipe.scheduler.base import Recovery, Request
    from kvpipe.scheduler.fetches import Staging
    from kvpipe.scheduler.loads import Loading
    from kvpipe.scheduler.requests import Requests
    from kvpipe.scheduler.switches import Switches
    from kvpipe.scheduler.weights import Weights
    from kvpipe.trace.log import Counters

LATER_STEPS_MAX: Final = 100
"""In how many steps a request's lookup is put off at most, since its last admission, before the hit is given up."""
FIRST_STEPS_MAX: Final = 100
"""In how many of an engine's first steps the ranks' first reports are waited for."""


class Lookups:
    """One per scheduler side. A lookup takes no lease."""

    def __init__(
        self,
        unit_tokens: int,
        prefixes: Prefixes,
        *,
        requests: Requests,
        loading: Loading,
        staging: Staging | None,
        switches: Switches,
        weights: Weights,
        adapters: Adapters,
        answers: Answers,
        recovery: Recovery,
        counters: Counters,
    ) -> None:
        """`unit_tokens`: tokens per unit of a prefix. `staging`: None without tiers."""
        self._unit, self._prefixes, self._requests, self._loading = unit_tokens, prefixes, requests, loading
        self._staging, self._switches, self._weights, self._adapters = staging, switches, weights, adapters
        self._answers, self._recovery, self._counters = answers, recovery, counters

    def answer(self, request: Request, local_tokens: int, step: int, *, elsewhere: bool = False) -> Answer:
        """Return a `Hit` with the tokens that can be loaded beyond the engine's own `local_tokens`, or `LATER`.

        `step`: the number of the step that is planned next. `elsewhere`: see `SchedulerSide.lookup`.
        """
        answer = self._answer(request, local_tokens, step, elsewhere=elsewhere)
        if answer is LATER and elsewhere:
            asking = self._requests.tracked[request.request_id].asking
            asking.reply(step, local_tokens, asking.missed, asking.why)
            return MISS
        return answer

    def _answer(self, request: Request, local_tokens: int, step: int, *, elsewhere: bool) -> Answer:
        tracked = self._requests.add(request)
        if request.num_preemptions != tracked.preemptions:
            self._requests.notice_preemption(tracked)
        tracked.fire(m.ASK)
        why = self._why_not(tracked)
        unknown = self._unknown(tracked, local_tokens, why, step)
        if unknown is not None and not request.skip_reading_prefix_cache:  # else the engine admits it all the same
            return unknown
        if why:
            tracked.asking.reply(step, local_tokens, request.num_tokens - local_tokens, why)
            return MISS
        staging = self._staging
        if staging is not None and not elsewhere and self._adapters.known(request):
            tracked.stage, waits = staging.ask(
                tracked.stage, request, local_tokens // self._unit, step, turn=tracked.turn
            )
            if waits:
                return _later(tracked, local_tokens, miss_reasons.TIER_ASKED, step)
        units, waits, withheld = self._held(tracked, local_tokens, elsewhere=elsewhere)
        tokens = units * self._unit
        missed = max(0, request.num_tokens - max(local_tokens, tokens))  # the last token, if held, is none
        if not waits:
            # the step must compute at least one token; after an async load the engine sees to that itself
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
        """Return (units of the prefix that can be loaded, whether asynchronously, why held units cannot be)."""
        units = self._prefixes.longest(tracked.request)
        if tracked.answer is not None:
            self._answers.looked_up(tracked, max(units, local_tokens // self._unit))
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
        return units, waits and not why, ""

    def _cannot_wait(self, request: Request) -> str:
        """Return why no asynchronous load of the request can begin: a miss reason, or ""."""
        if not self._adapters.certain(request):  # it could land before the ranks hold another adapter
            return miss_reasons.ADAPTER
        sessions = self._requests.sessions  # their blocks may stay theirs
        return miss_reasons.NO_ROOM if sessions and not self._recovery.may_wait(request, sessions) else ""

    def raised(self, request: Request, local_tokens: int, step: int) -> None:
        """`answer` has raised: the engine goes on as after a miss, so record a miss."""
        tracked = self._requests.tracked.get(request.request_id)
        if tracked is None:
            try:
                tracked = self._requests.add(request)
            except Exception:  # noqa: BLE001  (what the answer has raised is reported)
                return
        if tracked.state.row not in {m.ALLOCATED, m.LOADING}:  # those hold blocks, and are not admitted
            tracked.asking.reply(step, local_tokens, request.num_tokens - local_tokens, "")

    def _why_not(self, tracked: Tracked) -> str:
        """Return why nothing is loaded for this request, whatever is held: a miss reason, or ""."""
        switches = self._switches
        if switches.bypass:
            return miss_reasons.BYPASS
        if tracked.request.skip_reading_prefix_cache:  # it would take no hit
            return miss_reasons.NOT_READ
        if not switches.loads:
            return miss_reasons.NO_CONSUMER
        if switches.tier_lost:
            return miss_reasons.TIER_DOWN
        row, between = tracked.state.row, self._loading.between_steps
        return miss_reasons.LOAD_FAILED if row == m.RECOMPUTING or (row == m.LET_DOWN and between) else ""

    def _unknown(self, tracked: Tracked, local_tokens: int, why: str, step: int) -> Answer | None:
        """Return the answer if weights or adapter are not known yet, or a session has no room; else None."""
        if self._weights.doubtful and why != miss_reasons.LOAD_FAILED:  # the engine's own cache may be out of date, too
            if not self._weights.awaited or step < FIRST_STEPS_MAX:
                return self._ask_later(tracked, local_tokens, miss_reasons.WEIGHTS, step)
            tracked.asking.reply(step, local_tokens, tracked.request.num_tokens - local_tokens, miss_reasons.WEIGHTS)
            return MISS
        request = tracked.request
        if request.lora_request is not None:
            worth = self._staging is not None and not self._switches.bypass
            if self._adapters.waits(request, step, worth=worth):
                return _later(tracked, local_tokens, miss_reasons.ADAPTER, step)
        if request.resumable:
            # without a limit: it holds no blocks, and as long as it lives only such loads begin as it has room beside;
            # one whose own load has failed is waited for, and waits for nobody
            waiting = self._requests.waiting
            beside = waiting | self._requests.sessions if waiting and request.request_id not in waiting else None
            if beside is not None and not self._recovery.may_wait(request, beside):
                return _later(tracked, local_tokens, miss_reasons.NO_ROOM, step)
        return None

    def _ask_later(self, tracked: Tracked, local_tokens: int, why: str, step: int) -> Answer:
        """Put the lookup off for the reason `why`; after `LATER_STEPS_MAX` steps return a miss."""
        asking, missed = tracked.asking, tracked.request.num_tokens - local_tokens
        again = asking.state.row == lookup_m.LATER and asking.asked_step == step
        asking.put_off_steps += not again  # the engine may ask twice in one pass, and not at all for hundreds
        if asking.put_off_steps <= LATER_STEPS_MAX:
            self._counters["lookup_later"] += 1
            return _later(tracked, local_tokens, why, step)
        self._counters["lookup_gave_up"] += 1
        asking.reply(step, local_tokens, missed, why)  # what is held may be evicted until it is computed
        return MISS


def _later(tracked: Tracked, local_tokens: int, why: str, step: int) -> Answer:
    """Record that the lookup is put off, for the reason `why`, and return `LATER`."""
    missed = tracked.request.num_tokens - local_tokens
    tracked.asking.put_off(step, local_tokens, missed, why)
    return LATER
