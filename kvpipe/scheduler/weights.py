"""The scheduler side's knowledge of the engine's weights: a digest that every rank reports.

After any call that may have changed the weights, the digest is in doubt. Nothing is found and nothing is saved until
every rank has digested its weights again, at the beginning of a step. If the weights have changed, every chunk is
forgotten, and tiers are used under the namespace of the new weights. An engine that later loads its old weights again
finds its old chunks in tiers again.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpipe.trace.log import Counters


class Weights:
    """The digest of one engine's weights, and whether that digest is in doubt. Used on the scheduler's thread only."""

    def __init__(self, ranks: int, counters: Counters) -> None:
        """Start without digests, for `ranks` ranks."""
        self._ranks, self._counters, self.awaited = ranks, counters, False
        """`awaited` says that the ranks report for the first time with a step, and have not reported yet.

        Nothing is found or saved before the ranks have reported.
        """
        self.asleep = False
        """Whether the ranks' memory is released (vLLM's sleep mode), so that no rank may read its weights now."""
        self.digest = ""
        """The digest of all ranks' weights. It is "" if the weights of some rank are unknown."""
        self._question = self._answered = self._sent = 0
        self._known = False

    @property
    def doubtful(self) -> bool:
        """Whether the weights may differ from the weights of `digest`, or no rank has reported yet."""
        return self.awaited or self._answered < self._question

    def know(self, reports: Iterable[str]) -> bool:
        """Record the digests of the ranks' weights, in the order of the ranks.

        Returns whether the weights have changed. The first call returns False. A later call means that the engine has
        started its ranks again.
        """
        before, self.digest = self.digest, _together(reports)
        known, self._known = self._known, True
        return known and (not self.digest or self.digest != before)

    def suspect(self, why: str = "") -> None:
        """Note that a call may have changed the weights. `why` names the call in the counter."""
        self._question += 1
        self._counters.count("weights_suspected", why)

    def next_question(self) -> int:
        """Return the number of the question that the next step sends to the ranks, or 0 if it sends no question."""
        if self.asleep or self._sent == self._question or not self.doubtful:
            return 0
        self._sent = self._question
        return self._question

    def answered(self, reports: dict[int, tuple[int, str]]) -> bool:
        """Process the ranks' answers: (question, digest of the weights) by rank.

        Returns whether the weights have changed. Every answer is used, even if a newer question is open, because steps
        were computed with the reported weights.
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
