"""Helpers that read the chains of a policy of sessions."""

from __future__ import annotations

from kvpipe.cache.policy import Sessions
from kvpipe.cache.policy.base import Evictable
from kvpipe.cache.policy.chain import Chain


def chain_of(policy: Sessions, chunk: Evictable) -> Chain:
    """Return the chain of a chunk, which the policy knows whether or not a request holds the chunk."""
    chain = policy._chains[chunk.place]
    assert chain is not None
    return chain


def chains(policy: Sessions) -> set[Chain]:
    """Return all chains that still have a chunk."""
    return {chain for chain in policy._chains if chain is not None}
