"""Embeddings of images and such in vLLM's encoder cache, when weights change.

It keeps an image's embeddings after its requests have ended, until room is needed or somebody resets it. What is
computed from those of weights that are gone is of the old weights in part, though its request has come after.

Where adapters are part of the encoder, too, it keeps embeddings by an adapter's name: those of another one that had the
name before, or of its files as they were, are taken for its own.
"""

from __future__ import annotations


class Encoded:
    """One per engine."""

    def __init__(self, *, adapts: bool = False) -> None:
        """Start with an empty encoder cache. `adapts`: LoRA adapters apply to the encoder."""
        self._adapts = adapts
        self.living: dict[str, bool] = {}
        """Living requests with something to encode, by id: whether their LoRA adapter applies to the encoder."""
        self._held = False
        self._doubted: bool | None = None  # whether anything was there when weights were last doubted
        self.old = False
        """Whether the encoder cache may hold embeddings of old weights."""

    def began(self, request_id: str, *, adapted: bool = False) -> None:
        """A request has arrived with something to encode, or with more of it. `adapted`: it has an adapter."""
        self.living[request_id] = adapted and self._adapts
        self._held = True

    def ended(self, request_id: str) -> None:
        """A request is over; its embeddings stay in the cache."""
        self.living.pop(request_id, None)

    def doubted(self) -> None:
        """Weights may have changed: embeddings in the cache may be of the old ones."""
        self._doubted = self._held

    def weights_changed(self) -> None:
        """Weights have changed: embeddings that were in the cache when they were doubted, or are now, are old."""
        self.old |= self._held if self._doubted is None else self._doubted
        self._doubted = None

    def reset(self) -> None:
        """The encoder cache was emptied; living requests fill it again."""
        self.old, self._held = False, bool(self.living)
        if self._doubted:
            self._doubted = self._held

    def rests_on(self, request_id: str) -> bool:
        """Whether a request may be computed from embeddings of old weights."""
        return self.old and request_id in self.living

    def unknown(self, request_id: str) -> bool:
        """Whether a request's embeddings may be of another version of its adapter."""
        return self.living.get(request_id, False)
