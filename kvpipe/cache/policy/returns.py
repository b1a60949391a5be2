"""Learns how soon chains are used again, and computes from that what it is worth to keep one."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from typing import Final

from kvpipe.cache.hints import Action

PER_OCTAVE: Final = 3
SHORTEST_S: Final = 0.25
BINS: Final = 48  # of idle times, up to 4.5 hours; what is idle for longer is in the last one
PACES: Final = 13  # kinds of chains, by their usual pause: none yet, then octaves from a second on
LEFT: Final = PACES - 1  # what others have branched off before
SILENT: Final = PACES  # kinds by pace again, of what waits without a hint, for each class of answers (`answer_class`)
ANSWERS_TOKENS: Final = (128, 1024)
"""From how many tokens on an answer is of the next class: of five ways to cut that were simulated, about the best."""
RESUMES: Final = SILENT + (2 + len(ANSWERS_TOKENS)) * PACES  # kinds by the octave of the pause that a client has hinted
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
CHANCE_MAX: Final = 0.999  # that a chain returns within a bin
RENEW_EVERY: Final = 8  # turns, one pace in turn; later less often
RENEW_SHARE: Final = 256  # of all turns so far
RENEW_MAX: Final = 64
_EDGES_S: Final = [0.0, *(SHORTEST_S * 2 ** (at / PER_OCTAVE) for at in range(1, BINS + 1))]
_WIDTHS_BACK_S: Final = [stop_s - start_s for start_s, stop_s in itertools.pairwise(_EDGES_S)][::-1]
"""Of the bins, the last one first."""
INNER_S: Final = _EDGES_S[1:-1]
"""The edges between bins, in seconds: the bin of an idle time is the number of edges that it has reached."""


def pace_after(before: float | None, idle_s: float) -> float:
    """Return a chain's pace after a pause of `idle_s`: the moving mean of log2 of its pauses in seconds.

    `before`: its pace until now; None: this is the first pause.
    """
    now = math.log2(max(idle_s, SHORTEST_S))
    return now if before is None else 0.7 * before + 0.3 * now


def kind_of(usual: float | None) -> int:
    """Return the kind of a chain by its pace (`pace_after`); None: it has not paused yet."""
    if usual is None:
        return 0
    octave = 1 + int(usual)  # comparisons are quicker than `min` and `max`
    return 1 if octave < 1 else octave if octave < LEFT else LEFT - 1


def answer_class(tokens: int) -> int:
    """Return what to add to `SILENT` and a pace for a wait after an answer of so many tokens; 0: it is not known."""
    return PACES * (1 + bisect_right(ANSWERS_TOKENS, tokens))


def hinted_kind(action: Action, in_s: float) -> int:
    """Return the kind of a chain with the hint `action`, whose time is in `in_s` seconds."""
    if action is Action.DEMOTE:
        return DEMOTED
    octave = int(math.log2(in_s)) + 1 if 1 <= in_s < 1 << 14 else 14 * (in_s >= 1)
    return RESUMES + octave if action is Action.RESUME else RETAINS + octave // 2


def _bin(idle_s: float) -> int:
    return bisect_right(INNER_S, idle_s)


class Returns:
    """Counts, by kind of chain, how often chains began to wait, and after which idle times they were used again.

    The worth of a chain that has waited for some time is its Gittins index: the expected hits per second of further
    waiting, at the best time to give up. It needs no horizon; of two chains the one with the larger index is kept. The
    worths are tables, renewed now and then, so a decision is a table lookup.

    Each kind of hint is a kind of chain, too: its worth follows from how long chains with such a hint have waited.
    """

    def __init__(self) -> None:
        """Start without counts: hints are taken as right, and all other kinds are worth the same."""
        self._ended = [0.0] * KINDS
        self._returned = [[0.0] * BINS for _ in range(KINDS)]
        self._everybody = [0.0] * BINS  # of all kinds by pace
        self.tables: list[Table] = [_Useless()] * KINDS
        """By kind: what its chains are worth, by bin of idle time."""
        self.renewals = 0
        """How often `tables` have changed."""
        self._turns = self._renewed = 0
        self._renew_at = RENEW_EVERY
        self._changed = [True] * KINDS  # since they were renewed
        self._trust = 0.0
        for kind in range(RESUMES, KINDS):
            self._ended[kind], self._returned[kind] = PRIOR_TURNS, _as_hinted(kind)
        for pace in range(PACES):
            self._renew(pace)

    def ended(self, kind: int, turns: int = 1) -> None:
        """Count that a chain of `kind` waits from now on. `turns` is -1 to take that back: it is of another kind."""
        ended = self._ended[kind] + turns
        self._ended[kind] = ended if ended > 0 else 0.0  # what is taken back may have been halved meanwhile
        self._changed[kind] = True
        self._turns += 1
        if self._turns >= self._renew_at:
            self._renew_at = self._turns + min(RENEW_MAX, RENEW_EVERY + self._turns // RENEW_SHARE)
            self._renewed = (self._renewed + 1) % PACES
            self._renew(self._renewed)

    def waits(self, pace: int, silent: int) -> None:
        """Count that a chain of the kind `pace` waits from now on, and without a hint: `ended` of both its kinds."""
        if self._turns + 2 < self._renew_at:
            self._turns += 2
            self._ended[pace] += 1
            self._ended[silent] += 1
            self._changed[pace] = self._changed[silent] = True
        else:
            self.ended(pace)
            self.ended(silent)

    def back(self, pace: int, silent: int, idle_s: float) -> None:
        """Count that such a chain is used again after `idle_s` seconds: `returned` of both its kinds."""
        at = bisect_right(INNER_S, idle_s)
        self._everybody[at] += 1
        self._returned[pace][at] += 1
        self._returned[silent][at] += 1
        self._changed[pace] = self._changed[silent] = True

    def returned(self, kind: int, idle_s: float) -> None:
        """Count that a chain is used again after `idle_s` seconds. `kind`: what it was when it began to wait."""
        at = _bin(idle_s)
        self._returned[kind][at] += 1
        if kind < PACES:
            self._everybody[at] += 1
        self._changed[kind] = True

    def proven(self, hinted: int, pace: int, idle_s: float) -> None:
        """Adjust the trust in hints: a chain with one is used again after `idle_s` seconds.

        The trust rises if that was more likely for the hint's kind, `hinted`, than for the kind of its pace, `pace`.
        """
        at = _bin(idle_s)
        better = self._likely(hinted, at) / self._likely(pace, at)
        self._trust = TRUST_DECAY * self._trust + max(-PROOF_MAX, min(PROOF_MAX, math.log2(better)))

    @property
    def trusts(self) -> bool:
        """Whether hints predict better than the paces of the same chains."""
        return self._trust >= DISTRUST

    def worth(self, kind: int, idle_s: float) -> float:
        """Return the expected hits per second and chunk of a chain of `kind` that has waited for `idle_s` seconds."""
        return self.tables[kind].worths()[_bin(idle_s)]

    def _likely(self, kind: int, at: int) -> float:
        return (self._returned[kind][at] + 0.2) / (self._ended[kind] + 10)

    def _renew(self, pace: int) -> None:
        self.renewals += 1
        everybody = _Everybody(sum(self._ended[:PACES]), self._everybody.copy())
        for kind in range(pace, KINDS, PACES):
            if kind >= RESUMES and not self._changed[kind]:
                continue  # no hint is of it
            self._changed[kind] = False
            if kind == pace or kind >= RESUMES:
                self._renew_kind(kind, everybody)
                continue
            if kind == SILENT + pace:
                silent = self._silent(pace, everybody)
            if not self._ended[kind] or self._counts(kind) == self._counts(pace):
                self.tables[kind] = silent  # there are no hints, and no other answers
            else:
                self._renew_kind(kind, silent)

    def _silent(self, pace: int, everybody: _Everybody) -> Table:
        """Return what waits of a pace are worth that no client has hinted, after whatever answer."""
        ended = sum(self._ended[SILENT + pace : RESUMES : PACES])
        returned = [sum(counts) for counts in zip(*self._returned[SILENT + pace : RESUMES : PACES], strict=True)]
        if (ended, returned) == self._counts(pace):
            return self.tables[pace]
        return Table(ended, returned, PRIOR, everybody)

    def _counts(self, kind: int) -> tuple[float, list[float]]:
        return self._ended[kind], self._returned[kind]

    def _renew_kind(self, kind: int, everybody: _Everybody | Table) -> None:
        hinted = kind >= RESUMES
        if self._ended[kind] > (REMEMBERED_HINTED if hinted else REMEMBERED):
            self._ended[kind] /= 2
            halves = self._returned[kind] = [count / 2 for count in self._returned[kind]]
            if kind < PACES:
                self._everybody = [all_ - half for all_, half in zip(self._everybody, halves, strict=True)]
        waiting, returned = self._ended[kind], self._returned[kind].copy()
        useless = kind == DEMOTED and sum(returned) < USELESS * waiting
        prior = PRIOR_HINTED if hinted else PRIOR
        self.tables[kind] = _Useless() if useless else Table(waiting, returned, prior, everybody)


class _Everybody:
    """How soon chains of all kinds have returned, as it was counted at some time."""

    __slots__ = ("_ended", "_returned", "_usual")

    def __init__(self, ended: float, returned: list[float]) -> None:
        """`returned`: by bin of idle time, of `ended` chains."""
        self._ended, self._returned = ended, returned
        self._usual: list[float] | None = None

    def usual(self) -> list[float]:
        """Return, by bin, how likely a chain returns that has not returned before."""
        if self._usual is None:
            waiting, self._usual = self._ended, []
            for all_ in self._returned:
                left = waiting if waiting > all_ else all_  # noqa: FURB136  (quicker)
                self._usual.append((all_ + 0.05) / (left + 1))
                waiting -= all_
        return self._usual


class Table:
    """What chains of a kind are worth, by what was counted at some time. It is computed when it is first asked for."""

    __slots__ = ("_chances", "_ended", "_everybody", "_prior", "_returned", "computed")

    def __init__(self, ended: float, returned: list[float], prior: float, everybody: _Everybody | Table) -> None:
        """`returned`: by bin of idle time, of `ended` chains. `everybody` counts for as much as `prior` of them."""
        self._chances: list[float] | None = None
        self._ended, self._returned, self._prior, self._everybody = ended, returned, prior, everybody
        self.computed: list[float] | None = None
        """What `worths` returns, once it was asked for."""

    def worths(self) -> list[float]:
        """Return, by bin of idle time, the expected hits per second and chunk of a chain that has waited so long."""
        if self.computed is None:
            self.computed = _indices(self.usual())
        return self.computed

    def usual(self) -> list[float]:
        """Return, by bin, how likely a chain returns that has not returned before."""
        if self._chances is None:
            waiting, prior, chances = self._ended, self._prior, list[float]()
            for mine, of_all in zip(self._returned, self._everybody.usual(), strict=True):
                left = waiting if waiting > mine else mine  # noqa: FURB136  (as above)
                chance = (mine + prior * of_all) / (left + prior)
                chances.append(chance if chance < CHANCE_MAX else CHANCE_MAX)  # noqa: FURB136
                waiting -= mine
            self._chances = chances
        return self._chances


class _Useless(Table):
    """Of a kind that is worth nothing."""

    __slots__ = ()

    def __init__(self) -> None:
        self.computed = [0.0] * BINS


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
    """Return the Gittins index at each bin, in hits per second.

    `chances`: of each bin, the probability that a chain returns within it, if it has not returned before. Computed from
    the last bin on: a bin is joined with the following ones as long as waiting on has a larger index than giving up.
    """
    out, ahead, log1p = list[float](), list[tuple[float, float, float]](), math.log1p
    for chance, width_s in zip(reversed(chances), _WIDTHS_BACK_S, strict=True):
        hits, waits_s, stays = chance, -width_s * chance / log1p(-chance), 1 - chance
        while ahead:  # hits, seconds, chance that it goes on behind them
            more, longer_s, still = ahead[-1]
            if more * waits_s <= hits * longer_s:
                break
            hits, waits_s, stays = hits + stays * more, waits_s + stays * longer_s, stays * still
            ahead.pop()
        ahead.append((hits, waits_s, stays))
        out.append(hits / waits_s)
    return out[::-1]
