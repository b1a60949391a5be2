"""The oracle of lookups: it computes which tokens lookups must find, by plain loops over the catalog's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpipe.cache.catalog import KEPT_MARKS_MAX
from kvpipe.cache.chunks import Chunk
from kvpipe.statemachine import chunk as chunk_m
from kvpipe.statemachine import request as request_m

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.scheduler.side import SchedulerSide


class FoundPrefix(NamedTuple):
    """The number of units of a request's prefix that were found, and the chunks that hold these units."""

    request: Request
    units: int
    chunks: frozenset[Chunk]

    @property
    def stands(self) -> bool:
        """Whether lookups must still find these units.

        They must if no chunk was evicted, and no chunk has so many marks that it may have dropped one.
        """
        alive = {chunk_m.READY, chunk_m.GROWING}
        return all(one.state.row in alive and len(one.marks) < KEPT_MARKS_MAX for one in self.chunks)


def keys_of(side: SchedulerSide, request: Request) -> Sequence[bytes]:
    """Return the keys of the first unit of the request's tokens, of the first two units, and so on."""
    step, ahead = side.prefixes._hashes_per_unit, side.prefixes._ahead  # noqa: SLF001
    return side.prefixes.hashes(request)[step - 1 + ahead :: step]


def _state_keys(side: SchedulerSide, request: Request) -> Sequence[bytes]:
    """Return the keys of the states after one unit, after two units, and so on."""
    step = side.prefixes._hashes_per_unit  # noqa: SLF001
    return side.prefixes.hashes(request)[step - 1 :: step]


def ends(side: SchedulerSide, request: Request, saved_units: int) -> frozenset[tuple[Chunk, bytes]]:
    """Return, for each group, the chunk that holds the end of the request, and the key of that end.

    If the last generated tokens are not saved, the end of the first `saved_units` units counts as the request's end.
    """
    found, last, keys = set(), side.geometry.end_units, keys_of(side, request)
    for group in _growing(side):
        known = {**side.catalog.pending(group), **side.catalog.index(group)}
        tails = keys[-last:], keys[max(0, saved_units - last) : saved_units]
        held = [key for tail in reversed(tails) for key in tail if key in known]
        found |= {(known[key], key) for key in held[-1:]}
    return frozenset(found)


def find_chunks(side: SchedulerSide, request: Request, kept: frozenset[tuple[Chunk, bytes]]) -> FoundPrefix:
    """Find the chunks that hold the request's tokens, including the last token.

    Chunks are whole, except for the chunks at the request's end, which `kept` names. Other keys of a chunk are ignored,
    because they belong to other requests that diverge within the chunk.
    """
    keys, per_chunk = keys_of(side, request), side.geometry.units_per_chunk
    indexes = [side.catalog.index(group) for group in range(len(side.geometry.groups))]
    mine = [_state_keys(side, request) if kind.state else keys for kind in side.geometry.groups]
    chunks = frozenset(index[key] for index, known in zip(indexes, mine, strict=True) for key in known if key in index)
    units = held_units(side, request, len(keys))
    while rest := units % per_chunk:
        last = keys[units - 1 : units - rest + per_chunk]
        growing = [indexes[group] for group in _growing(side)]
        if {(index[key], key) for index in growing for key in last if key in index} <= kept:
            break
        units = held_units(side, request, units - rest)
    return FoundPrefix(request, units, chunks)


def _growing(side: SchedulerSide) -> list[int]:
    return [group for group, kind in enumerate(side.geometry.groups) if not kind.state]


def held_units(side: SchedulerSide, request: Request, most: int) -> int:
    """Return the length in units, at most `most`, of the longest prefix whose window every group holds."""
    keys, states = keys_of(side, request), _state_keys(side, request)
    return next((units for units in range(most, 0, -1) if _holds(side, keys, states, units)), 0)


def _holds(side: SchedulerSide, keys: Sequence[bytes], states: Sequence[bytes], units: int) -> bool:
    per_chunk, unit = side.geometry.units_per_chunk, side.geometry.unit_tokens
    for group, kind in enumerate(side.geometry.groups):
        if kind.state:
            if states[units - 1] not in side.catalog.index(group):
                return False
            continue
        window, tokens = kind.window_tokens, units * unit
        first = 0 if window is None else tokens // window * window if kind.local else max(0, tokens - window + 1)
        first //= unit
        if first == units:
            continue  # attention reads no position before `first`
        index = side.catalog.index(group)
        for base in range(first // per_chunk * per_chunk, units, per_chunk):
            if not covers(keys, base, min(units, base + per_chunk), per_chunk, index):
                return False
    return True


def covers(keys: Sequence[bytes], base: int, high: int, per_chunk: int, *indexes: Any) -> bool:  # noqa: ANN401
    """Whether a chunk that starts at unit `base` holds the prefix up to unit `high`.

    The chunk may be known under the key of unit `high` or of a later unit.
    """
    return any(key in index for key in keys[high - 1 : base + per_chunk] for index in indexes)


def promised(
    side: SchedulerSide, request: Request, local_tokens: int, *, waits: bool, limit: int | None = None
) -> int | None:
    """Return how many tokens a lookup must promise beyond `local_tokens`, or None if every answer is right.

    `limit` is the largest number of tokens that the request may load, or None for no limit.
    """
    if not side.switches.loads:
        return 0
    tracked = side.requests.tracked.get(request.request_id)
    off = side.switches.bypass or side.switches.tier_lost or side.weights.doubtful
    if off or tracked is None or tracked.state.row not in _LOADS:
        return None
    if tracked.state.row == request_m.LET_DOWN and side.loading.between_steps:
        return None
    if not side.adapters.certain(request) or (side.loading.between_steps and side.requests.sessions):
        # no asynchronous load may begin
        return None
    unit, keys = side.geometry.unit_tokens, keys_of(side, request)
    most = len(keys)
    if (side.geometry.windows or side.geometry.states) and most * unit >= request.num_tokens:
        # The last token is computed again. A state already contains this token, and the token's attention window begins
        # one position before the next token's window.
        most -= 1
    if limit is not None:
        most = min(most, (local_tokens + limit) // unit)
    tokens = held_units(side, request, most) * unit
    beyond = max(0, min(tokens, request.num_tokens if waits else request.num_tokens - 1) - local_tokens)
    dropped = not side.geometry.ahead_tokens and side.geometry.states_back
    if dropped and side.loading.between_steps and local_tokens and tokens - local_tokens == unit:
        # vLLM dropped this unit from its own hit, and computes the unit sooner than an asynchronous load would end
        return 0
    return beyond


_LOADS = {request_m.NEW, request_m.PREEMPTED, request_m.LET_DOWN}
