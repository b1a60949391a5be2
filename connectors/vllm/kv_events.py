"""vLLM's KV cache events for what kvpipe holds, for prefix-aware routers (medium ``CPU``).

A lookup finds a chunk at the chunk's marks and nowhere else: at its end, and where a prompt or an answer has ended in
it. So each mark is announced as one block, from the chunk's first token to the mark, however many of the engine's
blocks that is. A block is removed when its mark goes. Events contain everything that a block's hash covers, as vLLM's
own do: a consumer that receives all of them has the catalog's index.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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


class AnnouncedBlock(NamedTuple):
    """A chunk's tokens up to one of its marks, and all that their hash covers."""

    hash: BlockHash
    parent: BlockHash | None
    tokens: array[int]
    extra_keys: tuple[Any, ...] | None
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
        """`hash_tokens`: tokens per block hash."""
        self._hashes_per_unit, self._hash_tokens = geometry.unit_tokens // hash_tokens, hash_tokens
        self._ahead = -(-geometry.ahead_tokens // hash_tokens)
        self._states = geometry.states
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        self._kinds = [(get_kv_cache_spec_kind(one).value, get_kv_cache_spec_sliding_window(one)) for one in specs]
        self._held: Counter[tuple[int, BlockHash]] = Counter()
        self._of: dict[Chunk, dict[bytes, AnnouncedBlock]] = {}  # of each chunk, by the key of the mark
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
        """A piece of `chunk`, which begins at unit `base` of `request`'s prefix, has landed: its marks have changed.

        Events have the salt in clear, also when the chunk is announced again: there are none with one that is too long.
        """
        if len(request.cache_salt or "") > SALT_KEPT_CHARS_MAX:
            return
        announced = self._of.setdefault(chunk, {})
        marks = {mark.key: mark.units for mark in chunk.marks}
        self._remove(chunk.group, [announced.pop(key) for key in [*announced] if key not in marks])
        for key, units in marks.items():
            if key in announced:
                continue
            block = self._block(request, chunk.group, base, base + units)
            if block is not None and key.startswith(block.hash):  # an adapter's key is longer
                announced[key] = block
                self._announce(chunk.group, block)

    def dropped(self, chunk: Chunk) -> None:
        """`chunk` cannot be found any more."""
        self._remove(chunk.group, self._of.pop(chunk, {}).values())

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
        for chunk, announced in self._of.items():
            for block in announced.values():
                self._announce(chunk.group, block)

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _block(self, request: Request, group: int, base: int, stop: int) -> AnnouncedBlock | None:
        """Describe units [base, stop) of the prefix, up to the last token that the key at `stop` hashes.

        Returns None if a session has cut its tokens meanwhile.
        """
        ahead = 0 if group in self._states else self._ahead
        first, end = base * self._hashes_per_unit + (ahead if base else 0), stop * self._hashes_per_unit + ahead
        hashes: Sequence[BlockHash] = request.block_hashes
        if len(hashes) < end:
            return None
        start_token, end_token = first * self._hash_tokens, end * self._hash_tokens
        lora = request.lora_request
        return AnnouncedBlock(
            hash=hashes[end - 1],
            parent=hashes[first - 1] if first else None,
            tokens=array("q", request.all_token_ids[start_token:end_token]),
            extra_keys=generate_block_hash_extra_keys(request, start_token, end_token, 0)[0],
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            session=request.session_id,
        )

    def _announce(self, group: int, block: AnnouncedBlock) -> None:
        """Announce `block`, unless another chunk holds it for another content of the same adapter."""
        self._held[group, block.hash] += 1
        if self._held[group, block.hash] > 1:
            return
        kind, window = self._kinds[group]
        self._add(BlockStored(
            block_hashes=[maybe_convert_block_hash(block.hash)],
            parent_block_hash=maybe_convert_block_hash(block.parent) if block.parent is not None else None,
            token_ids=block.tokens.tolist(),
            block_size=len(block.tokens),
            lora_id=block.lora_id,
            medium=MEDIUM_CPU,
            lora_name=block.lora_name,
            extra_keys=to_event_extra_keys([block.extra_keys]),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            session_id=block.session,
        ))  # fmt: skip

    def _remove(self, group: int, blocks: Iterable[AnnouncedBlock]) -> None:
        """Announce that those of `blocks` cannot be found any more that no other chunk holds."""
        gone = []
        for block in blocks:
            self._held[group, block.hash] -= 1
            if not self._held[group, block.hash]:
                del self._held[group, block.hash]
                gone.append(maybe_convert_block_hash(block.hash))
        if gone:
            self._add(BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU, group_idx=group))

    def _add(self, event: KVCacheEvent) -> None:
        self._events.append(event)  # vLLM takes them after every step: bounded by what one publishes and evicts
