"""vLLM's KV cache events for what kvpipe holds, so that prefix-aware routers see it (medium ``CPU``).

A block is announced when the first chunk that holds it can be found, and removed with the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvpipe.catalog import Chunk, Piece

if TYPE_CHECKING:
    from vllm.v1.request import Request


class KvEvents:
    """Collects events until vLLM takes them."""

    def __init__(self, unit_tokens: int, hash_tokens: int) -> None:
        """`hash_tokens`: tokens per block hash, which is what a router calls a block."""
        self._per_unit, self._hash_tokens = unit_tokens // hash_tokens, hash_tokens
        self._held: Counter[tuple[int, bytes]] = Counter()
        self._of: dict[Chunk, list[bytes]] = {}
        self._events: list[KVCacheEvent] = []

    def published(self, request: Request, piece: Piece) -> None:
        """`piece`, of a chunk of `request`'s prefix, can be found now."""
        chunk, group = piece.chunk, piece.chunk.group
        first = (piece.base + piece.start) * self._per_unit
        stop = (piece.base + piece.stop) * self._per_unit
        hashes: Sequence[bytes] = request.block_hashes[first:stop]
        self._of.setdefault(chunk, []).extend(hashes)
        self._held.update((group, key) for key in hashes)
        new = [i for i, key in enumerate(hashes) if self._held[group, key] == 1]
        if new:  # what is held already is the beginning: other chunks hold prefixes
            self._stored(request, group, first + new[0], stop)

    def dropped(self, chunk: Chunk) -> None:
        """`chunk` cannot be found any more."""
        gone = []
        for key in self._of.pop(chunk, ()):
            self._held[chunk.group, key] -= 1
            if not self._held[chunk.group, key]:
                del self._held[chunk.group, key]
                gone.append(maybe_convert_block_hash(key))
        if gone:
            self._add(BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU, group_idx=chunk.group))

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _stored(self, request: Request, group: int, first: int, stop: int) -> None:
        hashes, lora = request.block_hashes, request.lora_request
        self._add(BlockStored(
            block_hashes=[maybe_convert_block_hash(key) for key in hashes[first:stop]],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * self._hash_tokens : stop * self._hash_tokens]),
            block_size=self._hash_tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            group_idx=group,
        ))  # fmt: skip

    def _add(self, event: KVCacheEvent) -> None:
        self._events.append(event)  # vLLM takes them after every step: bounded by what one publishes and evicts
