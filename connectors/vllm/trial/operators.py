"""Operators' orders in a trial: pins and evictions of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe.scheduler.prefetch import KnownPrompt

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.trial.trial import Trial
    from kvpipe.scheduler.base import Request
    from kvpipe.scheduler.side import SchedulerSide

PARTS_PER_SLICE = 2
PIN, UNPIN, EVICT = range(3)


def operate(trial: Trial, index: int, what: int, tokens: int) -> None:
    """Order something about a prompt: pin it for `tokens` steps, end a pin, evict it from `tokens` on.

    In a shape with `warms` what tiers have of it is fetched first; then 0 steps are no pin.

    Carried out by the engine's next steps, or here while it has nothing to do.
    """
    side, known = trial.side, [*trial.over, *trial.live.values()]
    pins, orders = side.pins, side.orders
    orders.slice_s_max, orders.slice_parts_max = float("inf"), PARTS_PER_SLICE
    pins.clock = lambda: float(trial.steps)
    if what == UNPIN:
        orders.put(lambda: pins.unpin(min(pins.pins, default=0)))
    elif known:
        oldest = trial.shape.warms and what == PIN  # others are in memory
        one = known[index % len(known)] if oldest else known[-1 - index % len(known)]
        asked = trial.answered(one, one.sequence.prompt, one.output)
        prefixes = side.prefixes
        if oldest:
            orders.put(lambda: side.prefetching.warm(_known(side, asked), asked, tokens))
        elif what == PIN:
            orders.put(lambda: pins.pin(prefixes, asked, tokens + 1))
        else:
            orders.put(lambda: pins.evict(prefixes, asked, tokens))
    carry_out(trial)


def _known(side: SchedulerSide, asked: Request) -> KnownPrompt:
    """Return a request's prompt as an operator gives it."""
    tenant = side.prefixes.tenant(asked)
    return KnownPrompt(side.prefixes.hashes(asked), asked.num_tokens, tenant.salt, tenant.adapter)


def carry_out(trial: Trial) -> None:
    """Carry out what is ordered, as far as it is not the engine's turn."""
    orders = trial.side.orders
    done = True
    while done and orders.due and orders.turns.borrow():
        try:
            done = orders.carry_out()
        finally:
            orders.turns.give_back()
