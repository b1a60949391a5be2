"""Learns which answers no later prompt contains: their chunks are evicted first, and are not stored in tiers.

A chat template may cut reasoning out of the next prompt, so that no prompt ever continues with the decoded tokens. No
client announces that; it is learned per *kind* of requests from later prompts. A prompt that begins with all of a
finished request's prompt continues with its answer, or with something else. Hashes decide which, so the result does
not depend on which chunks are still held. While a request runs its answer is saved like any other, because the request
may be preempted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Catalog, Chunk, Piece
    from kvpipe.cache.prefixes import Prefixes
    from kvpipe.geometry import Geometry
    from kvpipe.scheduler.records import Tracked
    from kvpipe.trace.log import Counters

KEPT_SHARE: Final = 1 / 8
"""If later prompts contain a smaller share of a kind's answers, these are evicted first."""
STORED_SHARE: Final = 1 / 16
"""If they contain a smaller share than this, the answers are not stored in tiers."""
SEEN_MAX: Final = 128
"""When so many answers of a kind were seen, the counts are halved, so that a change is noticed."""
KINDS_MAX: Final = 512
PLACES_MAX: Final = 8192
"""Keys under which finished requests are remembered; the oldest are forgotten."""
CHUNKS_MAX: Final = 64
"""How many chunks of an answer have such keys, at their ends."""


class Fate(Enum):
    """What became of an answer: `UNSEEN` by any prompt yet, `CUT` from the next prompt, `USED` as part of it."""

    UNSEEN = auto()
    CUT = auto()
    USED = auto()
    VOID = auto()
    """Several requests end in the same block and have different answers: nothing is learned from them."""


class AnswerKind:
    """How many answers of one kind of requests were cut, and how many used. Older ones count less."""

    __slots__ = ("cut", "used")

    def __init__(self) -> None:
        """Start at zero."""
        self.cut = self.used = 0.0

    @property
    def seen(self) -> float:
        """How many answers were seen, older ones counted less."""
        return self.cut + self.used

    @property
    def used_share_max(self) -> float:
        """An upper bound, with 95 % confidence, of the share of the kind's answers that later prompts contain.

        A Poisson bound, a little above the exact one: 3, 4.74, 6.30, 7.75, 9.15 for 0, 1, 2, 3, 4 used answers.
        """
        return (3 + 1.75 * self.used) / max(self.seen, 1)

    def count(self, *, used: bool) -> None:
        """Count one more answer."""
        if used:
            self.used += 1
        else:
            self.cut += 1
        if self.seen >= SEEN_MAX:
            self.cut, self.used = self.cut / 2, self.used / 2


class EndedRequest:
    """A request that is over: `units` of its prompt have a key, and the first unit behind them ends with `follows`."""

    __slots__ = ("follows", "kind", "outcome", "units")

    def __init__(self, kind: Hashable, units: int, follows: bytes) -> None:
        """Start with an answer that no prompt has shown yet."""
        self.kind, self.units, self.follows, self.outcome = kind, units, follows, Fate.UNSEEN


class Answer:
    """The answer of one request. `kind`: of the request.

    `spared`: the chunks that hold nothing but the answer, if its kind is to be evicted first; else None.
    `ended`: once the request is over, what is remembered of it, or of an earlier request whose prompt ends there.
    """

    __slots__ = ("ended", "kind", "looked_up", "spared")

    def __init__(self, kind: Hashable, spared: dict[Chunk, None] | None) -> None:
        """Start before the prompt's first lookup."""
        self.kind, self.spared, self.looked_up = kind, spared, False
        self.ended: EndedRequest | None = None


