"""A request's chunks at once, to a policy that takes one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from kvpipe.cache.policy.base import BatchPolicy, Evictable, Policy


class OneByOne:
    """Hands on each chunk by itself."""

    def __init__(self, policy: Policy) -> None:
        """To `policy`."""
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
    """Return `policy` if it takes a request's chunks at once, else what hands them on one by one."""
    return policy if isinstance(policy, BatchPolicy) else OneByOne(policy)
