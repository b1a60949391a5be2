"""The oracle of lookups: which tokens must be found, by plain loops over the catalog's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpipe.cache.catalog import KEPT_MARKS_MAX, Chunk
from kvpipe.statemachine import chunk as chunk_m
from kvpipe.statemachine import request as request_m

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.scheduler.side import SchedulerSide


class Found(NamedTuple):
    """How many units of a request's prefix were found, and the chunks that hold any of it."""

    request: Request
    units: int
    chunks: frozenset[Chunk]

    @property
    def stands(self) -> bool:
        """Whether none of them was evicted, and none has so many readers that it may forget where some have ended."""
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


def ends(side: SchedulerSide, request: Request) -> frozenset[tuple[Chunk, bytes]]:
    """Return the chunk of each group that holds where the request has ended, or is about to, and the key of that."""
    found, last = set(), side.geometry.end_units
    for group in _growing(side):
        known = {**side.catalog.pending(group), **side.catalog.index(group)}
        found |= {(known[key], key) for key in [key for key in keys_of(side, request)[-last:] if key in known][-1:]}
    return frozenset(found)


def find(side: SchedulerSide, request: Request, kept: frozenset[tuple[Chunk, bytes]]) -> Found:
    """Look at what is held of the request's tokens, all of which count: whole chunks, and its end as in `kept`.

    What else a chunk is known by, another request may have come as far as, and goes on there.
    """
    keys, per_chunk = keys_of(side, request), side.geometry.units_per_chunk
    indexes = [side.catalog.index(group) for group in range(len(side.geometry.groups))]
    mine = [_state_keys(side, request) if kind.state else keys for kind in side.geometry.groups]
    chunks = frozenset(index[key] for index, known in zip(indexes, mine, strict=True) for key in known if key in index)
    units = held(side, request, len(keys))
    while rest := units % per_chunk:
        last = keys[units - 1 : units - rest + per_chunk]
        growing = [indexes[group] for group in _growing(side)]
        if {(index[key], key) for index in growing for key in last if key in index} <= kept:
            break
        units = held(side, request, units - rest)
    return Found(request, units, chunks)


def _growing(side: SchedulerSide) -> list[int]:
    return [group for group, kind in enumerate(side.geometry.groups) if not kind.state]


def held(side: SchedulerSide, request: Request, most: int) -> int:
    """Return the longest prefix of up to `most` units that every group holds as far as it needs to."""
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
            continue  # nothing is read behind it
        index = side.catalog.index(group)
        for base in range(first // per_chunk * per_chunk, units, per_chunk):
            if not covers(keys, base, min(units, base + per_chunk), per_chunk, index):
                return False
    return True


def covers(keys: Sequence[bytes], base: int, high: int, per_chunk: int, *indexes: Any) -> bool:  # noqa: ANN401
    """Whether a chunk that starts at unit `base` holds the prefix up to `high`: it is known by that, or by more."""
    return any(key in index for key in keys[high - 1 : base + per_chunk] for index in indexes)


def promised(side: SchedulerSide, request: Request, local_tokens: int, *, waits: bool) -> int | None:
    """Return how many tokens a lookup has to promise beyond `local_tokens`, if it has to."""
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
        most -= (
            1  # the last token is computed anew: it is in the state, and reads further back than the window after it
        )
    tokens = held(side, request, most) * unit
    beyond = max(0, min(tokens, request.num_tokens if waits else request.num_tokens - 1) - local_tokens)
    dropped = not side.geometry.ahead_tokens and side.geometry.states_back
    if dropped and side.loading.between_steps and local_tokens and tokens - local_tokens == unit:
        return 0  # the engine dropped it of its own hit, and computes it sooner than it would wait
    return beyond


_LOADS = {request_m.NEW, request_m.PREEMPTED, request_m.LET_DOWN}
