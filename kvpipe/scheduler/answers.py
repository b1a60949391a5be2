"""Learns which answers are of no more use: their chunks are evicted first, and are not stored in tiers.

A chat template may cut reasoning out of the next prompt, so that no prompt ever continues with what was decoded. No
client announces that; it is learned per *kind* of requests from the prompts that come back. A prompt that begins with
all of a finished request's prompt continues with its answer or with something else. Hashes decide which, so what is
learned does not depend on what is kept. While a request runs its answer is saved like any: it may be preempted.
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
"""If less of the answers of a kind are gone on with, they are evicted first."""
STORED_SHARE: Final = 1 / 16
"""If less are, they are not stored in tiers."""
SEEN_MAX: Final = 128
"""Then what was seen counts half: a kind that changes is noticed."""
KINDS_MAX: Final = 512
PLACES_MAX: Final = 8192
"""Keys by which finished requests are remembered; the oldest are forgotten."""
CHUNKS_MAX: Final = 64
"""Of one answer, by whose ends it is found."""


class Fate(Enum):
    """What became of an answer."""

    UNSEEN = auto()
    CUT = auto()
    USED = auto()
    VOID = auto()
    """Several requests end in the same block and have different answers: nothing is learned of them."""


class AnswerKind:
    """What was seen of the answers of one kind of requests."""

    __slots__ = ("cut", "used")

    def __init__(self) -> None:
        """Nothing."""
        self.cut = self.used = 0.0

    @property
    def seen(self) -> float:
        """How many, the older ones for less."""
        return self.cut + self.used

    @property
    def used_share_max(self) -> float:
        """Of all answers of the kind, how many are gone on with: no more than this, with a confidence of 95 %.

        A Poisson bound, a little above the exact one: 3, 4.74, 6.30, 7.75, 9.15 for none seen, one seen and so on.
        """
        return (3 + 1.75 * self.used) / max(self.seen, 1)

    def count(self, *, used: bool) -> None:
        """One more was seen."""
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
        """Nobody has gone on."""
        self.kind, self.units, self.follows, self.outcome = kind, units, follows, Fate.UNSEEN


class Answer:
    """The answer of one request. `spared`: the chunks that hold nothing else, if it is of no more use.

    `ended`: when the request is over, what is remembered of it, or of another that ended where its prompt does.
    """

    __slots__ = ("ended", "kind", "looked_up", "spared")

    def __init__(self, kind: Hashable, spared: dict[Chunk, None] | None) -> None:
        """Its prompt was not looked up."""
        self.kind, self.spared, self.looked_up = kind, spared, False
        self.ended: EndedRequest | None = None


class Answers:
    """One per scheduler side. A request costs a few dict probes."""

    def __init__(self, geometry: Geometry, catalog: Catalog, prefixes: Prefixes, counters: Counters) -> None:
        """Nothing is known."""
        self._catalog, self._prefixes, self._counters = catalog, prefixes, counters
        self._per_chunk = geometry.units_per_chunk
        self._kinds: OrderedDict[Hashable, AnswerKind] = OrderedDict()
        self._places: OrderedDict[bytes, EndedRequest] = OrderedDict()

    # ---- a request's life -----------------------------------------------------------------------------------------

    def arrived(self, tracked: Tracked, kind: Hashable) -> None:
        """A request has come. Its client's hints take precedence over what was learned."""
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
        """Of the request's prefix `units` units are held, by the engine or here: it may go on behind another's."""
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
        """A piece that the request has saved can be found. `over`: the request is."""
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
        """Return from which unit on chunks hold nothing but the answer."""
        return -(-self._prefixes.units_within(tracked.request.num_prompt_tokens) // self._per_chunk) * self._per_chunk

    def _spare(self, chunks: Iterable[Chunk]) -> None:
        self._counters["decode_not_kept"] += self._catalog.spare(chunks)

    # ---- what is learned ------------------------------------------------------------------------------------------

    def _remember(self, tracked: Tracked, kind: Hashable) -> EndedRequest | None:
        """Let those who come back be known, if the answer has chunks of its own."""
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
        """A prompt has all of this one's. What was cut once may be gone on with later."""
        if ended.outcome is Fate.UNSEEN or (used and ended.outcome is Fate.CUT):
            self._take_back(ended)
            ended.outcome = Fate.USED if used else Fate.CUT
            kind = self._kinds.setdefault(ended.kind, AnswerKind())
            kind.count(used=used)
            self._kinds.move_to_end(ended.kind)
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)

    def _judge_no_more(self, ended: EndedRequest) -> None:
        """Prompts branch where this one ends: one that continues differently is no evidence about its answer."""
        self._take_back(ended)
        ended.outcome = Fate.VOID

    def _take_back(self, ended: EndedRequest) -> None:
        kind = self._kinds.get(ended.kind)
        if kind is not None and ended.outcome is Fate.CUT:
            kind.cut = max(0.0, kind.cut - 1)
