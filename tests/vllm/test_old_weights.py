"""No request reuses KV or embeddings of old weights, and vLLM keeps no such KV and embeddings."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.connectors.vllm.engine_protocols import ManagedBlocks, Remedies
from kvpipe.connectors.vllm.identity import engine_facts
from kvpipe.connectors.vllm.remedies.admission import LoadAdmission
from kvpipe.connectors.vllm.remedies.encoded import Encoded
from kvpipe.connectors.vllm.remedies.stale import Stale
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.errors import UnsupportedError
from kvpipe.trace.log import Counters
from tests.rigs.scheduler_world import geometry_of_windows


class _Manager:
    """The part of vLLM's cache manager that is used."""

    def __init__(self) -> None:
        self.block_pool = SimpleNamespace(num_gpu_blocks=10)
        self.tables: dict[str, list[Any]] = {}
        self.cached: dict[str, int] = {}
        one = SimpleNamespace(req_to_blocks=self.tables, num_cached_block=self.cached, _pending_cow_copies=[])
        self.coordinator = SimpleNamespace(single_type_managers=[one])
        self.evicted: list[set[int]] = []

    def evict_blocks(self, blocks: set[int]) -> None:
        """Record the blocks."""
        self.evicted.append(blocks)

    def give(self, request: str, *blocks: int) -> Any:
        """Give blocks to a request."""
        self.tables[request] = [SimpleNamespace(block_id=block, is_null=not block) for block in blocks]
        return [self.tables[request]]


def _living(*names: str, prompt: int = 40) -> list[Any]:
    return [SimpleNamespace(request_id=name, num_prompt_tokens=prompt) for name in names]


def test_requests_with_old_kv_are_stale_until_their_kv_is_computed_again() -> None:
    """A *stale* request has KV of old weights.

    A request that reuses blocks of a stale request is stale, too. A preempted request is not stale, because its KV is
    computed again.
    """
    stale, manager = Stale([32]), _Manager()
    blocks = ManagedBlocks(manager)  # type: ignore[arg-type]
    stale.plan_step([], _living("old"), blocks)
    assert manager.evicted == []
    manager.give("old", 0, 1, 2)
    stale.weights_changed(["old", "waiting"], blocks)
    assert manager.evicted.pop() == set(range(10))
    assert not stale.rests_on("new", manager.give("new", 0, 3, 4), blocks)
    assert stale.rests_on("heir", manager.give("heir", 1, 5), blocks)
    stale.leave("old", blocks)
    assert manager.evicted.pop() == {1, 2}
    stale.leave("new", blocks)
    assert manager.evicted == []
    assert stale.rests_on("grandchild", manager.give("grandchild", 5, 6, 9), blocks)
    manager.cached |= {"heir": 2, "grandchild": 1}
    stale.plan_step([], _living("new", "heir", "grandchild", prompt=20), blocks)
    assert manager.evicted.pop() == {1, 5, 6}
    manager.cached["grandchild"] = 3
    stale.plan_step([], _living("heir", "grandchild", prompt=20), blocks)
    assert manager.evicted.pop() == {1, 5, 6, 9}
    stale.plan_step(["heir"], _living("heir"), blocks)
    assert manager.evicted.pop() == set(range(10))
    assert not stale.rests_on("heir", manager.give("heir", 7, 8), blocks)
    stale.leave("grandchild", None)
    assert not stale.rests_on("late", manager.give("late", 6), blocks)
    stale.plan_step([], _living("late"), blocks)
    assert manager.evicted == []


def test_last_block_of_a_stale_prompt_is_evicted() -> None:
    """If hashes are shorter than blocks, vLLM offers the block in which a prompt ends to other requests, in every step.

    A request that reuses the block gets a copy of the block.
    """
    stale, manager = Stale([32]), _Manager()
    blocks = ManagedBlocks(manager)  # type: ignore[arg-type]
    manager.give("old", 1, 2, 3, 4)
    stale.weights_changed(["old"], blocks)
    manager.cached["old"] = 3
    for _ in range(2):
        stale.plan_step([], _living("old", prompt=40), blocks)
    assert manager.evicted[-1] == {2, 4}
    table = manager.give("heir", 6, 7)
    manager.coordinator.single_type_managers[0]._pending_cow_copies = [_copy(9, 8), _copy(2, 7)]
    assert stale.rests_on("heir", table, blocks)


