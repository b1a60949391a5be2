"""The rules of a node's memory, which hold for all its engines. They lie in the memory's first page.

The holder that makes the memory writes the rules, so later holders of the memory keep them.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import Final

import msgspec

from kvpipe.node.clients import RefusedError
from kvpipe.node.layout import PAGE_BYTES

DEFAULT_POLICY: Final = "lru"
"""The eviction policy if neither the holder nor the engine that makes the memory names one."""
_AT: Final = 1024
_HEAD: Final = struct.Struct("<II")


class NodeRules(msgspec.Struct, frozen=True):
    """The rules of a memory. `policy` is the name of the eviction policy."""

    policy: str = DEFAULT_POLICY


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(NodeRules)


def write_rules(fd: int, rules: NodeRules) -> None:
    """Write the rules of the memory with the descriptor `fd`."""
    raw = _encoder.encode(rules)
    os.pwrite(fd, _HEAD.pack(len(raw), zlib.crc32(raw)) + raw, _AT)


def rules_of(fd: int) -> NodeRules:
    """Return the rules of the memory with the descriptor `fd`. A memory without whole rules has the default rules."""
    raw = os.pread(fd, PAGE_BYTES - _AT, _AT).ljust(_HEAD.size, b"\0")
    size, check = _HEAD.unpack_from(raw)
    body = raw[_HEAD.size : _HEAD.size + size]
    try:
        return _decoder.decode(body) if zlib.crc32(body) == check and body else NodeRules()
    except msgspec.DecodeError:
        return NodeRules()


def check_policy(policy: str) -> None:
    """Raise RefusedError if this process does not have the policy `policy`, which another package may register."""
    if policy == DEFAULT_POLICY:
        return
    from kvpipe.inputs import plugins  # noqa: PLC0415  (a holder that evicts by the default policy starts without it)

    known = plugins.names(plugins.POLICIES)
    if policy not in known:
        raise RefusedError(
            f"the node's holder has no eviction policy {policy!r} (it has {', '.join(known)}); install the policy's "
            "package where the holder runs, and restart the holder"
        )
