"""The keys of a prompt, for a lookup in tiers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

NAME_BYTES: Final = 32
"""The length of a chunk's name in bytes. vLLM's block hashes have the same length."""


class PrefixKeys(NamedTuple):
    """The keys under which tiers may hold chunks of a prefix.

    `keys[u]` is the key of the first u + 1 units. `groups` has the attention groups, whose last chunk may be shorter.
    `states[u]` is the key of the state after u + 1 units. If `states` is empty, the keys are equal to `keys`.
    `state_groups` has the groups of states. A request can use a boundary only if the states of all groups are found at
    this boundary. So the tiers are asked for other groups only at boundaries with a state of the first group. `full`
    has the groups of full attention. Tiers are not asked for boundaries after a missing chunk of such a group.
    """

    keys: Sequence[bytes]
    groups: Sequence[int]
    states: Sequence[bytes] = ()
    state_groups: Sequence[int] = ()
    full: Sequence[int] = ()


def chunk_name(key: bytes) -> bytes:
    """Return a chunk's name in tiers: its key, or the SHA-256 of a key that is longer than `NAME_BYTES` bytes.

    The key of a chunk with an adapter is longer, because the adapter's digest is appended to the prefix hash.
    """
    return hashlib.sha256(key).digest() if len(key) > NAME_BYTES else key
