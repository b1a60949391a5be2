"""Learns after which pauses chains are used again, and computes how much it is worth to keep a chain."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from typing import Final

from kvpipe.cache.policy.hints import Action

PER_OCTAVE: Final = 3
SHORTEST_S: Final = 0.25
BINS: Final = 48  # bins of idle times up to 4.5 hours; the last bin has longer times, too
PACES: Final = 13  # the number of kinds by pace: 0 (no pause yet), 1 to 11 (octaves of the usual pause) and 12 (`LEFT`)
LEFT: Final = PACES - 1  # the kind of chains behind a point where requests ended or branched off
SILENT: Final = PACES
"""The first kind of waits without a hint. Each class of answers (`answer_class`) has `PACES` kinds from here on."""
ANSWERS_TOKENS: Final = (128, 1024)
"""Each of these lengths in tokens begins a class of answers. They were about the best of five simulated choices."""
RESUMES: Final = SILENT + (2 + len(ANSWERS_TOKENS)) * PACES  # the first kind of resume hints: one kind per octave
RETAINS: Final = RESUMES + 15  # the first kind of retain hints: one kind per two octaves of the retained time
DEMOTED: Final = RETAINS + 8
KINDS: Final = DEMOTED + 1
PRIOR: Final = 20.0  # the counts of all kinds weigh as much as this number of waits of the kind itself
PRIOR_HINTED: Final = 4.0  # the same for kinds of hints, whose counts start as if hints were right
PRIOR_TURNS: Final = 20.0
REMEMBERED: Final = 8192  # if a kind has more turns than this, its counts are halved
REMEMBERED_HINTED: Final = 512
USELESS: Final = 0.05  # if a smaller share of demoted chains is used again, demoted chains are worth nothing
TRUST_DECAY: Final = 0.995  # at each return, the earlier trust is multiplied by this factor
PROOF_MAX: Final = 0.25  # one return changes the trust by at most this; so the trust stays between -50 and 50
DISTRUST: Final = -4.0
CHANCE_MAX: Final = 0.999  # the highest chance that a chain returns within a bin
RENEW_EVERY: Final = 8  # the tables of one pace are renewed after this number of turns, at first
RENEW_SHARE: Final = 256  # the interval between renewals grows by 1 turn per 256 turns so far, up to `RENEW_MAX`
RENEW_MAX: Final = 64
_EDGES_S: Final = [0.0, *(SHORTEST_S * 2 ** (at / PER_OCTAVE) for at in range(1, BINS + 1))]
_WIDTHS_BACK_S: Final = [stop_s - start_s for start_s, stop_s in itertools.pairwise(_EDGES_S)][::-1]
"""The widths of the bins, the last bin first."""
INNER_S: Final = _EDGES_S[1:-1]
"""The edges between bins, in seconds. The bin of an idle time is the number of edges that are at most this time."""


def pace_after(before: float | None, idle_s: float) -> float:
    """Return a chain's pace after a pause of `idle_s` seconds: the moving mean of log2 of its pauses in seconds.

    `before` is the chain's pace before this pause, or None if this is the first pause.
    """
    now = math.log2(max(idle_s, SHORTEST_S))
    return now if before is None else 0.7 * before + 0.3 * now


def chain_kind(usual: float | None) -> int:
    """Return the kind of a chain by its pace (`pace_after`). The pace is None if the chain has not paused yet."""
    if usual is None:
        return 0
    octave = 1 + int(usual)  # comparisons are faster than `min` and `max`
    return 1 if octave < 1 else octave if octave < LEFT else LEFT - 1


def answer_class(tokens: int) -> int:
    """Return the class of an answer of `tokens` tokens. The class of an answer of unknown length is 0.

    A wait after the answer has the kind `SILENT` + class + kind of the chain's pace.
    """
    return PACES * (1 + bisect_right(ANSWERS_TOKENS, tokens))


def hinted_kind(action: Action, in_s: float) -> int:
    """Return the kind of a chain with the hint `action`. The time of the hint is `in_s` seconds from now."""
    if action is Action.DEMOTE:
        return DEMOTED
    octave = int(math.log2(in_s)) + 1 if 1 <= in_s < 1 << 14 else 14 * (in_s >= 1)
    return RESUMES + octave if action is Action.RESUME else RETAINS + octave // 2


def _bin(idle_s: float) -> int:
    return bisect_right(INNER_S, idle_s)


class Returns:
    """Counts, by kind, how often chains began to wait (*turns*), and after which idle times they were used again.

    The worth of a waiting chain is its Gittins index: the expected hits per second until the best time to stop waiting.
    The index needs no horizon. The chain with the larger index is kept. Worths are kept in tables that
    are renewed after some turns, so a decision is a table lookup.

    Each kind of hint is also a kind of chain. The worth of the kind is computed from the waits of chains with the hint.
    """

    def __init__(self) -> None:
        """Start without counts. At first, hints are treated as right, and all other kinds are worth the same."""
        self._ended = [0.0] * KINDS
        self._returned = [[0.0] * BINS for _ in range(KINDS)]
        self._everybody = [0.0] * BINS  # the sum of the returns of all kinds by pace
        self.tables: list[WorthTable] = [_Useless()] * KINDS
        """By kind: the table of the worths of the kind's chains."""
        self.renewals = 0
        """How often `tables` have changed."""
        self._turns = self._renewed = 0
        self._renew_at = RENEW_EVERY
        self._changed = [True] * KINDS  # for each kind: whether its counts have changed since its table was renewed
        self._trust = 0.0
        for kind in range(RESUMES, KINDS):
            self._ended[kind], self._returned[kind] = PRIOR_TURNS, _as_hinted(kind)
        for pace in range(PACES):
            self._renew(pace)

    def ended(self, kind: int, turns: int = 1) -> None:
        """Count that a chain of `kind` begins to wait.

        If the kind of a waiting chain changes, the caller takes the count of the old kind back with `turns` -1.
        """
        ended = self._ended[kind] + turns
        # below 0, because counts were halved since the turn that is taken back
        self._ended[kind] = ended if ended > 0 else 0.0
        self._changed[kind] = True
        self._turns += 1
        if self._turns >= self._renew_at:
            self._renew_at = self._turns + min(RENEW_MAX, RENEW_EVERY + self._turns // RENEW_SHARE)
            self._renewed = (self._renewed + 1) % PACES
            self._renew(self._renewed)

    def waits(self, pace: int, silent: int) -> None:
        """Count that a chain begins to wait without a hint, for both kinds of the chain: `pace` and `silent`.

        Two calls of `ended` would have the same effect.
        """
        if self._turns + 2 < self._renew_at:
            self._turns += 2
            self._ended[pace] += 1
            self._ended[silent] += 1
            self._changed[pace] = self._changed[silent] = True
        else:
            self.ended(pace)
            self.ended(silent)

    def back(self, pace: int, silent: int, idle_s: float) -> None:
        """Count that a chain without a hint is used again after `idle_s` seconds, as two calls of `returned` would."""
        at = bisect_right(INNER_S, idle_s)
        self._everybody[at] += 1
        self._returned[pace][at] += 1
        self._returned[silent][at] += 1
        self._changed[pace] = self._changed[silent] = True

    def returned(self, kind: int, idle_s: float) -> None:
        """Count that a chain is used again after `idle_s` seconds. `kind` is the chain's kind when it began to wait."""
        at = _bin(idle_s)
        self._returned[kind][at] += 1
        if kind < PACES:
            self._everybody[at] += 1
        self._changed[kind] = True

    def proven(self, hinted: int, pace: int, idle_s: float) -> None:
        """Adjust the trust in hints, because a chain with a hint is used again after `idle_s` seconds.

        `hinted` is the kind of the hint, `pace` the kind of the pace. The trust rises if `hinted` predicted the idle
        time better than `pace`.
        """
        at = _bin(idle_s)
        better = self._likely(hinted, at) / self._likely(pace, at)
        self._trust = TRUST_DECAY * self._trust + max(-PROOF_MAX, min(PROOF_MAX, math.log2(better)))

    @property
    def trusts(self) -> bool:
        """Whether hints have predicted idle times better than the paces of the same chains."""
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
                continue  # the counts of this kind of hints are the same as at the last renewal
            self._changed[kind] = False
            if kind == pace or kind >= RESUMES:
                self._renew_kind(kind, everybody)
                continue
            if kind == SILENT + pace:
                silent = self._silent(pace, everybody)
            if not self._ended[kind] or self._counts(kind) == self._counts(pace):
                self.tables[kind] = silent  # the kind has no counts of its own, or the counts of the whole pace
            else:
                self._renew_kind(kind, silent)

    def _silent(self, pace: int, everybody: _Everybody) -> WorthTable:
        """Return the worths of chains of one pace that wait without a hint, whatever the length of the last answer."""
        ended = sum(self._ended[SILENT + pace : RESUMES : PACES])
        returned = [sum(counts) for counts in zip(*self._returned[SILENT + pace : RESUMES : PACES], strict=True)]
        if (ended, returned) == self._counts(pace):
            return self.tables[pace]
        return WorthTable(ended, returned, PRIOR, everybody)

    def _counts(self, kind: int) -> tuple[float, list[float]]:
        return self._ended[kind], self._returned[kind]

    def _renew_kind(self, kind: int, everybody: _Everybody | WorthTable) -> None:
        hinted = kind >= RESUMES
        if self._ended[kind] > (REMEMBERED_HINTED if hinted else REMEMBERED):
            self._ended[kind] /= 2
            halves = self._returned[kind] = [count / 2 for count in self._returned[kind]]
            if kind < PACES:
                self._everybody = [all_ - half for all_, half in zip(self._everybody, halves, strict=True)]
        waiting, returned = self._ended[kind], self._returned[kind].copy()
        useless = kind == DEMOTED and sum(returned) < USELESS * waiting
        prior = PRIOR_HINTED if hinted else PRIOR
        self.tables[kind] = _Useless() if useless else WorthTable(waiting, returned, prior, everybody)


class _Everybody:
    """A snapshot of how soon chains of all kinds have returned."""

    __slots__ = ("_ended", "_returned", "_usual")

    def __init__(self, ended: float, returned: list[float]) -> None:
        """Keep the counts. `returned` has the returns of `ended` chains, by bin of idle time."""
        self._ended, self._returned = ended, returned
        self._usual: list[float] | None = None

    def usual(self) -> list[float]:
        """Return, by bin, the chance that a chain returns within the bin if it has not returned before."""
        if self._usual is None:
            waiting, self._usual = self._ended, []
            for all_ in self._returned:
                left = waiting if waiting > all_ else all_  # noqa: FURB136  (faster)
                self._usual.append((all_ + 0.05) / (left + 1))
                waiting -= all_
        return self._usual


class WorthTable:
    """The worth of chains of one kind, from the counts at one time. The worth is computed when it is first needed."""

    __slots__ = ("_chances", "_ended", "_everybody", "_prior", "_returned", "computed")

    def __init__(self, ended: float, returned: list[float], prior: float, everybody: _Everybody | WorthTable) -> None:
        """Keep the counts.

        `returned` has the returns of `ended` chains, by bin of idle time. `everybody` counts as much as `prior` chains.
        """
        self._chances: list[float] | None = None
        self._ended, self._returned, self._prior, self._everybody = ended, returned, prior, everybody
        self.computed: list[float] | None = None
        """The result of `worths`, or None before its first call."""

    def worths(self) -> list[float]:
        """Return the expected hits per second and chunk of a waiting chain, by bin of the time that it has waited."""
        if self.computed is None:
            self.computed = _indices(self.usual())
        return self.computed

    def usual(self) -> list[float]:
        """Return, by bin, the chance that a chain returns within the bin if it has not returned before."""
        if self._chances is None:
            waiting, prior, chances = self._ended, self._prior, list[float]()
            for mine, of_all in zip(self._returned, self._everybody.usual(), strict=True):
                left = waiting if waiting > mine else mine  # noqa: FURB136  (as above)
                chance = (mine + prior * of_all) / (left + prior)
                chances.append(chance if chance < CHANCE_MAX else CHANCE_MAX)  # noqa: FURB136
                waiting -= mine
            self._chances = chances
        return self._chances


class _Useless(WorthTable):
    """The table of a kind whose chains are worth nothing."""

    __slots__ = ()

    def __init__(self) -> None:
        self.computed = [0.0] * BINS


def _as_hinted(kind: int) -> list[float]:
    """Return how many of `PRIOR_TURNS` chains return in each bin if hinted times are right within a factor of two."""
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

    `chances` has, for each bin, the probability that a chain returns within the bin if it has not returned before. The
    indices are computed from the last bin back to the first. A bin is joined with the following bins while their index
    is larger than its own, because waiting longer then gains more hits per second.
    """
    out, ahead, log1p = list[float](), list[tuple[float, float, float]](), math.log1p
    for chance, width_s in zip(reversed(chances), _WIDTHS_BACK_S, strict=True):
        hits, waits_s, stays = chance, -width_s * chance / log1p(-chance), 1 - chance
        while ahead:  # (hits, seconds, chance that the wait is longer than these bins)
            more, longer_s, still = ahead[-1]
            if more * waits_s <= hits * longer_s:
                break
            hits, waits_s, stays = hits + stays * more, waits_s + stays * longer_s, stays * still
            ahead.pop()
        ahead.append((hits, waits_s, stays))
        out.append(hits / waits_s)
    return out[::-1]