def _copy(source: int, copy: int) -> tuple[Any, Any]:
    return SimpleNamespace(block_id=source), SimpleNamespace(block_id=copy)


def test_failed_load_is_reported_when_stale_blocks_cannot_be_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed loads of a step are reported although stale blocks could not be evicted.

    The next step evicts the blocks.
    """
    geometry, manager, counters = geometry_of_windows((None,), 16, 8), _Manager(), Counters()
    remedies = Remedies(geometry, LoadAdmission(geometry, 64, 64))
    remedies.bind(ManagedBlocks(manager), counters)  # type: ignore[arg-type]
    manager.give("old", 1, 2)
    remedies.weights_changed(["old"])
    manager.cached["old"] = 2
    manager.evicted.clear()
    remedies._invalid.spoiled.add([7])
    monkeypatch.setattr(remedies._invalid, "failing_loads", lambda *_: {"reader": [7]})
    step: Any = SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={})
    with monkeypatch.context() as patch:
        patch.setattr(manager, "evict_blocks", None)
        assert remedies.begin_step(step, _living("old"), loading=True) == {"reader": [7]}
    assert counters.faults == {"stale_blocks_not_forgotten": 1}
    assert remedies.begin_step(step, _living("old"), loading=True) == {"reader": [7]}
    assert manager.evicted == [{1, 2}]
    assert counters.faults == {"stale_blocks_not_forgotten": 1}


def test_nothing_is_kept_of_requests_with_embeddings_of_old_weights() -> None:
    """Until vLLM drops old embeddings, kvpipe keeps no KV of requests with images.

    Neither is KV kept of requests that reuse the blocks of such requests. KV of requests with text only is kept.
    """
    geometry, manager = geometry_of_windows((None,), 16, 8), _Manager()
    remedies = Remedies(geometry, LoadAdmission(geometry, 64, 64))
    remedies.bind(ManagedBlocks(manager), Counters())  # type: ignore[arg-type]

    def admitted(request: str, *blocks: int) -> bool:
        return remedies.admitted(request, manager.give(request, *blocks))

    remedies.weights_changed([])  # until now, no request had an image
    remedies.encoded.began("first")
    assert not admitted("first", 1)
    remedies.finished("first", loading=False)
    remedies.weights_changed([])
    remedies.encoded.began("image")
    assert admitted("image", 2)
    assert admitted("image", 3)  # the request is admitted again after a preemption
    assert admitted("heir", 3)
    assert not admitted("text", 4)
    remedies.encoded.reset()
    remedies.encoded.began("again")
    assert not admitted("again", 5)
    for request in ("image", "again"):
        remedies.finished(request, loading=False)
    remedies.encoded.reset()
    remedies.weights_changed([])  # no request is left
    remedies.encoded.began("late")
    assert not admitted("late", 6)
    remedies.encoded.reset()
    remedies.weights_changed(["late"])
    assert admitted("late", 7)  # this request still has an embedding of the old weights


def test_embeddings_since_weights_were_doubted() -> None:
    """vLLM may drop its embeddings before or after the doubt begins.

    In both cases, later embeddings are of the new weights. Ranks report whether weights have changed only in steps.
    """
    for before, after in ((True, False), (False, True), (True, True), (False, False)):
        encoded = Encoded()
        encoded.began("first")
        encoded.ended("first")
        if before:
            encoded.reset()
        encoded.doubted()
        if after:
            encoded.reset()
        encoded.began("new")
        encoded.weights_changed()
        assert encoded.rests_on("new") is not (before or after)
        encoded.weights_changed()
        encoded.reset()
        encoded.ended("new")
        encoded.began("newer")
        assert not encoded.rests_on("newer")


def test_embeddings_of_an_adapters_encoder() -> None:
    """vLLM caches such embeddings by the adapter's name, even if the adapter's bytes change.

    So the request's KV is not kept.
    """
    geometry, manager = geometry_of_windows((None,), 16, 8), _Manager()
    for adapts in (False, True):
        remedies = Remedies(geometry, LoadAdmission(geometry, 64, 64), adapts_encoder=adapts)
        remedies.bind(ManagedBlocks(manager), Counters())  # type: ignore[arg-type]
        for adapted in (True, False):
            remedies.encoded.began("image", adapted=adapted)
            assert remedies.admitted("image", manager.give("image", 1)) is (adapts and adapted)
            assert remedies.continued("image") is (adapts and adapted)
            remedies.encoded.reset()
            assert remedies.continued("image") is (adapts and adapted)
        remedies.finished("image", loading=False)
        assert not remedies.admitted("image", manager.give("image", 1))
    assert manager.evicted == []


def test_an_image_in_a_later_input_of_a_session() -> None:
    """If vLLM still has the image's embeddings of old weights, kvpipe and vLLM keep no later KV of the session."""
    trial = Trial(SHAPES["sync"])
    assert trial.kvpipe is not None
    encoded, pool = trial.kvpipe.scheduler_role._remedies.encoded, trial.scheduler.kv_cache_manager.block_pool
    try:
        encoded.began("before")
        encoded.ended("before")
        trial.side._resets.weights_changed()
        trial.documents[0] = list(range(200))
        trial.do(("session", 0, 99, 3))
        trial.do(("step", 7))
        saved = trial.side.counters["units_saved"]
        assert saved
        encoded.began("r0")
        trial.do(("more", 0, 40, 3))
        trial.do(("step", 7))
        assert trial.scheduler.requests["r0"].num_computed_tokens > 4 * 32
        assert trial.side.counters["units_saved"] == saved
        assert [block for block in pool.blocks if block.block_hash] == []
    finally:
        trial.close()


