"""The keys of a prompt, as a lookup in tiers needs them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

NAME_BYTES: Final = 32
"""Length of a chunk's name in bytes, equal to the length of vLLM's block hashes."""


class PrefixKeys(NamedTuple):
    """The keys under which tiers may hold chunks of a prefix.

    `keys[u]`: key of the first u + 1 units. `groups`: the attention groups, whose last chunk may be shorter.
    `states[u]`: key of the state after u + 1 units; empty: equal to `keys`. `state_groups`: the groups of states. A
    request can use a boundary only if the states of all groups are found there. So the tiers are asked for the other
    groups only at boundaries where the first group was found. `full`: the groups of full attention. Tiers are not asked
    for boundaries after a missing chunk of such a group.
    """

    keys: Sequence[bytes]
    groups: Sequence[int]
    states: Sequence[bytes] = ()
    state_groups: Sequence[int] = ()
    full: Sequence[int] = ()


def chunk_name(key: bytes) -> bytes:
    """Return a chunk's name in tiers, which has at most `NAME_BYTES` bytes: its key, or the SHA-256 of a longer key.

    The key of a chunk computed with an adapter is longer, because the adapter's digest is appended to the prefix hash.
    """
    return hashlib.sha256(key).digest() if len(key) > NAME_BYTES else key
