"""vLLM's KV cache events for the chunks that kvpipe holds, for prefix-aware routers.

Chunks in memory have the medium ``CPU``. Chunks in tiers have the medium ``STORAGE``, the tier's locality, and the
tier's name as owner.

A lookup finds a chunk only at the chunk's marks: at its end, and at each position where a prompt or an answer has
ended. So each mark is announced as one block, from the chunk's first token to the mark. The announced block may be
longer than the engine's blocks. The block is removed when its mark is removed. Like vLLM's own events, events contain
everything that a block's hash covers. A consumer that receives all events can rebuild the catalog's index.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvpipe.cache.chunks import Chunk
from kvpipe.cache.tenants import SALT_KEPT_CHARS_MAX
from kvpipe.connectors.vllm.block_notes import AnnouncedBlock, BlockMaker, NotedBlocks, read_note
from kvpipe.threads.adapter_files import KNOWN_MAX, remember

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvpipe.protocol.geometry import Geometry
    from kvpipe.tiers.guard import GuardedTier


class BlockPlace(NamedTuple):
    """The fields of a block's events that state where the block is."""

    medium: str
    locality: str | None = None
    ownership: str | None = None


MEMORY: Final = BlockPlace(MEDIUM_CPU)


def place_of(tier: GuardedTier) -> BlockPlace:
    """Return the place of a tier's blocks. An unknown locality is None."""
    return BlockPlace(MEDIUM_STORAGE, tier.spec.locality.upper() or None, tier.name)


class EndedPrompt:
    """The fields of a finished request that events need. The request's other data is dropped."""

    __slots__ = ("all_token_ids", "block_hashes", "cache_salt", "lora_request", "num_tokens", "session_id")
    mm_features, prompt_embeds = (), None

    def __init__(self, request: Request) -> None:
        """Copy the fields from `request`, which has no images and no embeddings."""
        for name in self.__slots__:
            setattr(self, name, getattr(request, name))


