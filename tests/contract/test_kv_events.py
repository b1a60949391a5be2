"""KV cache events let a router compute the hashes of blocks, even if a hash covers more than tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk
from kvpipe.cache.policy import make_policy
from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.kv_events import KvEvents
from kvpipe.connectors.vllm.support import make_geometry
from kvpipe.connectors.vllm.trial.router import Router
from kvpipe.connectors.vllm.trial.shapes import BLOCK, SHAPES, make_configs
from kvpipe.features.orders import Turns
from kvpipe.testing.dict_tier import DictTier
from kvpipe.testing.held_tier import DictSpec
from kvpipe.tiers.guard import FIND, guarded
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from vllm.v1.request import Request

BLOCKS, PATH = 8, "/adapters/french"


def request_of(**more: Any) -> Request:
    """Return a request of `BLOCKS` blocks."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    tokens = None if "prompt_embeds" in more else list(range(BLOCKS * BLOCK))
    return Request("r", tokens, SamplingParams(max_tokens=8), None, block_hasher=hasher, **more)


def image(name: str, offset: int, length: int) -> Any:
    """Return an image in a prompt."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))


def lora() -> Any:
    """Return a LoRA adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("french", 1, PATH)


KINDS: dict[str, Any] = {
    "plain": dict,
    "salt": lambda: {"cache_salt": "alice"},
    "adapter": lambda: {"lora_request": lora()},
    "images": lambda: {"mm_features": [image("cat", 40, 100), image("dog", 150, 20), image("cat", 200, 30)]},
    "embeddings": lambda: {"prompt_embeds": torch.rand(BLOCKS * BLOCK, 4)},
    "all": lambda: {
        "cache_salt": "bob", "lora_request": lora(), "mm_features": [image("cat", 0, BLOCKS * BLOCK)], "session_id": "s"
    },
}  # fmt: skip


def wired(events: list[Any]) -> list[Any]:
    """Return the events in the form that a subscriber decodes."""
    from vllm.distributed.kv_events import KVEventBatch

    batch = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
    return msgspec.msgpack.decode(batch, type=KVEventBatch).events


def vllms_own(request: Request, block_tokens: int) -> list[Any]:
    """Return the events that vLLM's block pool publishes for a request, with blocks of `block` tokens."""
    from vllm.v1.core.block_pool import BlockPool

    blocks = BLOCKS * BLOCK // block_tokens
    pool = BlockPool(16, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(blocks), 0, blocks, block_tokens, 0)
    events: list[Any] = pool.take_events()
    return events


class Noted:
    """A catalog with chunks of four blocks, the catalog's events, and a router that receives these events."""

    def __init__(self, *announce: str) -> None:
        """Start with an empty catalog. `announce` has the setting of each tier."""
        self.catalog = Catalog(8, 2, make_policy("lru", 8), Counters())
        cache = make_configs(SHAPES["hybrid"])[1]
        made = [
            (f"dict-{at}", DictSpec.model_validate({"announce": one}), DictTier()) for at, one in enumerate(announce)
        ]
        self.events = KvEvents(cache, make_geometry(cache, load_settings()), BLOCK, guarded(made, (FIND,)))
        self.catalog.on_drop = self.events.dropped
        self.router = Router({"french": PATH}, BLOCK)
        self.received: list[Any] = []

    def save(self, request: Request, pieces: Iterator[tuple[int, int]], group: int = 0) -> list[Chunk]:
        """Save blocks in pieces. A chunk has four blocks."""
        chunks: dict[int, Chunk] = {}
        for start, stop in pieces:
            base = start // 4 * 4
            chunk = chunks.setdefault(base, self.catalog.reserve(group) if start == base else chunks.get(base))  # type: ignore[arg-type]
            piece = self.catalog.write(chunk, stop - base, request.block_hashes[stop - 1], keep=False, base=base)
            if self.catalog.landed(piece) and chunk.marks:
                self.events.published(request, chunk, base)
        return list(chunks.values())

    def receive(self) -> list[Any]:
        """Let the router receive the new events."""
        self.received = wired(self.events.take())
        self.router.apply(self.received)
        assert self.router.problems == []
        return self.received


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [[(0, 4), (4, 8)], [(0, 1), (1, 2), (2, 4), (4, 7), (7, 8)]], ids=["whole", "grown"])
def test_a_router_makes_the_same_hashes(kind: str, pieces: list[tuple[int, int]]) -> None:
    """Hashes computed from an event's tokens and extra keys equal the event's hashes.

    Chunks are saved whole or in pieces. Extra keys of images and embeddings are keys of whole chunks. The router learns
    the hashes within such a chunk from vLLM's events.
    """
    request = request_of(**KINDS[kind]())
    reported = Noted()
    reported.router.apply(wired(vllms_own(request, BLOCK)))
    for group in range(2):
        reported.save(request, iter(pieces), group)
    received = reported.receive()
    for group, (spec, window) in enumerate([("full_attention", None), ("sliding_window", 2 * BLOCK)]):
        assert reported.router.index["CPU", group] == set(request.block_hashes[3::4])
        mine = [one for one in received if one.group_idx == group and hasattr(one, "block_size")]
        assert {(one.kv_cache_spec_kind, one.kv_cache_spec_sliding_window) for one in mine} == {(spec, window)}
        assert {one.session_id for one in mine} == {request.session_id}
    keys = [reported.router.extra_keys[one] for one in request.block_hashes]
    assert any(keys) == (kind != "plain")
    reported.catalog.reset()
    reported.receive()
    assert not reported.router.index["CPU", 0] | reported.router.index["CPU", 1]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"images", "embeddings", "all"}))
