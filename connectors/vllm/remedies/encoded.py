"""Tracks whether vLLM's encoder cache may hold embeddings of media that old weights have computed.

The encoder cache keeps an image's embeddings after the image's requests have ended, until an eviction or a reset. KV
computed from embeddings of old weights depends on the old weights, even if the KV's request arrived after the change.

If LoRA adapters apply to the encoder, the cache identifies embeddings by the adapter's name. The cache may then return
embeddings of another adapter that had this name before, or of an older version of the adapter's files.
"""

from __future__ import annotations


class Encoded:
    """Tracks the embeddings in the encoder cache of one engine."""

    def __init__(self, *, adapts: bool = False) -> None:
        """Start with an empty encoder cache. `adapts` says that LoRA adapters apply to the encoder."""
        self._adapts = adapts
        self.living: dict[str, bool] = {}
        """By id of a living request with media to encode: whether the request's LoRA adapter applies to the encoder."""
        self._held = False
        self._doubted: bool | None = None  # whether the cache held embeddings when `doubted` was last called
        self.old = False
        """Whether the encoder cache may hold embeddings of old weights."""

    def began(self, request_id: str, *, adapted: bool = False) -> None:
        """Record a request with media, or with more media, to encode. `adapted`: the request has a LoRA adapter."""
        self.living[request_id] = adapted and self._adapts
        self._held = True

    def ended(self, request_id: str) -> None:
        """Record the end of a request. The request's embeddings stay in the cache."""
        self.living.pop(request_id, None)

    def doubted(self) -> None:
        """Record that weights may have changed, so that embeddings in the cache may be of the old weights."""
        self._doubted = self._held

    def weights_changed(self) -> None:
        """Record that weights have changed.

        If embeddings were cached at the last `doubted`, the cache has old embeddings.

        If `doubted` was not called since the last change, embeddings that are cached now count as old.
        """
        self.old |= self._held if self._doubted is None else self._doubted
        self._doubted = None

    def reset(self) -> None:
        """Record that the encoder cache was emptied. Living requests fill the cache again."""
        self.old, self._held = False, bool(self.living)
        if self._doubted:
            self._doubted = self._held

    def rests_on(self, request_id: str) -> bool:
        """Whether a request's KV may be computed from embeddings of old weights."""
        return self.old and request_id in self.living

    def unknown(self, request_id: str) -> bool:
        """Whether another version of the request's adapter may have computed the request's embeddings."""
        return self.living.get(request_id, False)
