"""The checks of KV cache events: lookups must find exactly the blocks that events announce."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpipe.connectors.vllm.trial.laws import OVER_MAX, invariant
from kvpipe.connectors.vllm.trial.shapes import CONSUMER, PRODUCER
from kvpipe.tiers.base import Key
from kvpipe.tiers.finder import TierLookup
from kvpipe.tiers.first_hash import NAME as FIRST_HASH
from kvpipe.tiers.parts import mark_key, part_keys
from kvpipe.tiers.prefix_keys import NAME_BYTES, PrefixKeys

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.trial.watched import Watched
    from kvpipe.scheduler.fetches import Staging

ASKED_S_MAX = 60.0


def _receive(watched: Watched) -> Iterator[str]:
    """Pass the events that no step has published yet to the router, and yield the problems that the router finds."""
    trial, router = watched.trial, watched.trial.router
    events = trial.kvpipe.scheduler_role.events
    assert router is not None  # noqa: S101
    router.apply(trial.scheduler.kv_cache_manager.take_events())
    router.apply(events.take())
    yield from router.problems
    router.problems.clear()


@invariant(
    2,
    10,
    sentence="An index that a router builds from KV cache events, by hashing their tokens, has exactly the keys "
    "that lookups find.",
)
def events_are_the_catalog(watched: Watched) -> Iterator[str]:
    """Compare a router's index with the catalog's index, for every cache group."""
    trial, router = watched.trial, watched.trial.router
    events = trial.kvpipe.scheduler_role.events
    if router is None or events is None:
        return
    yield from _receive(watched)
    for group in range(len(trial.side.geometry.groups)):
        held = {key[:NAME_BYTES] for key in trial.side.catalog.index(group)}  # an adapter's key is longer
        received = router.index.get(("CPU", group), set())
        if held != received:
            yield f"group {group}: {len(held - received)} blocks are not announced, {len(received - held)} not held"


@invariant(
    4,
    sentence="A lookup finds as many tokens of a prompt as a router counts in announced blocks, less the tokens "
    "ahead on which a drafter's KV depends.",
)
def what_is_announced_is_found(watched: Watched) -> Iterator[str]:
    """Compare lookups of the last requests with announced blocks.

    Only models whose single cache group is full attention are checked.
    """
    trial, side = watched.trial, watched.trial.side
    groups = side.geometry.groups
    whole = len(groups) == 1 and groups[0].window_tokens is None and not groups[0].state
    if trial.router is None or not whole or side.weights.doubtful:
        return
    # hashes that end this close after a block's last token are needed to find the block
    ahead = -(-side.geometry.ahead_tokens // trial.shape.hash_tokens)
    for one in trial.over[-OVER_MAX:]:
        request = watched.request_of(one)
        if request.lora_request is not None:
            continue  # routers do not know an adapter's content, which may have changed
        found = side.prefixes.longest(request) * side.geometry.unit_tokens
        if side.node is not None:
            yield from _receive(watched)  # the lookup above may have found that the holder evicted chunks
        hashes = trial.router.promised(("CPU", 0), request.block_hashes)
        promised = max(0, hashes - ahead) * trial.shape.hash_tokens
        if promised != found:
            yield f"{one.id}: {promised} tokens are announced, {found} are found"


def _parts(staging: Staging, name: tuple[int, bytes]) -> set[str]:
    """Return the names of a chunk's values in a tier."""
    group, chunk = name
    keys = part_keys(staging.space.name, chunk, group, staging.finder.split(group), staging.finder.parts(group))
    return {key.text for key in keys}