def test_events_are_the_same_when_their_request_has_finished(kind: str) -> None:
    """Only the fields of a finished request that events need are kept, because a request's parameters may be large."""
    request = request_of(session_id="s", **KINDS[kind]())
    live, over = Noted(), Noted()
    kept = over.events.kept(request)
    assert kept is not None
    live.save(request, iter([(0, 4), (4, 8)]))
    over.save(kept, iter([(0, 4), (4, 8)]))
    assert over.receive() == live.receive()
    assert over.received
    one = weakref.ref(request)
    del request
    gc.collect()
    assert one() is None


def test_images_embeddings_and_long_salts_are_not_kept_for_events() -> None:
    """Such requests have no events. A salt is long if no server would accept so many characters."""
    assert not any(Noted().events.kept(request_of(**KINDS[kind]())) for kind in ("images", "embeddings", "all"))
    salted, noted = request_of(cache_salt="s" * 1_000_000), Noted()
    assert noted.events.kept(salted) is None
    noted.save(salted, iter([(0, 4), (4, 8)]))
    assert not noted.receive()
    noted.catalog.reset()
    assert not noted.receive()


def test_events_equal_those_of_vllms_own_pool() -> None:
    """vLLM's pool with blocks as large as a chunk publishes equal events for a prefix. Only the medium differs."""
    for kind in set(KINDS) - {"embeddings"}:
        request = request_of(**KINDS[kind]())
        (theirs,) = vllms_own(request, 4 * BLOCK)
        reported = Noted()
        reported.save(request, iter([(0, 4), (4, 8)]))
        first, second = reported.events.take()
        for field in ("block_hashes", "token_ids", "extra_keys"):
            assert getattr(first, field) + getattr(second, field) == getattr(theirs, field), (kind, field)
        for field in ("lora_id", "lora_name", "block_size", "group_idx", "session_id", "parent_block_hash", "locality"):
            assert getattr(first, field) == getattr(theirs, field), (kind, field)
        assert second.parent_block_hash == first.block_hashes[-1]


def test_each_mark_is_a_block_from_its_chunks_first_token() -> None:
    """When a chunk grows, the end of a prompt within it stays announced.

    Any other earlier end is announced as removed.
    """
    request, reported = request_of(), Noted()
    hashes = request.block_hashes
    (chunk,) = reported.save(request, iter([(0, 1)]))
    assert reported.catalog.landed(reported.catalog.write(chunk, 2, hashes[1], keep=True))
    reported.events.published(request, chunk, 0)
    assert reported.catalog.landed(reported.catalog.write(chunk, 4, hashes[3], keep=False))
    reported.events.published(request, chunk, 0)
    first, removed, *more = reported.receive()
    assert (first.block_size, removed.block_hashes) == (BLOCK, first.block_hashes)
    assert [(one.block_size, one.parent_block_hash) for one in more] == [(2 * BLOCK, None), (4 * BLOCK, None)]
    assert reported.router.index["CPU", 0] == {hashes[1], hashes[3]}
    assert [reported.router.promised(("CPU", 0), hashes[:many]) for many in range(1, 6)] == [0, 2, 2, 4, 4]


