"""A prefix-aware router that indexes an engine from KV cache events alone, and checks each event.

The router hashes tokens and extra keys itself, as vLLM does. In addition to events, the router needs only the path of
each adapter. vLLM's hash covers an adapter's name and path, but vLLM's events have only the name (`/v1/models` has
both).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventBatch, KVCacheEvent
    from vllm.v1.core.sched.scheduler import Scheduler

MediumGroup = tuple[str, int]
"""(medium, cache group). If the medium has an owner, the text is "medium/owner"."""


class Router:
    """Applies events in order. `problems` gets an entry if events contradict each other, or lack a required field."""

    def __init__(self, adapters: Mapping[str, str], hash_tokens: int = 0) -> None:
        """Start without blocks. `adapters` maps names to paths.

        `hash_tokens` is the number of tokens per block hash; 0: each block has one hash.
        """
        self.adapters, self._hash_tokens = adapters, hash_tokens
        self.index: dict[MediumGroup, set[bytes]] = {}
        """Full hashes of the blocks that are held."""
        self.problems: list[str] = []
        self.extra_keys: dict[bytes, tuple[Any, ...] | None] = {}
        self._full: dict[Any, bytes] = {}  # full hashes, by the block names in events, which are shortened by default
        self._routed: dict[Any, bytes] = {}  # full hashes of the prompts that were routed, by their block names
        self._parents: dict[tuple[MediumGroup, bytes], bytes | None] = {}

    def routed(self, hashes: Iterable[bytes]) -> None:
        """Remember the block hashes of a prompt and its answer.

        A block may be announced although its parent was not saved. Events have one key for all embeddings of a block.
        From such events alone, no router can compute the hashes within the block.
        """
        from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

        self._routed.update((maybe_convert_block_hash(BlockHash(one)), one) for one in hashes)

    def share(self, other: Router) -> None:
        """Share one record of routed prompts with `other`, the router of another engine."""
        self._routed = other._routed

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Update the index with the events of an engine."""
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
            elif isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                held = self.index.setdefault(_place(event), set())
                gone = {self._full.get(name, b"") for name in event.block_hashes}
                if event.medium != "GPU" and not gone <= held:
                    self.problems.append(f"{len(gone - held)} blocks are removed that are not there")
                held -= gone

    def _stored(self, event: BlockStored) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import hash_block_tokens, maybe_convert_block_hash

        place = _place(event)
        held = self.index.setdefault(place, set())
        extra = event.extra_keys or [None] * len(event.block_hashes)
        size, parent = event.block_size, None
        if event.parent_block_hash is not None:
            parent = self._full.get(event.parent_block_hash)
            if parent is None:  # the parent was not saved, or lies before vLLM's window
                parent = self._routed.get(event.parent_block_hash)
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
                parent = self._full.get(name, self._routed.get(name))  # the keys cover the whole block
            else:
                for at in range(0, size, step):  # a block is named by its last hash
                    tokens = event.token_ids[i * size + at : i * size + at + step]
                    parent = hash_block_tokens(sha256, parent, tokens, _from(keys, at))  # type: ignore[arg-type]
            if parent is None or maybe_convert_block_hash(parent) != name:
                self.problems.append(f"group {event.group_idx} of {event.medium}: a block's hash is not its event's")
                return
            if event.medium != "GPU" and parent in held:
                self.problems.append(f"group {event.group_idx} of {event.medium}: a block is announced twice")
            self._full[name], self._parents[place, parent] = parent, before
            self.extra_keys[parent] = keys
            held.add(parent)

    def promised(self, place: MediumGroup, hashes: Sequence[bytes]) -> int:
        """Return the largest n, or 0, for which the block that ends at hash n and all blocks before that are held."""
        held = self.index.get(place, set())
        for many in range(len(hashes), 0, -1):
            block: bytes | None = hashes[many - 1]
            while block in held:
                block = self._parents[place, block]
            if block is None:
                return many
        return 0

    def _tagged(self, event: BlockStored, keys: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        """Return extra keys in the form in which they are hashed.

        Events leave out the kind of each key, and the path of an adapter.
        """
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


def _place(event: BlockStored | BlockRemoved) -> MediumGroup:
    return "/".join(filter(None, (event.medium, event.ownership))), event.group_idx or 0


def _from(keys: tuple[Any, ...] | None, token: int) -> tuple[Any, ...] | None:
    """Return the extra keys that are hashed for a block's tokens from `token` on. Only the first hash covers a salt."""
    return tuple(key for key in keys or () if not token or key[0] != "cache_salt") or None


def listening(scheduler: Scheduler, adapters: Mapping[str, str]) -> Router:
    """Return a router that receives the events of `scheduler`. No other publisher receives them."""
    router = Router(adapters, scheduler.hash_block_size)

    def publish(batch: EventBatch) -> None:
        router.apply(batch.events)

    scheduler.kv_event_publisher.publish = publish  # type: ignore[method-assign]
    return router
