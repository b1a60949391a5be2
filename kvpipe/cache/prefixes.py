"""Finds how much of a request's token prefix the catalog holds, by block hashes. This module only reads the catalog."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress, takewhile
from typing import TYPE_CHECKING

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk
from kvpipe.cache.policy.large import Shards
from kvpipe.protocol.geometry import Geometry
from kvpipe.trace import miss_reasons

if TYPE_CHECKING:
    from kvpipe.cache.tenants import Tenant
    from kvpipe.protocol.engine import Request, SpansOf, WholeSpan

KeyIndex = Mapping[bytes, object]
"""The keys of one cache group whose chunks count as held."""


def uncut(spans: Sequence[WholeSpan], tokens: int) -> int:
    """Return the length of the longest prefix, of at most `tokens` tokens, that does not end inside one of `spans`."""
    for first, stop in spans:
        if first < tokens < stop:
            return first
    return tokens


class Prefixes:
    """Searches prefixes, in units (`kvpipe.protocol.geometry`).

    All `hashes` have one entry per `hash_tokens` tokens.
    """

    def __init__(
        self, catalog: Catalog, geometry: Geometry, hash_tokens: int, hashes: Callable[[Request], Sequence[bytes]],
        tenant: Callable[[Request], Tenant] | None = None, spans_of: SpansOf | None = None,
    ) -> None:  # fmt: skip
        """Search in `catalog`. `hash_tokens` is the number of tokens per block hash.

        `hashes(request)` returns the hashes under which the request's blocks are kept. `tenant(request)` returns the
        owner of the request's chunks. The default owner is the tenant of the request's salt and adapter, without the
        adapter's digest. `spans_of(request)` returns the spans inside which no prefix may end. If the engine has no
        spans, `spans_of` is None.
        """
        self._spans_of = spans_of
        self._catalog, self.hashes, self.tenant = catalog, hashes, tenant or catalog.tenants.of
        self._ahead = -(-geometry.ahead_tokens // hash_tokens)
        self.ahead_tokens = self._ahead * hash_tokens
        """The number of tokens after a prefix on which the prefix's KV and key depend."""
        self._unit, self._per_chunk = geometry.unit_tokens, geometry.units_per_chunk
        self._hashes_per_unit = self._unit // hash_tokens
        self._groups = range(len(geometry.groups))
        self._states = geometry.states
        growing = [group for group in self._groups if group not in geometry.states]
        kinds: list[tuple[Collection[int], int, int]] = [(self._states, 1, 0), (growing, self._per_chunk, self._ahead)]
        self._kinds = [(groups, units * self._hashes_per_unit, ahead) for groups, units, ahead in kinds if groups]
        """(groups, hashes per key, `ahead`).

        The key of some units is the hash that is `ahead` hashes after the last hash of these units.
        """
        self._full = [i for i, g in enumerate(geometry.groups) if g.window_tokens is None and not g.state]
        self._windows = [
            (i, (g.window_tokens if g.local else g.window_tokens + self._unit - 2) // self._unit, g.local)
            for i, g in enumerate(geometry.groups)
            if g.window_tokens
        ]
        self._partial = bool(self._windows or self._states)
        """Whether some group needs less than the whole prefix."""

    def key(self, hashes: Sequence[bytes], units: int) -> bytes:
        """Return the key of the first `units` units.

        The key also depends on the next `ahead_tokens` tokens, because the KV of these units depends on them.
        """
        return hashes[units * self._hashes_per_unit - 1 + self._ahead]

    def state_key(self, hashes: Sequence[bytes], units: int) -> bytes:
        """Return the key of the state after the first `units` units. A state depends on no token ahead."""
        return hashes[units * self._hashes_per_unit - 1]

    def units_within(self, tokens: int) -> int:
        """Return how many units of a prefix of `tokens` tokens have a key."""
        return max(0, tokens - self.ahead_tokens) // self._unit

    def computed_tokens(self, request: Request, units: int) -> int:
        """Return how many tokens of `request` must be computed before its first `units` units can be saved."""
        if not self._ahead:
            return units * self._unit
        hashed = self.final_units(request, request.num_tokens) >= units
        return units * self._unit + (0 if hashed else self.ahead_tokens)

    def final_units(self, request: Request, tokens: int) -> int:
        """Return how many units of the first `tokens` tokens have final tokens and a key."""
        return self.hashed_units(self.hashes(request), min(tokens, request.num_tokens))

    def hashed_units(self, hashes: Sequence[bytes], tokens: int) -> int:
        """Return how many units of the first `tokens` tokens have a key, for a request with these `hashes`."""
        units, hashed = tokens // self._unit, (len(hashes) - self._ahead) // self._hashes_per_unit
        return units if units <= hashed else max(0, hashed)

    def state_units(self, request: Request, tokens: int) -> int:
        """Return the last boundary in the first `tokens` tokens, in units, whose state is final and has a key."""
        return min(min(tokens, request.num_tokens) // self._unit, len(self.hashes(request)) // self._hashes_per_unit)

    def unit_keys(self, request: Request) -> Sequence[bytes]:
        """Return the keys of the first unit, of the first two units and so on, up to all final units."""
        return self._keys(self.hashes(request), 1, self.final_units(request, request.num_tokens))

    def state_keys(self, request: Request) -> Sequence[bytes]:
        """Return the keys of the states after the first unit, after the first two units and so on."""
        return self.hashes(request)[self._hashes_per_unit - 1 :: self._hashes_per_unit]

    def longest(
        self,
        request: Request,
        extra: Sequence[dict[bytes, object]] = (),
        *,
        continued: bool = False,
        units_max: int | None = None,
    ) -> int:
        """Return the longest prefix, in units, for which every cache group holds all needed chunks.

        `extra` has, per group, more keys that count as held. With `continued`, the result is the hit of a longer
        request that begins with all tokens of this request. The result is at most `units_max`, or has no limit if
        `units_max` is None.
        """
        indexes: list[KeyIndex] = list(map(self._catalog.index, self._groups))
        if extra:
            indexes = [ChainMap(index, more) for index, more in zip(indexes, extra, strict=True)]  # type: ignore[arg-type]
        hashes = self.hashes(request)
        best = self.hashed_units(hashes, request.num_tokens)
        if self._partial and not continued and self._gives_back(request, best):
            best -= 1
        if units_max is not None:
            best = min(best, units_max)
        best = self._longest(indexes, hashes, best)
        if self._spans_of is not None:
            spans = self._spans_of(request)
            while (whole := uncut(spans, best * self._unit)) < best * self._unit:
                best = self._longest(indexes, hashes, whole // self._unit)
        return best

    def _longest(self, indexes: Sequence[KeyIndex], hashes: Sequence[bytes], best: int) -> int:
        """Return the longest prefix, of at most `best` units, for which every cache group holds all needed chunks."""
        for group in self._full:
            best = self._longest_full(indexes[group], hashes, best)
        if not self._partial:
            return best
        best = self._longest_windows(indexes, hashes, best)
        while best and self._states:
            boundary = self._last_boundary(indexes, hashes, best)
            best = boundary
            for group in self._full:
                best = self._longest_in_last_chunk(indexes[group], hashes, best)
            best = self._longest_windows(indexes, hashes, best)
            if best == boundary:
                break
        return best

    def _gives_back(self, request: Request, units: int) -> bool:
        """Whether a hit must end before the last of `units` units, because vLLM computes the last token again.

        The last token's window reaches one token further back than the window of a new token. A state already includes
        the last token.
        """
        return self._partial and units * self._unit >= request.num_tokens

    def _last_boundary(self, indexes: Sequence[KeyIndex], hashes: Sequence[bytes], best: int) -> int:
        """Return the last boundary, in units, at which all groups of states hold a state.

        The result is at most `best`, and is 0 if the groups share no boundary.
        """
        keys = reversed(self._keys(hashes, 1, best, ahead=0))
        held = (all(key in indexes[group] for group in self._states) for key in keys)
        return next(compress(range(best, 0, -1), held), 0)

    def _longest_windows(self, indexes: Sequence[KeyIndex], hashes: Sequence[bytes], best: int) -> int:
        """Return the longest prefix, of at most `best` units, whose windows are held."""
        while best and self._windows:
            gaps = [self._window_gap(indexes[g], hashes, best, *window) for g, *window in self._windows]
            shorter = [gap for gap in gaps if gap >= 0]
            if not shorter:
                break
            best = min(shorter)
            for group in self._full:  # look for a shorter last chunk: all others are whole
                best = self._longest_in_last_chunk(indexes[group], hashes, best)
        return best

    def why_short(self, request: Request, units: int) -> str:
        """Return why only the first `units` units of `request` are found: one of `miss_reasons.REASONS`."""
        hashes, lost = self.hashes(request), self._catalog.lost_keys
        if not hashes and request.block_hashes:
            return miss_reasons.ADAPTER
        stop = self.hashed_units(hashes, request.num_tokens)
        if units >= stop or (units == stop - 1 and self._gives_back(request, stop)):
            return miss_reasons.BELOW_MINIMUM
        last = min(units // self._per_chunk * self._per_chunk + self._per_chunk, stop)
        mask = lost.mask
        for group in self._groups:
            found, pending, reasons = self._catalog.index(group), self._catalog.pending(group), lost.reasons[group]
            forgotten = self._catalog.reset_index(group)
            for key in self._keys(hashes, units + 1, last, ahead=0 if group in self._states else None):
                if key in found:
                    continue
                if key in pending:
                    return miss_reasons.BEING_SAVED
                if key in (known := reasons[hash(key) & mask]):
                    return known[key]
                if key in forgotten:
                    return miss_reasons.RESET
        return miss_reasons.BELOW_MINIMUM if self._cuts(hashes, units, stop) else miss_reasons.NOT_SAVED

    def _cuts(self, hashes: Sequence[bytes], units: int, stop: int) -> bool:
        """Whether more than `units` of the first `stop` units are held, but a longer hit would cut a span."""
        if self._spans_of is None:
            return False
        return self._longest(list(map(self._catalog.index, self._groups)), hashes, stop) > units

    def holding(self, group: int, hashes: Sequence[bytes], base: int, stop: int) -> Chunk | None:
        """Return the chunk that begins at unit `base` and holds at least units [base, stop) of the prefix, or None.

        For a group of states, the chunk is the state after exactly `stop` units.
        """
        if group in self._states:
            return self._catalog.find(group, self.state_key(hashes, stop))
        chunk = self._holding(self._catalog.index(group), hashes, base, stop)
        assert chunk is None or isinstance(chunk, Chunk)  # noqa: S101  (the catalog holds nothing else)
        return chunk

    def chunks(self, group: int, hashes: Sequence[bytes], first: int, stop: int) -> list[Chunk | None]:
        """Return the chunks of units [first, stop), each as `holding` returns it.

        For a group of states, return only the state after unit `stop - 1`.
        """
        if group in self._states:
            return [self.holding(group, hashes, stop - 1, stop)]
        per_chunk, rest = self._per_chunk, stop % self._per_chunk
        whole = self._keys(hashes, first - first % per_chunk + per_chunk, stop, per_chunk)
        found = list(map(self._catalog.index(group).get, whole))
        if rest:
            found.append(self.holding(group, hashes, stop - rest, stop))
        return found

    def _holding(self, index: KeyIndex, hashes: Sequence[bytes], base: int, stop: int) -> object | None:
        for key in self._keys(hashes, stop, base + self._per_chunk):
            chunk = index.get(key)
            if chunk is not None:
                return chunk
        return None

    def chunks_from_the_end(self, request: Request, units: int) -> list[Chunk]:
        """Return the whole chunks of the request's first `units` units, the last chunk first.

        The chunks of states come before all other chunks.
        """
        hashes, stop, find = self.hashes(request), units * self._hashes_per_unit, self._catalog.find_saved
        found: list[Chunk] = []
        for groups, step, ahead in self._kinds:
            for key in reversed(hashes[step - 1 + ahead : stop + ahead : step]):
                for group in groups:
                    if (chunk := find(group, key)) is not None:
                        found.append(chunk)  # noqa: PERF401  (a comprehension takes 0.2 us more for three chunks)
        return found

    def _keys(
        self, hashes: Sequence[bytes], first: int, last: int, step: int = 1, ahead: int | None = None
    ) -> Sequence[bytes]:
        """Return the keys of the prefixes of `first`, `first + step`, … `last` units.

        Each key is the hash that is `ahead` hashes after the prefix's last hash. `ahead` must be 0 for states.
        """
        per_unit, ahead = self._hashes_per_unit, self._ahead if ahead is None else ahead
        return hashes[first * per_unit - 1 + ahead : last * per_unit + ahead : step * per_unit]

    def _longest_full(self, index: KeyIndex, hashes: Sequence[bytes], best: int) -> int:
        per_chunk, held = self._per_chunk, 0
        if best >= per_chunk and self.key(hashes, per_chunk) in index:  # most prompts end here, after one probe
            whole = self._keys(hashes, per_chunk, best, per_chunk)
            held = self._leading(index, whole)
        return self._longest_in_last_chunk(index, hashes, min(best, held * per_chunk + per_chunk - 1))

    def _leading(self, index: KeyIndex, keys: Sequence[bytes]) -> int:
        """Return how many of `keys` are in `index` before the first missing key."""
        return index.leading(keys) if isinstance(index, Shards) else len([*takewhile(index.__contains__, keys)])

    def _longest_in_last_chunk(self, index: KeyIndex, hashes: Sequence[bytes], best: int) -> int:
        base = best // self._per_chunk * self._per_chunk
        if best == base or self._holding(index, hashes, base, best):
            return best
        return self._shorter(index, hashes, base, best - 1)

    def _window_gap(self, index: KeyIndex, hashes: Sequence[bytes], best: int, window: int, local: int) -> int:
        """Return -1 if the group holds the units [low, best), which attention reads after a prefix of `best` units.

        `low` is `best - window`, or with `local` attention the last multiple of `window`. If one of these units is
        missing, return the next shorter prefix to try.
        """
        low = best // window * window if local else max(0, best - window)
        stop = best
        while stop > low:
            base = (stop - 1) // self._per_chunk * self._per_chunk
            if not self._holding(index, hashes, base, stop):
                shorter = self._shorter(index, hashes, base, stop - 1)
                return max(shorter, low) if local else shorter  # a prefix of `low` units needs no unit of this window
            stop = base
        return -1

    def _shorter(self, index: KeyIndex, hashes: Sequence[bytes], base: int, most: int) -> int:
        """Return the longest prefix of more than `base` and at most `most` units whose key is in `index`.

        Return `base` if `index` has no such prefix.
        """
        keys = self._keys(hashes, base + 1, most)
        return next(compress(range(most, base, -1), map(index.__contains__, reversed(keys))), base)
