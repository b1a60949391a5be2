"""What a prefix-aware router knows of an engine: an index made of KV cache events alone, each of which it checks.

It hashes tokens and extra keys itself, as vLLM does. All that it needs besides is where each adapter is: vLLM's hash
covers an adapter's name and path, and its events name it only (`/v1/models` has both).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored, EventBatch, KVCacheEvent
    from vllm.v1.core.sched.scheduler import Scheduler

Place = tuple[str, int]
"""A medium, and a cache group."""


class Router:
    """Applies events in order. `problems` grows when they contradict each other, or lack what they must have."""

    def __init__(self, adapters: Mapping[str, str], hash_tokens: int = 0) -> None:
        """`adapters`: paths by name. `hash_tokens`: tokens per block hash; 0: as many as a block has, in all events."""
        self.adapters, self._hash_tokens = adapters, hash_tokens
        self.index: dict[Place, set[bytes]] = {}
        """Full hashes of the blocks that are held."""
        self.problems: list[str] = []
        self.extra_keys: dict[bytes, tuple[Any, ...] | None] = {}
        self._full: dict[Any, bytes] = {}  # by what events call a block: that is cut short by default
        self._parents: dict[tuple[Place, bytes], bytes | None] = {}

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Update the index with what an engine has published."""
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
            elif isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                held = self.index.setdefault((event.medium or "", event.group_idx or 0), set())
                gone = {self._full.get(name, b"") for name in event.block_hashes}
                if event.medium == "CPU" and not gone <= held:
                    self.problems.append(f"{len(gone - held)} blocks are removed that are not there")
                held -= gone

    def _stored(self, event: BlockStored) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import hash_block_tokens, maybe_convert_block_hash

        place = (event.medium or "", event.group_idx or 0)
        held = self.index.setdefault(place, set())
        extra = event.extra_keys or [None] * len(event.block_hashes)
        size, parent = event.block_size, None
        if event.parent_block_hash is not None:
            parent = self._full.get(event.parent_block_hash)
            if parent is None:
                self.problems.append(f"group {event.group_idx} of {event.medium}: a parent that nobody has announced")
                return
        if len(extra) != len(event.block_hashes) or len(event.token_ids) != size * len(event.block_hashes):
            self.problems.append(f"{event.medium}: tokens or extra keys are not those of every block")
            return
        step = min(self._hash_tokens or size, size)
        for i, name in enumerate(event.block_hashes):
            keys, before = self._tagged(event, extra[i]), parent
            if size > step and any(key[0] in {"mm", "prompt_embeds"} for key in keys or ()):
                parent = self._full.get(name)  # the keys are of the whole block: vLLM's own events have its parts
            else:
                for at in range(0, size, step):  # the name of a block that has several hashes is the last of them
                    tokens = event.token_ids[i * size + at : i * size + at + step]
                    parent = hash_block_tokens(sha256, parent, tokens, _from(keys, at))  # type: ignore[arg-type]
            if parent is None or maybe_convert_block_hash(parent) != name:
                self.problems.append(f"group {event.group_idx} of {event.medium}: a block's hash is not its event's")
                return
            if event.medium == "CPU" and parent in held:
                self.problems.append(f"group {event.group_idx} of {event.medium}: a block is announced twice")
            self._full[name], self._parents[place, parent] = parent, before
            self.extra_keys[parent] = keys
            held.add(parent)

    def promised(self, place: Place, hashes: Sequence[bytes]) -> int:
        """Return how many of a prompt's first hashes are held, up to a block whose predecessors are held, too."""
        held = self.index.get(place, set())
        for many in range(len(hashes), 0, -1):
            block: bytes | None = hashes[many - 1]
            while block in held:
                block = self._parents[place, block]
            if block is None:
                return many
        return 0

    def _tagged(self, event: BlockStored, keys: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        """Return extra keys as they are hashed: events leave out what each one is, and where an adapter is."""
        if keys is None:
            return None
        left, out = list(keys), list[tuple[Any, ...]]()
        if event.lora_name is not None:
            out.append(("lora", str(left.pop(0)), self.adapters[event.lora_name]))
        for key in left:
            if isinstance(key, bytes):
                out.append(("prompt_embeds", key))
            else:
                out.append(("cache_salt", key) if isinstance(key, str) else ("mm", *key))
        return tuple(out)


def _from(keys: tuple[Any, ...] | None, token: int) -> tuple[Any, ...] | None:
    """Return those of a block's extra keys that are hashed from its token `token` on: a salt is at the beginning."""
    return tuple(key for key in keys or () if not token or key[0] != "cache_salt") or None


def listening(scheduler: Scheduler, adapters: Mapping[str, str]) -> Router:
    """Return a router that gets what `scheduler` publishes, instead of anybody else."""
    router = Router(adapters, scheduler.hash_block_size)

    def publish(batch: EventBatch) -> None:
        router.apply(batch.events)

    scheduler.kv_event_publisher.publish = publish  # type: ignore[method-assign]
    return router