@invariant(
    2,
    10,
    sentence="A router expects in each tier exactly the chunks that were announced and not withdrawn, and all ranks "
    "had stored a chunk when it was announced.",
)
def tiers_are_announced_truly(watched: Watched) -> Iterator[str]:
    """Compare a router's index with the table of known chunks, and new entries of the table with the tiers."""
    trial, staging = watched.trial, watched.trial.side.staging
    if trial.router is None or staging is None or staging.tier_blocks is None:
        return
    yield from _receive(watched)
    last = watched.announced
    for tier, known in zip(trial.tiers, staging.tier_blocks.known, strict=True):
        for group in range(len(trial.side.geometry.groups)):
            announced = {one.block.hash for name, one in known.items() if name[0] == group}
            received = trial.router.index.get((f"STORAGE/{tier.name}", group), set())
            if announced != received:
                yield f"{tier.name}, group {group}: {len(announced - received)} lack, {len(received - announced)} stay"
        for name, one in known.items():
            if one.number > last:
                watched.announced = max(watched.announced, one.number)
                if lacking := _parts(staging, name) - tier.values.keys() - {*tier.dropped}:
                    yield f"{tier.name}: a chunk is announced, and {len(lacking)} of its values were never stored"


@invariant(
    4,
    sentence="At rest, after lookups of all announced chunks, each tier has what a router expects in it. If nothing "
    "has failed or was reset, a router expects all that this engine has stored there, and on a node's memory what "
    "either engine has stored.",
    when="drain",
)
def tiers_have_what_is_announced(watched: Watched) -> Iterator[str]:
    """Compare the table of known chunks with the tiers.

    A farther tier is asked only for chunks that nearer tiers lack.
    """
    trial, side = watched.trial, watched.trial.side
    staging = side.staging
    if trial.router is None or staging is None or staging.tier_blocks is None or not staging.space.name:
        return
    if not staging.finder.usable or any(tier.trouble == "down" or tier.is_held for tier in trial.tiers):
        return
    known = staging.tier_blocks.known
    _ask(staging, sorted({name for one in known for name in one}))
    nearer: set[tuple[int, bytes]] = set()
    for tier, announced in zip(trial.tiers, known, strict=True):
        there = {name for name in announced if _parts(staging, name) <= tier.values.keys()}
        if false := announced.keys() - there - nearer:
            yield f"{tier.name}: {len(false)} chunks are announced, and are not there"
        nearer |= there
    mark = mark_key(staging.space.name, [staging.finder.split(group) for group in range(len(side.geometry.groups))])
    failed = side.counters["chunks_not_stored"] + side.counters["chunks_not_fetched"]
    # a reset withdraws chunks that the tier keeps; if the old weights return, the chunks can be found again
    was_reset = bool(side.counters["tier_blocks_withdrawn"] or watched.forgotten)
    if failed or was_reset or trial.shape.room or trial.shape.role in {CONSUMER, PRODUCER}:
        return
    if trial.shape.engines and trial.beside is None:
        return  # this trial cannot read the other engine's table, so only the other trial compares both tables
    beside = trial.beside.side.staging if trial.beside is not None else None
    others = beside.tier_blocks if beside is not None else None
    assert beside is None or others is not None  # noqa: S101
    for at, tier in enumerate(trial.tiers):
        own, other = known[at].keys(), others.known[at].keys() if others is not None else set()
        values = [Key.parse(name) for name in tier.values if name.startswith(staging.space.name)]
        chunks = {(key.group, key.chunk) for key in values} - {(0, FIRST_HASH), (0, mark.chunk)}
        whole = {name for name in chunks if _parts(staging, name) <= tier.values.keys()}
        if (lacking := whole - own - other) or own - whole:
            yield f"{tier.name}: {len(lacking)} chunks are there, and are not announced"


def _ask(staging: Staging, names: list[tuple[int, bytes]]) -> None:
    """Look up the chunks with these names, as lookups of requests do."""
    assert staging.tier_blocks is not None  # noqa: S101
    wanted = tuple((group, end + 1) for end, (group, _) in enumerate(names))
    keys = PrefixKeys([chunk for _, chunk in names], ())
    lookup = TierLookup(keys, wanted, space=staging.space.name, seconds_max=ASKED_S_MAX)
    staging.tier_blocks.watch(lookup)
    staging.finder.look_up(lookup)
    while not lookup.done and time.monotonic() < lookup.deadline_s:
        time.sleep(0.0001)
    staging.tier_blocks.missed(lookup)