class Answers:
    """One per scheduler side. It takes a few dict probes per request."""

    def __init__(self, geometry: Geometry, catalog: Catalog, prefixes: Prefixes, counters: Counters) -> None:
        """Start with nothing learned."""
        self._catalog, self._prefixes, self._counters = catalog, prefixes, counters
        self._per_chunk = geometry.units_per_chunk
        self._kinds: OrderedDict[Hashable, AnswerKind] = OrderedDict()
        self._places: OrderedDict[bytes, EndedRequest] = OrderedDict()

    # ---- a request's life -----------------------------------------------------------------------------------------

    def arrived(self, tracked: Tracked, kind: Hashable) -> None:
        """A request of this kind has arrived. Its client's hints take precedence over what was learned."""
        request = tracked.request
        if request.resumable:
            return
        seen = self._kinds.get(kind)
        if seen is None or seen.used_share_max > KEPT_SHARE or tracked.wishes:
            tracked.answer = Answer(kind, None)
            return
        tracked.answer = Answer(kind, {})
        tracked.kept_units = self._behind(tracked)
        if seen.used_share_max <= STORED_SHARE:
            tracked.stored_units = tracked.kept_units

    def looked_up(self, tracked: Tracked, units: int) -> None:
        """A lookup found `units` units held, by the engine or kvpipe. The prompt may continue a finished request."""
        answer, request = tracked.answer, tracked.request
        if answer is None or answer.looked_up:
            return
        answer.looked_up = True
        hashes, final = self._prefixes.hashes(request), self._prefixes.final_units(request, request.num_prompt_tokens)
        units = min(units, final)
        for place in (units, units - units % self._per_chunk) if self._places else ():
            ended = self._places.get(self._prefixes.key(hashes, place)) if place else None
            if ended is not None:
                if final > ended.units:
                    self._judge(ended, used=self._prefixes.key(hashes, ended.units + 1) == ended.follows)
                return

    def landed(self, tracked: Tracked, piece: Piece, *, over: bool) -> None:
        """A piece that the request has saved can be found now. `over`: the request has ended."""
        answer = tracked.answer
        if answer is None or answer.spared is None or piece.base < tracked.kept_units:
            return
        if over:
            if answer.ended is None or answer.ended.outcome is not Fate.USED:  # nobody was quicker
                self._spare([piece.chunk])
        else:
            answer.spared[piece.chunk] = None

    def ended(self, tracked: Tracked) -> None:
        """The request is over, and its hashes are still known."""
        answer = tracked.answer
        if answer is None or tracked.request.resumable:
            return
        answer.ended = self._remember(tracked, answer.kind)
        if answer.spared:
            self._spare(reversed(answer.spared))
            answer.spared.clear()

    def _behind(self, tracked: Tracked) -> int:
        """Return the first unit from which on chunks hold nothing but the answer."""
        return -(-self._prefixes.units_within(tracked.request.num_prompt_tokens) // self._per_chunk) * self._per_chunk

    def _spare(self, chunks: Iterable[Chunk]) -> None:
        self._counters["decode_not_kept"] += self._catalog.spare(chunks)

    # ---- what is learned ------------------------------------------------------------------------------------------

    def _remember(self, tracked: Tracked, kind: Hashable) -> EndedRequest | None:
        """Remember a finished request under the keys by which later prompts find it, if its answer has own chunks."""
        request, prefixes = tracked.request, self._prefixes
        units, behind = prefixes.units_within(request.num_prompt_tokens), self._behind(tracked)
        stop = prefixes.final_units(request, request.num_tokens)
        if not units or stop <= behind:
            return None
        hashes: Sequence[bytes] = prefixes.hashes(request)
        end, follows = prefixes.key(hashes, units), prefixes.key(hashes, units + 1)
        known = self._places.get(end)
        if known is not None and known.units == units:
            self._places.move_to_end(end)
            if known.follows != follows:
                self._judge_no_more(known)
            return known
        ended = EndedRequest(kind, units, follows)
        last = min(stop, behind + CHUNKS_MAX * self._per_chunk)
        for place in (units, *range(behind, last + 1, self._per_chunk), stop - 1, stop):
            self._places[prefixes.key(hashes, place)] = ended
        while len(self._places) > PLACES_MAX:
            self._places.popitem(last=False)
        return ended

    def _judge(self, ended: EndedRequest, *, used: bool) -> None:
        """Count that a later prompt begins with this request's: with its answer too (`used`), or not.

        An answer that was counted as cut may be counted as used later.
        """
        if ended.outcome is Fate.UNSEEN or (used and ended.outcome is Fate.CUT):
            self._take_back(ended)
            ended.outcome = Fate.USED if used else Fate.CUT
            kind = self._kinds.setdefault(ended.kind, AnswerKind())
            kind.count(used=used)
            self._kinds.move_to_end(ended.kind)
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)

    def _judge_no_more(self, ended: EndedRequest) -> None:
        """Learn nothing from this request: prompts branch where its own ends, whatever the template cuts."""
        self._take_back(ended)
        ended.outcome = Fate.VOID

    def _take_back(self, ended: EndedRequest) -> None:
        kind = self._kinds.get(ended.kind)
        if kind is not None and ended.outcome is Fate.CUT:
            kind.cut = max(0.0, kind.cut - 1)