class KvEvents:
    """Collects the KV events of one engine until vLLM takes the events."""

    def __init__(
        self, cache: KVCacheConfig, geometry: Geometry, hash_tokens: int, tiers: Iterable[GuardedTier] = ()
    ) -> None:
        """Start without events. `hash_tokens` is the number of tokens per block hash."""
        self._tiers = [place_of(tier) for tier in tiers]
        self._blocks = BlockMaker(geometry, hash_tokens)
        self._noted, self._announces = NotedBlocks(), False
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        self._kinds = [(get_kv_cache_spec_kind(one).value, get_kv_cache_spec_sliding_window(one)) for one in specs]
        # By place, cache group and hash: the number of chunks that hold the block, and the block.
        self._held: dict[tuple[BlockPlace, int, BlockHash], tuple[int, AnnouncedBlock]] = {}
        self._of: dict[Chunk, dict[bytes, AnnouncedBlock]] = {}  # by chunk, then by key of the mark
        self._numbers: OrderedDict[tuple[str, str], int] = OrderedDict()  # of adapters, by name and path
        self._events: list[KVCacheEvent] = []

    def watch(self, manager: KVCacheManager, taken: Callable[[], AbstractContextManager[None]]) -> None:
        """Announce all blocks again whenever vLLM empties its own prefix cache.

        vLLM's event for the emptied cache names no medium, so consumers forget kvpipe's blocks too. `taken` returns a
        context manager that holds the turn (`kvpipe.features.orders`).
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

    def arrived(self, request: Request) -> None:
        """Remember this engine's number of the request's adapter, for the chunks that other engines save with it."""
        if (lora := request.lora_request) is not None:
            remember(self._numbers, (lora.lora_name, lora.lora_path), lora.adapter_id, KNOWN_MAX)

    def published(self, request: Request, chunk: Chunk, base: int) -> None:
        """Announce the changed marks of `chunk`, after a piece of the chunk was saved.

        The chunk begins at unit `base` of the prefix of `request`. Events contain the request's salt in clear. A chunk
        whose salt is longer than the limit is not announced.
        """
        if len(request.cache_salt or "") > SALT_KEPT_CHARS_MAX:
            return
        announced = self._of.setdefault(chunk, {})
        marks = {mark.key: mark.units for mark in chunk.marks}
        self._remove(MEMORY, chunk.group, [announced.pop(key) for key in [*announced] if key not in marks])
        for key, units in marks.items():
            if key in announced:
                continue
            block = self._blocks.block(request, chunk.group, base, base + units)
            if block is not None and key.startswith(block.hash):  # a key with an adapter's digest is longer
                announced[key] = block
                self._announce(MEMORY, chunk.group, block)

    def noted(self, chunk: Chunk, note: bytes) -> None:
        """Keep the block of a published chunk of a node's memory until `announce` is called."""
        block = read_note(note)
        if block is not None and chunk.tail.startswith(block.hash):
            self._noted.add(chunk, block)

    def announce(self) -> None:
        """Let the next `take` announce some of the noted blocks, parents first.

        The blocks wait for `take`, because vLLM takes events once per step, but a node's memory is polled more often
        than that, and also while vLLM takes no steps.
        """
        self._announces = True

    def dropped(self, chunk: Chunk) -> None:
        """Announce that lookups can no longer find `chunk`."""
        self._noted.pop(chunk)
        self._remove(MEMORY, chunk.group, self._of.pop(chunk, {}).values())

    def block(self, chunk: Chunk, key: bytes) -> AnnouncedBlock | None:
        """Return the block of `key`, a mark's key of `chunk`, or None if the block is unknown."""
        block = self._of.get(chunk, {}).get(key)
        return self._noted.block(chunk) if block is None and key == chunk.tail else block

    def stored(self, tier: int, group: int, block: AnnouncedBlock) -> None:
        """Announce a block that a tier has."""
        self._announce(self._tiers[tier], group, block)

    def gone(self, tier: int, group: int, blocks: Sequence[AnnouncedBlock]) -> None:
        """Announce that a tier does not have `blocks` any more."""
        self._remove(self._tiers[tier], group, blocks)

    def kept(self, request: Request) -> Request | None:
        """Return the fields that events need after the request's end, or None with media, embeddings or a long salt."""
        long = len(request.cache_salt or "") > SALT_KEPT_CHARS_MAX
        if request.mm_features or request.prompt_embeds is not None or long:
            return None
        return cast("Request", EndedPrompt(request))

    def cleared(self) -> None:
        """Announce all held blocks again, because consumers have forgotten them."""
        self._events.clear()
        for (place, group, _), (_, block) in self._held.items():
            self._add_stored(place, group, block)

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call, in order."""
        noted, self._announces = self._noted.take() if self._announces else (), False
        for chunk, block in noted:
            self._of[chunk] = {chunk.tail: block}
            self._announce(MEMORY, chunk.group, block)
        events, self._events = self._events, []
        return events

    def _announce(self, place: BlockPlace, group: int, block: AnnouncedBlock) -> None:
        """Announce `block`, unless the block is announced for a chunk with another version of the same adapter."""
        chunks, first = self._held.get((place, group, block.hash), (0, block))
        self._held[place, group, block.hash] = chunks + 1, first
        if not chunks:
            self._add_stored(place, group, block)

    def _add_stored(self, place: BlockPlace, group: int, block: AnnouncedBlock) -> None:
        kind, window = self._kinds[group]
        self._add(BlockStored(
            block_hashes=[maybe_convert_block_hash(block.hash)],
            parent_block_hash=maybe_convert_block_hash(block.parent) if block.parent is not None else None,
            token_ids=block.tokens.tolist(),
            block_size=len(block.tokens),
            lora_id=self._number(block),
            medium=place.medium,
            lora_name=block.lora_name,
            extra_keys=to_event_extra_keys([block.extra_keys]),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            locality=place.locality,
            ownership=place.ownership,
            session_id=block.session,
        ))  # fmt: skip

    def _number(self, block: AnnouncedBlock) -> int | None:
        """Return this engine's number of the block's adapter, or None if no request of this engine has named it."""
        if block.lora_id is None and block.adapter is not None:
            return self._numbers.get(block.adapter)
        return block.lora_id

    def _remove(self, place: BlockPlace, group: int, blocks: Iterable[AnnouncedBlock]) -> None:
        """Announce the removal of the `blocks` that no other chunk holds in this place."""
        gone = []
        for block in blocks:
            chunks, first = self._held.pop((place, group, block.hash))
            if chunks > 1:
                self._held[place, group, block.hash] = chunks - 1, first
            else:
                gone.append(maybe_convert_block_hash(block.hash))
        if gone:
            self._add(BlockRemoved(
                block_hashes=gone, medium=place.medium, group_idx=group, locality=place.locality,
                ownership=place.ownership,
            ))  # fmt: skip

    def _add(self, event: KVCacheEvent) -> None:
        # the list stays short, because each step empties it with `take`, and an idle engine announces no blocks
        self._events.append(event)
