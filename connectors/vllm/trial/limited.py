"""The check that no request loads, saves or fetches more than its limits allow."""

from __future__ import annotations

from collections.abc import Iterator

from kvpipe.connectors.vllm.trial.laws import invariant
from kvpipe.connectors.vllm.trial.watched import Watched
from kvpipe.scheduler.stages import TierFetch


@invariant(4, sentence="No request loads, saves or fetches more than its limits allow.", when="schedule")
def limits_are_kept(watched: Watched) -> Iterator[str]:
    """Compare answers of lookups, pieces of saves, and tiers of fetches with the limits of the request."""
    over, watched.over = watched.over, []
    yield from over
    yield from _saved_too_much(watched)
    yield from _asked_wrong_tiers(watched)


def _saved_too_much(watched: Watched) -> Iterator[str]:
    side, trial = watched.trial.side, watched.trial
    planned = {job.id for job in watched.saves()}
    for job in side.jobs.in_flight.values():
        limit = trial.allowed(job.job.request).save_tokens
        if limit is None or job.job.id not in planned:
            continue
        for piece in job.pieces:
            ahead = 0 if piece.chunk.group in side.geometry.states else side.prefixes.ahead_tokens
            tokens = trial.prefixes[piece.key][1] - ahead if piece.key in trial.prefixes else 0
            if tokens > limit:
                yield f"{job.job.request} saves its first {tokens} tokens, {limit} are allowed"


def _asked_wrong_tiers(watched: Watched) -> Iterator[str]:
    staging = watched.trial.side.staging
    for order in watched.orders():
        transfer = staging._transfers.get(order.id) if staging is not None else None  # noqa: SLF001
        if isinstance(transfer, TierFetch) and transfer.stages and not transfer.stages[0].ahead:
            first = transfer.stages[0].asked.request_id  # other requests may wait for the same fetch
            tiers = watched.trial.allowed(first).tiers
            if tiers is not None and order.tier not in tiers:
                yield f"{first} fetches from tier {order.tier}, {sorted(tiers)} are allowed"
