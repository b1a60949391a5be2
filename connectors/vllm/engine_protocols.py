"""Adapts vLLM's block tables and the remedies for vLLM's faults to the protocols of `kvpipe.protocol.engine`.

vLLM's `Request`, `SchedulerOutput` and `KVCacheBlock` fit these protocols without an adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvpipe.connectors.vllm.remedies.admission import LoadAdmission
from kvpipe.connectors.vllm.remedies.encoded import Encoded
from kvpipe.connectors.vllm.remedies.invalid_blocks import InvalidBlocks
from kvpipe.connectors.vllm.remedies.overrun import overrun
from kvpipe.connectors.vllm.remedies.stale import CachedBlocks, Stale
from kvpipe.protocol.engine import Block, Recovery, Request, Step, Tables
from kvpipe.protocol.geometry import Geometry
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


class ManagedBlocks:
    """Reads and changes the block tables and the prefix cache of vLLM's cache manager.

    The object keeps no copy of the tables.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        """Wrap `manager`, the cache manager of the engine's scheduler."""
        self._manager = manager
        self._of_group: Sequence[SingleTypeKVCacheManager] = manager.coordinator.single_type_managers

    @property
    def groups(self) -> int:
        """The number of cache groups."""
        return len(self._of_group)

    def table(self, request_id: str, group: int) -> Sequence[Block]:
        """Return the request's block table in a cache group; empty if the request holds no blocks."""
        table: Sequence[Block] = self._of_group[group].req_to_blocks.get(request_id, ())
        return table

    def cached(self, request_id: str, group: int) -> int:
        """Return how many blocks at the beginning of a request's table the prefix cache holds or has held."""
        blocks: int = self._of_group[group].num_cached_block.get(request_id, 0)
        return blocks

    def knows(self, block_id: int, key: bytes) -> bool:
        """Whether the prefix cache has the block `block_id` under `key`. A new allocation removes a block's key."""
        from vllm.v1.core.kv_cache_utils import get_block_hash  # noqa: PLC0415  (slow; tests of the core run without vLLM)

        known = self._manager.block_pool.blocks[block_id].block_hash
        return known is not None and get_block_hash(known) == key

    def copied(self) -> Iterable[tuple[int, int]]:
        """Yield (source, copy) for each block that vLLM will copy for a request admitted since the last step."""
        for manager in self._of_group:
            for source, copy in manager._pending_cow_copies:  # noqa: SLF001
                yield source.block_id, copy.block_id

    def forget(self, block_ids: set[int]) -> None:
        """Remove these blocks from the prefix cache."""
        self._manager.evict_blocks(block_ids)

    def forget_all(self) -> None:
        """Remove every block from the prefix cache."""
        self._manager.evict_blocks(set(range(self._manager.block_pool.num_gpu_blocks)))

    def free(self) -> int:
        """Return the number of free blocks."""
        free: int = self._manager.block_pool.get_num_free_blocks()
        return free


def make_room(config: VllmConfig, geometry: Geometry) -> LoadAdmission:
    """Return the `LoadAdmission` for an engine with this configuration and geometry."""
    drafts = config.num_speculative_tokens
    reserved = 1 + drafts + config.num_lookahead_tokens if drafts else 0  # vLLM's own reservation uses the same number
    return LoadAdmission(
        geometry, config.max_in_flight_tokens, config.model_config.max_model_len, drafts, reserved_tokens=reserved
    )


