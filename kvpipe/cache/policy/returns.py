"""How soon what was used is used again, learnt as it happens, and what it is worth to keep it until then."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

from kvpipe.cache.hints import Action

PER_OCTAVE: Final = 3
SHORTEST_S: Final = 0.25
BINS: Final = 48  # of idle times, up to 4.5 hours; what is idle for longer is in the last one
PACES: Final = 13  # kinds of chains, by their usual pause: none yet, then octaves from a second on
LEFT: Final = PACES - 1  # what others have branched off before
SILENT: Final = PACES  # kinds by pace again, of what waits without a hint
RESUMES: Final = 2 * PACES  # kinds by the octave of the pause that a client has hinted
RETAINS: Final = RESUMES + 15  # by two octaves of how long a client wants it
DEMOTED: Final = RETAINS + 8
KINDS: Final = DEMOTED + 1
PRIOR: Final = 20.0  # a kind's own returns count as much as everybody's once so many have been seen
PRIOR_HINTED: Final = 4.0  # and those of kinds of hints, which begin as if hints were right
PRIOR_TURNS: Final = 20.0
REMEMBERED: Final = 8192  # turns of a kind; then the older ones count half
REMEMBERED_HINTED: Final = 512
USELESS: Final = 0.05  # of what is demoted, as much may come back all the same; else it is kept by what it is worth
TRUST_DECAY: Final = 0.995  # a return
PROOF_MAX: Final = 0.25  # what one return can move the trust by, which is between -50 and 50 for that
DISTRUST: Final = -4.0
RENEW_EVERY: Final = 8  # turns, one pace in turn; later less often
RENEW_SHARE: Final = 256  # of all turns so far
RENEW_MAX: Final = 64
_EDGES_S: Final = [0.0, *(SHORTEST_S * 2 ** (at / PER_OCTAVE) for at in range(1, BINS + 1))]
INNER_S: Final = _EDGES_S[1:-1]
"""Where one bin ends and the next begins: the bin of an idle time is how many of these it has reached."""


def pace_after(before: float | None, idle_s: float) -> float:
    """Return the moving mean of the logarithms, base 2, of a chain's pauses in seconds, after another pause."""
    now = math.log2(max(idle_s, SHORTEST_S))
    return now if before is None else 0.7 * before + 0.3 * now


def kind_of(usual: float | None) -> int:
    """Return the kind of a chain with this pace."""
    return 0 if usual is None else min(LEFT - 1, max(1, 1 + int(usual)))


def hinted_kind(action: Action, in_s: float) -> int:
    """Return the kind of a chain with this hint, for `in_s` seconds from now."""
    if action is Action.DEMOTE:
        return DEMOTED
    octave = int(math.log2(in_s)) + 1 if 1 <= in_s < 1 << 14 else 14 * (in_s >= 1)
    return RESUMES + octave if action is Action.RESUME else RETAINS + octave // 2


def _bin(idle_s: float) -> int:
    return bisect_right(INNER_S, idle_s)


