"""Which weights the engine has, as its scheduler side knows it: reported by every rank, doubted, asked for again.

Whatever may have changed them makes them doubtful: nothing is found and nothing saved until every rank has read its
weights again, at the beginning of a step. If they are others, everything is forgotten, and what is kept from now on has
another name: that of the new weights, so that who goes back to the old ones finds what was kept of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpipe.trace.log import Counters


class Weights:
    """One per engine, on the scheduler's thread."""

    def __init__(self, ranks: int, counters: Counters) -> None:
        """Nothing is known."""
        self._ranks, self._counters = ranks, counters
        self.digest = ""
        """Of all ranks' weights; empty: some rank's are not known."""
        self._question = self._answered = self._sent = 0
        self._known = False

    @property
    def doubtful(self) -> bool:
        """Whether they may be others than those of `digest`."""
        return self._answered < self._question

    def know(self, reports: Iterable[str]) -> bool:
        """Take the digests of the ranks' weights, in the ranks' order. Returns whether they are others than before.

        An engine may start its ranks once more.
        """
        before, self.digest = self.digest, _together(reports)
        known, self._known = self._known, True
        return known and (not self.digest or self.digest != before)

    def suspect(self, why: str = "") -> None:
        """Something has happened that may have changed them."""
        self._question += 1
        self._counters.count("weights_suspected", why)

    def ask(self) -> int:
        """Return the question that the next step takes to the ranks; 0: none."""
        if self._sent == self._question or not self.doubtful:
            return 0
        self._sent = self._question
        return self._question

    def answered(self, reports: dict[int, tuple[int, str]]) -> bool:
        """Take question and digest of the weights, by rank. Returns whether the weights are others than before.

        Every answer counts, also one that is overtaken by another question: steps were computed with those weights.
        """
        if len(reports) < self._ranks:
            self._counters.fault("weights_not_on_all_ranks", ranks=self._ranks, reported=len(reports))
            digest = ""
        else:
            digest = _together(digest for _, (_, digest) in sorted(reports.items()))
        self._answered = max(self._answered, *(question for question, _ in reports.values()))
        before, self.digest = self.digest, digest
        changed = not digest or digest != before
        self._counters["weights_changed" if changed else "weights_unchanged"] += 1
        return changed


def _together(reports: Iterable[str]) -> str:
    digests = list(reports)
    return ":".join(digests) if digests and all(digests) else ""