class Remedies(Recovery):
    """Works around vLLM's faults when loads fail, blocks are short or weights change. Each scheduler side has one."""

    def __init__(self, geometry: Geometry, room: LoadAdmission, *, adapts_encoder: bool = False) -> None:
        """Start without blocks: the remedies act only after `bind`.

        `room` decides whether another asynchronous load fits. `adapts_encoder` says that LoRA adapters apply to the
        encoder.
        """
        self._room, self._geometry, self._states = room, geometry, geometry.states
        self.block_tokens = [group.block_tokens for group in geometry.groups]
        self._stale = Stale(self.block_tokens)
        self._invalid = InvalidBlocks(geometry.groups[0].block_tokens, len(geometry.groups))
        self.encoded = Encoded(adapts=adapts_encoder)
        self._blocks: CachedBlocks | None = None
        self._counters = Counters()

    def bind(self, blocks: CachedBlocks, counters: Counters) -> None:
        """Keep `blocks` and `counters` for later calls. Called before the first step."""
        self._blocks, self._counters = blocks, counters

    def may_wait(self, request: Request, waiting: Mapping[str, Request]) -> bool:
        """Whether enough blocks are free for the request's load. vLLM preempts no request that waits for a load."""
        return self._blocks is None or self._room.fits(request, waiting.values(), self._blocks)

    def admitted(self, request_id: str, tables: Tables) -> bool:
        """Whether vLLM gave the request KV of earlier weights, or embeddings for which `continued` returns True."""
        blocks = self._blocks
        if blocks is not None and self._stale.requests and self._stale.rests_on(request_id, tables, blocks):
            return True
        return self.continued(request_id)

    def continued(self, request_id: str) -> bool:
        """Whether a request continues with embeddings of old weights, or of an unknown version of its adapter.

        The check runs at every input of a session, because any input may be the first input with an image.
        """
        if request_id not in self.encoded.living:  # most requests have nothing to encode
            return False
        if self._blocks is not None and self.encoded.rests_on(request_id):
            self._stale.requests[request_id] = {}
            return True
        return self.encoded.unknown(request_id)

    def planned(self, block_ids: Collection[int]) -> None:
        """Stop counting these blocks as spoiled, because a newly planned load overwrites them."""
        if self._invalid.spoiled.clean:
            self._invalid.spoiled.discard(block_ids)

    def failed(self, block_ids: set[int], requests: Collection[str]) -> None:
        """Remove the blocks of a failed load from vLLM's prefix cache, so that no other request reads them."""
        if self._blocks is not None:
            self._invalid.failed(block_ids, requests, self._blocks)

    def given_away(self, block_ids: set[int]) -> None:
        """Stop counting these blocks as spoiled, because each new holder writes a block before it reads the block."""
        self.planned(block_ids)

    def begin_step(self, step: Step, requests: Iterable[Request], *, loading: bool) -> Mapping[str, Sequence[int]]:
        """Remove KV of old weights, and states under the key of a wrong boundary, from vLLM's prefix cache.

        Returns, by request, the spoiled blocks that `step` would read.
        """
        blocks = self._blocks
        if blocks is None:
            return {}
        if self._states and (wrong := overrun(step, requests, self._geometry)):
            blocks.forget(wrong)
        if not loading:
            self._invalid.left.clear()
        if self._stale.requests:
            try:
                self._stale.plan_step(step.preempted_req_ids or (), requests, blocks)
            except Exception as e:  # noqa: BLE001  (the spoiled blocks must be returned nevertheless)
                self._counters.fault("stale_blocks_not_forgotten", error=repr(e))
                self._stale.weights_changed(self._stale.requests, None)  # the next step removes their blocks again
        return self._invalid.failing_loads(step, requests, blocks) if self._invalid.spoiled.clean else {}

    def weights_changed(self, requests: Collection[str]) -> None:
        """Empty vLLM's prefix cache, because all KV in the cache is of earlier weights."""
        self.encoded.weights_changed()
        self._stale.weights_changed(requests, self._blocks)

    def finished(self, request_id: str, *, loading: bool) -> None:
        """Forget the request.

        If a sync load is still `loading`, remember the request's blocks until all loads are reported.
        """
        self._stale.leave(request_id, self._blocks)
        self.encoded.ended(request_id)
        if self._blocks is not None:
            self._invalid.finished(request_id, self._blocks, loading=loading)