def test_images_that_are_numbered() -> None:
    """A multimodal model whose images vLLM numbers anew in every process is refused with tiers."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0)),
        cache_config=SimpleNamespace(enable_prefix_caching=False, prefix_caching_hash_algo="sha256"),
    )
    with pytest.raises(UnsupportedError, match="multimodal"):
        engine_facts.check_hashes(config)
    config.cache_config.enable_prefix_caching = True
    engine_facts.check_hashes(config)


@pytest.mark.parametrize("consumes", [True, False])
def test_embeddings_that_another_engine_makes(*, consumes: bool) -> None:
    """The other engine's weights may change while this engine's weights do not.

    So with tiers this engine is refused.
    """
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=None),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        ec_transfer_config=SimpleNamespace(is_ec_consumer=consumes),
    )
    with pytest.raises(UnsupportedError, match="another engine's encoder") if consumes else nullcontext():
        engine_facts.check_hashes(config)


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("shape", ["sync", "states-hash-blocks", "states-exported", "async-scheduler-states-exported"])
def test_vllm_keeps_no_block_of_stale_requests(shape: str, steps: int) -> None:
    """While such requests run, and after their end, vLLM keeps neither their full blocks nor their last block."""
    trial = Trial(SHAPES[shape])
    pool = trial.scheduler.kv_cache_manager.block_pool
    trial.documents[0] = list(range(200))
    try:
        trial.do(("add", 0, 172, 0, 40))
        trial.do(("step", steps))
        assert trial.scheduler.requests
        assert any(block.block_hash for block in pool.blocks)
        trial.side._resets.weights_changed()
        while trial.scheduler.requests:
            assert [block for block in pool.blocks if block.block_hash] == [] or SHAPES[shape].asynchronous
            trial.do(("step", 1))
        assert [block for block in pool.blocks if block.block_hash] == []
    finally:
        trial.close()
