"""vLLM's KV cache events for what kvpipe holds, for prefix-aware routers (medium ``CPU``).

A block is announced when the first chunk that holds it can be found, and removed with the last one. Events contain
everything that a block's hash covers, as vLLM's own do: a consumer that receives all of them has the catalog's index.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvpipe.cache.catalog import Chunk
from kvpipe.cache.tenants import SALT_KEPT_CHARS_MAX

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvpipe.geometry import Geometry


class AnnouncedBlocks(NamedTuple):
    """Blocks of one prefix that lie in one chunk, one after the other, and all that their hashes cover."""

    hashes: list[BlockHash]
    parent: BlockHash | None
    tokens: array[int]
    extra_keys: list[tuple[Any, ...] | None]
    lora_id: int | None
    lora_name: str | None
    session: str | None


class EndedPrompt:
    """What events need of a request that is over, without whatever else its client has sent with it."""

    __slots__ = ("all_token_ids", "block_hashes", "cache_salt", "lora_request", "num_tokens", "session_id")
    mm_features, prompt_embeds = (), None

    def __init__(self, request: Request) -> None:
        """`request`: one without pictures and embeddings."""
        for name in self.__slots__:
            setattr(self, name, getattr(request, name))


class KvEvents:
    """Collects events until vLLM takes them."""

    def __init__(self, cache: KVCacheConfig, geometry: Geometry, hash_tokens: int) -> None:
        """`hash_tokens`: tokens per block hash; events describe blocks of this size."""
        self.blocks_per_unit, self._hash_tokens = geometry.unit_tokens // hash_tokens, hash_tokens
        self._ahead = -(-geometry.ahead_tokens // hash_tokens)
        self._states = geometry.states
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        self._kinds = [(get_kv_cache_spec_kind(one).value, get_kv_cache_spec_sliding_window(one)) for one in specs]
        self._held: Counter[tuple[int, BlockHash]] = Counter()
        self._of: dict[Chunk, list[AnnouncedBlocks]] = {}
        self._events: list[KVCacheEvent] = []

    def watch(self, manager: KVCacheManager, taken: Callable[[], AbstractContextManager[None]]) -> None:
        """Announce all blocks again when vLLM empties its own cache: its event has no medium, so consumers forget all.

        `taken`: takes the turn meanwhile (`kvpipe.scheduler.orders`).
        """
        reset = manager.reset_prefix_cache

        @functools.wraps(reset)
        def watched() -> bool:
            done = reset()
            if done:
                with taken():
                    self.cleared()
            return done

        manager.reset_prefix_cache = watched  # type: ignore[method-assign]

    def published(self, request: Request, chunk: Chunk, base: int) -> None:
        """A piece of `chunk`, which begins at unit `base` of `request`'s prefix, has landed.

        Events have the salt in clear, also when the chunk is announced again: there are none with one that is too long.
        """
        if len(request.cache_salt or "") > SALT_KEPT_CHARS_MAX:
            return
        known = self._of.get(chunk, ())
        first = base * self.blocks_per_unit + sum(len(blocks.hashes) for blocks in known)
        stop = (base + chunk.marks[-1].units) * self.blocks_per_unit
        end = stop if chunk.group in self._states else stop + self._ahead
        last = request.block_hashes[end - 1 : end]
        if first >= stop or not last or not chunk.marks[-1].key.startswith(last[0]):  # an adapter's key is longer
            return  # found no further than before; or a session has cut its tokens meanwhile
        blocks = self._blocks(request, first, stop)
        self._of.setdefault(chunk, []).append(blocks)
        self._announce(chunk.group, blocks)

    def dropped(self, chunk: Chunk) -> None:
        """`chunk` cannot be found any more."""
        gone = []
        for key in (key for blocks in self._of.pop(chunk, ()) for key in blocks.hashes):
            self._held[chunk.group, key] -= 1
            if not self._held[chunk.group, key]:
                del self._held[chunk.group, key]
                gone.append(maybe_convert_block_hash(key))
        if gone:
            self._add(BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU, group_idx=chunk.group))

    def kept(self, request: Request) -> Request | None:
        """Return what events need of a request after its end; None: pictures, embeddings, long salts are not kept."""
        long = len(request.cache_salt or "") > SALT_KEPT_CHARS_MAX
        if request.mm_features or request.prompt_embeds is not None or long:
            return None
        return cast("Request", EndedPrompt(request))

    def cleared(self) -> None:
        """Consumers have forgotten all blocks: announce all that is held."""
        self._held.clear()
        self._events.clear()
        for chunk, held in self._of.items():
            for blocks in held:
                self._announce(chunk.group, blocks)

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _blocks(self, request: Request, first: int, stop: int) -> AnnouncedBlocks:
        size, features, extra = self._hash_tokens, 0, []
        for start in range(first * size, stop * size, size):
            keys, features = generate_block_hash_extra_keys(request, start, start + size, features)
            extra.append(keys)
        hashes: Sequence[BlockHash] = request.block_hashes
        lora = request.lora_request
        return AnnouncedBlocks(
            hashes=list(hashes[first:stop]),
            parent=hashes[first - 1] if first else None,
            tokens=array("q", request.all_token_ids[first * size : stop * size]),
            extra_keys=extra,
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            session=request.session_id,
        )

    def _announce(self, group: int, blocks: AnnouncedBlocks) -> None:
        """Announce those of `blocks` that no other chunk holds."""
        self._held.update((group, key) for key in blocks.hashes)
        new = [i for i, key in enumerate(blocks.hashes) if self._held[group, key] == 1]
        if not new:
            return
        at = new[0]  # what is held already is the beginning: other chunks hold prefixes
        parent = blocks.hashes[at - 1] if at else blocks.parent
        kind, window = self._kinds[group]
        self._add(BlockStored(
            block_hashes=[maybe_convert_block_hash(key) for key in blocks.hashes[at:]],
            parent_block_hash=maybe_convert_block_hash(parent) if parent is not None else None,
            token_ids=blocks.tokens[at * self._hash_tokens :].tolist(),
            block_size=self._hash_tokens,
            lora_id=blocks.lora_id,
            medium=MEDIUM_CPU,
            lora_name=blocks.lora_name,
            extra_keys=to_event_extra_keys(blocks.extra_keys[at:]),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            session_id=blocks.session,
        ))  # fmt: skip

    def _add(self, event: KVCacheEvent) -> None:
        self._events.append(event)  # vLLM takes them after every step: bounded by what one publishes and evicts
