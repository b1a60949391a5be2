"""The scheduler side's knowledge of the engine's weights: a digest that every rank reports.

After any call that may have changed the weights they are doubtful: nothing is found and nothing is saved until every
rank has digested its weights again, at the beginning of a step. If they have changed, every chunk is forgotten, and
tiers are used under the namespace of the new weights. An engine that gets its old weights back finds its old chunks in
tiers again.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpipe.trace.log import Counters


class Weights:
    """One per engine, on the scheduler's thread."""

    def __init__(self, ranks: int, counters: Counters) -> None:
        """Start without digests, of `ranks` ranks."""
        self._ranks, self._counters, self.awaited = ranks, counters, False
        """`awaited`: the ranks' first reports come with a step, and have not come. Nothing is found or saved before."""
        self.digest = ""
        """The digest of all ranks' weights; "": some rank's weights are not known."""
        self._question = self._answered = self._sent = 0
        self._known = False

    @property
    def doubtful(self) -> bool:
        """Whether the weights may differ from those of `digest`, or no rank has reported yet."""
        return self.awaited or self._answered < self._question

    def know(self, reports: Iterable[str]) -> bool:
        """Take the digests of the ranks' weights, in the ranks' order. Returns whether they have changed.

        False at the first call; later ones come from an engine that has started its ranks again.
        """
        before, self.digest = self.digest, _together(reports)
        known, self._known = self._known, True
        return known and (not self.digest or self.digest != before)

    def suspect(self, why: str = "") -> None:
        """A call may have changed the weights; `why` names it, for the counter."""
        self._question += 1
        self._counters.count("weights_suspected", why)

    def ask(self) -> int:
        """Return the number of the question that goes to the ranks with the next step; 0: none."""
        if self._sent == self._question or not self.doubtful:
            return 0
        self._sent = self._question
        return self._question

    def answered(self, reports: dict[int, tuple[int, str]]) -> bool:
        """Take (question, digest of the weights) by rank. Returns whether the weights have changed.

        Every answer counts, even if another question is open already: steps were computed with those weights.
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
