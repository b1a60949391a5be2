"""An adapter from `BatchPolicy` calls to a policy that takes one chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence

from kvpipe.cache.policy.base import BatchPolicy, Evictable, Policy


class OneByOne:
    """A `BatchPolicy` that calls a `Policy` for each chunk."""

    def __init__(self, policy: Policy) -> None:
        """Pass all calls to `policy`."""
        self._policy = policy

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """See `BatchPolicy.insert_all`."""
        for chunk in chunks:
            self._policy.insert(chunk, hit=hit)

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.remove_all`."""
        for chunk in chunks:
            self._policy.remove(chunk)

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.refresh_all`."""
        for chunk in chunks:
            self._policy.refresh(chunk)


def batches(policy: Policy) -> BatchPolicy | OneByOne:
    """Return `policy` itself if it is a `BatchPolicy`, or else an adapter that calls `policy` for each chunk."""
    return policy if isinstance(policy, BatchPolicy) else OneByOne(policy)
