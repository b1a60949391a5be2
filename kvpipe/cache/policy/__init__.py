"""Eviction policies. `base.py` is the protocol, and `make_policy` creates a policy by its configuration name."""

from __future__ import annotations

from collections.abc import Callable

from kvpipe.cache.policy.base import Policy
from kvpipe.cache.policy.guard import GuardedPolicy, RescuedPolicy
from kvpipe.cache.policy.lru import Lru
from kvpipe.cache.policy.s3fifo import S3Fifo
from kvpipe.cache.policy.sessions import Sessions

__all__ = ["Lru", "Policy", "S3Fifo", "Sessions", "make_policy"]


def _raise(event: str, **fields: object) -> None:
    raise RuntimeError(f"{event}: {fields}")


def make_policy(name: str, slots: int, fault: Callable[..., object] = _raise) -> Policy:
    """Create the policy `name` for a pool of `slots` slots.

    If the policy fails, LRU replaces the policy, and then `fault(event, **fields)` is called once. Without `fault`, the
    method that failed raises RuntimeError.

    Raises:
        KeyError: no policy has this name.
        ConfigError: the policy cannot be created, or lacks a method. The message names the policy's package.
    """
    from kvpipe.inputs import plugins  # noqa: PLC0415  (it reads entry points: a node's holder does without)

    plugin = plugins.load(plugins.POLICIES, name)
    policy: Policy = plugin.make(slots)
    plugin.check(policy, Policy)
    if type(policy) is Lru:
        return policy
    guard = RescuedPolicy if name in plugins.own(plugins.POLICIES) else GuardedPolicy
    return guard(policy, name, fault, slots)