class Returns:
    """Counts of turns by kind, and of returns by kind and idle time. A decision is a look into a table.

    What an idle chain is worth is its Gittins index: the most hits per second of waiting that any time of giving up
    promises, of a chain that has not returned until now. It needs no horizon, and of two claims on one slot the one
    with the larger index is served first.

    Hints make kinds as well: how long chains with a hint of the kind have waited decides what it is worth.
    """

    def __init__(self) -> None:
        """Nothing is known: hints are taken for right, and all else is worth the same."""
        self._ended = [0.0] * KINDS
        self._returned = [[0.0] * BINS for _ in range(KINDS)]
        self._everybody = [0.0] * BINS  # of all kinds by pace
        self.worths = [[0.0] * BINS for _ in range(KINDS)]
        """By kind and bin: the hits per second that a chunk of a chain promises that has waited for so long."""
        self._turns = self._renewed = 0
        self._renew_at = RENEW_EVERY
        self._changed = [True] * KINDS  # since they were renewed
        self._trust = 0.0
        for kind in range(RESUMES, KINDS):
            self._ended[kind], self._returned[kind] = PRIOR_TURNS, _as_hinted(kind)
        for pace in range(PACES):
            self._renew(pace)

    def ended(self, kind: int, turns: int = 1) -> None:
        """A chain of this kind was used, and waits from now on. `turns` -1: it was not of this kind."""
        self._ended[kind] += turns
        self._changed[kind] = True
        self._turns += 1
        if self._turns >= self._renew_at:
            self._renew_at = self._turns + min(RENEW_MAX, RENEW_EVERY + self._turns // RENEW_SHARE)
            self._renewed = (self._renewed + 1) % PACES
            self._renew(self._renewed)

    def returned(self, kind: int, idle_s: float) -> None:
        """A chain of this kind, as it was when it began to wait, is used again."""
        at = _bin(idle_s)
        self._returned[kind][at] += 1
        if kind < PACES:
            self._everybody[at] += 1
        self._changed[kind] = True

    def proven(self, hinted: int, pace: int, idle_s: float) -> None:
        """A chain with a hint returns after `idle_s`: was the kind `hinted` nearer to the truth than its pace?"""
        at = _bin(idle_s)
        better = self._likely(hinted, at) / self._likely(pace, at)
        self._trust = TRUST_DECAY * self._trust + max(-PROOF_MAX, min(PROOF_MAX, math.log2(better)))

    @property
    def trusts(self) -> bool:
        """Whether hints are nearer to the truth than what their chains did before."""
        return self._trust >= DISTRUST

    def worth(self, kind: int, idle_s: float) -> float:
        """Return the hits per second that a chunk of such a chain promises."""
        return self.worths[kind][_bin(idle_s)]

    def _likely(self, kind: int, at: int) -> float:
        return (self._returned[kind][at] + 0.2) / (self._ended[kind] + 10)

    def _renew(self, pace: int) -> None:
        waiting, usual = sum(self._ended[:PACES]), list[float]()
        for all_ in self._everybody:
            usual.append((all_ + 0.05) / (max(waiting, all_) + 1))
            waiting -= all_
        for kind in range(pace, KINDS, PACES):
            if kind >= RESUMES and not self._changed[kind]:
                continue  # no hint is of it
            self._changed[kind] = False
            if kind == SILENT + pace and self._counts(kind) == self._counts(pace):
                self.worths[kind] = self.worths[pace]  # there are no hints
            else:
                self._renew_kind(kind, usual)

    def _counts(self, kind: int) -> tuple[float, list[float]]:
        return self._ended[kind], self._returned[kind]

    def _renew_kind(self, kind: int, usual: list[float]) -> None:
        hinted = kind >= RESUMES
        if self._ended[kind] > (REMEMBERED_HINTED if hinted else REMEMBERED):
            self._ended[kind] /= 2
            halves = self._returned[kind] = [count / 2 for count in self._returned[kind]]
            if kind < PACES:
                self._everybody = [all_ - half for all_, half in zip(self._everybody, halves, strict=True)]
        waiting, prior, chances = self._ended[kind], PRIOR_HINTED if hinted else PRIOR, list[float]()
        for mine, of_all in zip(self._returned[kind], usual, strict=True):
            chances.append(min(0.999, (mine + prior * of_all) / (max(waiting, mine) + prior)))
            waiting -= mine
        useless = kind == DEMOTED and sum(self._returned[kind]) < USELESS * self._ended[kind]
        self.worths[kind] = [0.0] * BINS if useless else _indices(chances)


def _as_hinted(kind: int) -> list[float]:
    """Return how many of `PRIOR_TURNS` return in each bin if hints are right within a factor of two or so."""
    if kind == DEMOTED:
        return [0.0] * BINS
    resumes = kind < RETAINS
    at_s = 2.0 ** (kind - RESUMES - 0.5 if resumes else 2 * (kind - RETAINS) + 1)
    weights = [
        math.exp(-(math.log2(edge_s / at_s) ** 2) / 2) if resumes else float(edge_s <= at_s) for edge_s in _EDGES_S[1:]
    ]
    return [0.9 * PRIOR_TURNS * weight / sum(weights) for weight in weights]


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
