"""The laws of KV cache events: what they announce is what lookups find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpipe.connectors.vllm.trial.laws import OVER_MAX, invariant
from kvpipe.tiers.finder import NAME_BYTES

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.trial.watched import Watched


@invariant(
    2,
    10,
    sentence="An index made of KV cache events and of their contents' hashes has exactly the keys that lookups find.",
)
def events_are_the_catalog(watched: Watched) -> Iterator[str]:
    """A router's index against the catalog's of every group."""
    trial, router = watched.trial, watched.trial.router
    events = trial.kvpipe.events
    if router is None or events is None:
        return
    router.apply(trial.scheduler.kv_cache_manager.take_events())  # what no step was there to publish
    router.apply(events.take())
    yield from router.problems
    router.problems.clear()
    for group in range(len(trial.side.geometry.groups)):
        held = {key[:NAME_BYTES] for key in trial.side.catalog.index(group)}  # an adapter's key is longer
        received = router.index.get(("CPU", group), set())
        if held != received:
            yield f"group {group}: {len(held - received)} blocks are not announced, {len(received - held)} not held"


@invariant(4, sentence="A prompt finds as many tokens as a router counts in the blocks that KV cache events announce.")
def what_is_announced_is_found(watched: Watched) -> Iterator[str]:
    """Lookups of the last requests' prompts and answers, of a model with full attention alone."""
    trial, side = watched.trial, watched.trial.side
    groups = side.geometry.groups
    whole = len(groups) == 1 and groups[0].window_tokens is None and not groups[0].state
    if trial.router is None or not whole or side.weights.doubtful:
        return
    for one in trial.over[-OVER_MAX:]:
        request = watched.request_of(one)
        if request.lora_request is not None:
            continue  # a router knows nothing of an adapter's content, which may have changed
        promised = trial.router.promised(("CPU", 0), request.block_hashes) * trial.shape.hash_tokens
        found = side.prefixes.longest(request) * side.geometry.unit_tokens
        if promised != found:
            yield f"{one.id}: {promised} tokens are announced, {found} are found"