def test_a_block_is_removed_with_its_mark() -> None:
    """A block is announced once. After vLLM's own reset, kvpipe announces kvpipe's blocks again."""
    request, reported = request_of(), Noted()
    short, longer = reported.save(request, iter([(0, 2)])) + reported.save(request, iter([(0, 3)]))
    assert [one.block_size for one in reported.receive()] == [2 * BLOCK, 3 * BLOCK]
    reported.events.cleared()
    reported.router.index.clear()
    assert [one.block_size for one in reported.receive()] == [2 * BLOCK, 3 * BLOCK]
    reported.catalog._drop(short, "evicted")
    assert [type(one).__name__ for one in reported.receive()] == ["BlockRemoved"]
    assert reported.router.index["CPU", 0] == {request.block_hashes[2]}
    reported.catalog._drop(longer, "evicted")
    reported.receive()
    assert reported.router.index["CPU", 0] == set()


def test_block_is_withdrawn_when_both_contents_of_an_adapter_are_evicted() -> None:
    """Keys distinguish two contents of an adapter, but block hashes do not, so a router has one block for both."""
    request, reported = request_of(lora_request=lora()), Noted()
    chunks: list[Chunk] = []
    for content in (b"one", b"two"):
        chunk = reported.catalog.reserve(0)
        assert chunk is not None
        assert reported.catalog.landed(reported.catalog.write(chunk, 4, request.block_hashes[3] + content, keep=False))
        reported.events.published(request, chunk, 0)
        chunks.append(chunk)
    assert len(reported.receive()) == 1
    reported.catalog._drop(chunks[0], "evicted")
    assert reported.receive() == []
    reported.catalog._drop(chunks[1], "evicted")
    reported.receive()
    assert reported.router.index["CPU", 0] == set()


def test_blocks_in_tiers_have_the_fields_of_vllms_own_offloading() -> None:
    """The medium, the locality and the tier's name are vLLM's.

    All other fields equal the fields of the block in memory.
    """
    request, reported = request_of(cache_salt="alice", session_id="s"), Noted("local", "remote", "auto")
    (chunk,) = reported.save(request, iter([(0, 4)]))
    (memory,) = reported.receive()
    block = reported.events.block(chunk, request.block_hashes[3])
    assert block is not None
    assert reported.events.block(chunk, request.block_hashes[2]) is None
    localities = ("LOCAL", "REMOTE", None)
    for tier in range(3):
        reported.events.stored(tier, 0, block)
    for tier, event in enumerate(reported.receive()):
        assert (event.medium, event.locality, event.ownership) == ("STORAGE", localities[tier], f"dict-{tier}")
        assert msgspec.structs.replace(event, medium="CPU", locality=None, ownership=None) == memory
    reported.catalog._drop(chunk, "evicted")
    assert [one.medium for one in reported.receive()] == ["CPU"], "the tiers still have it"
    reported.events.cleared()
    reported.router.index.clear()
    assert [one.ownership for one in reported.receive()] == ["dict-0", "dict-1", "dict-2"], (
        "routers forgot the tiers, too"
    )
    for tier in range(3):
        reported.events.gone(tier, 0, [block])
    for tier, event in enumerate(reported.receive()):
        assert (event.medium, event.locality, event.ownership) == ("STORAGE", localities[tier], f"dict-{tier}")
    assert not any(reported.router.index.values())


def test_units_that_cannot_be_found_are_not_announced() -> None:
    """Two requests save the same tokens, and `quick` publishes its chunk first.

    Only the first unit of `slow` is announced.
    """
    request, reported = request_of(), Noted()
    (slow,) = reported.save(request, iter([(0, 1)]))
    piece = reported.catalog.write(slow, 2, request.block_hashes[1], keep=False)
    (quick,) = reported.save(request, iter([(0, 2)]))
    assert reported.catalog.landed(piece)
    reported.events.published(request, slow, 0)
    reported.receive()
    reported.catalog._drop(quick, "evicted")
    reported.receive()
    assert reported.router.index["CPU", 0] == {request.block_hashes[0]}
    assert slow.marks[-1].units == 1


def test_a_reset_of_an_idle_engine_gives_the_turn_back() -> None:
    """A pause resets the engine after vLLM has asked whether anything is pending.

    By then the idle engine has given the turn away, so the reset must give it back.
    """
    manager: Any = SimpleNamespace(reset_prefix_cache=lambda: True)
    turns, events, away = Turns(), Noted().events, list[bool]()
    events.cleared = lambda: away.append(turns.away)  # type: ignore[method-assign]
    events.watch(manager, turns.taken)
    assert manager.reset_prefix_cache()
    assert not turns.borrow(), "a busy engine keeps it"
    turns.give()
    assert manager.reset_prefix_cache()
    assert turns.borrow()
    assert away == [False, False]
