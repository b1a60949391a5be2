"""Eviction policies. `base.py` is the protocol; `make_policy` builds one by its configuration name."""

from collections.abc import Callable

from kvpipe.policy.base import Policy
from kvpipe.policy.lru import Lru
from kvpipe.policy.s3fifo import S3Fifo

__all__ = ["Lru", "Policy", "S3Fifo", "make_policy"]


def make_policy(name: str, slots: int) -> Policy:
    """Build policy `name` for a pool of `slots` chunks. Raises KeyError for an unknown name."""
    policies: dict[str, Callable[[], Policy]] = {"lru": Lru, "s3fifo": lambda: S3Fifo(slots)}
    return policies[name]()
