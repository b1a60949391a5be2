"""How soon what was used is used again, learnt as it happens, and what it is worth to keep it until then."""

from __future__ import annotations

import math
from typing import Final

PER_OCTAVE: Final = 3
SHORTEST_S: Final = 0.25
BINS: Final = 48  # of idle times, up to 4.5 hours; what is idle for longer is in the last one
KINDS: Final = 13  # of chains, by their usual pause: none yet, then octaves from a second on
LEFT: Final = KINDS - 1  # what others have branched off before
PRIOR: Final = 60.0  # a kind's own returns count as much as everybody's once so many have been seen
REMEMBERED: Final = 8192  # turns of a kind; then the older ones count half
RENEW_EVERY: Final = 8  # turns, one kind in turn
_EDGES_S: Final = [0.0, *(SHORTEST_S * 2 ** (at / PER_OCTAVE) for at in range(1, BINS + 1))]


def pace_after(before: float | None, idle_s: float) -> float:
    """Return the moving mean of the logarithms, base 2, of a chain's pauses in seconds, after another pause."""
    now = math.log2(max(idle_s, SHORTEST_S))
    return now if before is None else 0.7 * before + 0.3 * now


def kind_of(usual: float | None) -> int:
    """Return the kind of a chain with this pace."""
    return 0 if usual is None else min(LEFT - 1, max(1, 1 + int(usual)))


def _bin(idle_s: float) -> int:
    return min(BINS - 1, int(math.log2(idle_s / SHORTEST_S) * PER_OCTAVE)) if idle_s > SHORTEST_S else 0


class Returns:
    """Counts of turns by kind, and of returns by kind and idle time. A decision is a look into a table.

    What an idle chain is worth is its Gittins index: the most hits per second of waiting that any time of giving up
    promises, of a chain that has not returned until now. It needs no horizon, and of two claims on one slot the one
    with the larger index is served first.
    """

    def __init__(self) -> None:
        """Nothing is known: all is worth the same."""
        self._ended = [0.0] * KINDS
        self._returned = [[0.0] * BINS for _ in range(KINDS)]
        self._worth = [[0.0] * BINS for _ in range(KINDS)]
        self._turns = 0

    def ended(self, kind: int) -> None:
        """A chain of this kind was used, and waits from now on."""
        self._ended[kind] += 1
        self._turns += 1
        if self._turns % RENEW_EVERY == 0:
            self._renew(self._turns // RENEW_EVERY % KINDS)

    def returned(self, kind: int, idle_s: float) -> None:
        """A chain of this kind, as it was when it began to wait, is used again."""
        self._returned[kind][_bin(idle_s)] += 1

    def worth(self, kind: int, idle_s: float) -> float:
        """Return the hits per second that a chunk of such a chain promises."""
        return self._worth[kind][_bin(idle_s)]

    def _renew(self, kind: int) -> None:
        if self._ended[kind] > REMEMBERED:
            self._ended[kind] /= 2
            self._returned[kind] = [count / 2 for count in self._returned[kind]]
        own, everybody = self._returned[kind], list(map(sum, zip(*self._returned, strict=True)))
        waiting, waiting_all = self._ended[kind], sum(self._ended)
        chances = list[float]()
        for mine, all_ in zip(own, everybody, strict=True):
            usual = (all_ + 0.05) / (max(waiting_all, all_) + 1)
            chances.append(min(0.999, (mine + PRIOR * usual) / (max(waiting, mine) + PRIOR)))
            waiting, waiting_all = waiting - mine, waiting_all - all_
        self._worth[kind] = _indices(chances)


def _indices(chances: list[float]) -> list[float]:
    """Return the index at each bin, of the chances to return within each bin of what has not returned before it.

    From the end: a bin is joined with what follows as long as going on promises more than stopping there.
    """
    out, ahead = [0.0] * BINS, list[tuple[float, float, float]]()  # hits, seconds, chance that it goes on behind them
    for at in range(BINS - 1, -1, -1):
        chance, width_s = chances[at], _EDGES_S[at + 1] - _EDGES_S[at]
        hits, waits_s, stays = chance, -width_s * chance / math.log1p(-chance), 1 - chance
        while ahead and ahead[-1][0] * waits_s > hits * ahead[-1][1]:
            more, longer_s, still = ahead.pop()
            hits, waits_s, stays = hits + stays * more, waits_s + stays * longer_s, stays * still
        ahead.append((hits, waits_s, stays))
        out[at] = hits / waits_s
    return out
