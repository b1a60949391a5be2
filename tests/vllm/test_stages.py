"""Pipeline parallelism: the ranks of each stage copy their own layers. A chunk is found when all stages have it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.identity import drafters
from kvpipe.connectors.vllm.support import check_engine, make_geometry
from kvpipe.connectors.vllm.trial.nightly import run_moves
from kvpipe.connectors.vllm.trial.shapes import KVPIPE, SHAPES
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.errors import UnsupportedError

SHAPE = SHAPES["pipeline-2"]


@pytest.mark.parametrize("prefault", ["ahead", "use"])
def test_the_catalog_is_as_large_as_the_smallest_pool(prefault: str) -> None:
    """A stage with more layers has larger and fewer slots. If one rank lacks a slot, the slot is not used."""
    trial = Trial(SHAPE, connector=KVPIPE._replace(extra=f'{{"prefault": "{prefault}"}}'))
    first, last = (rank.kvpipe.geometry for rank in trial.ranks)
    catalog = trial.side.catalog
    trial.close()
    assert [len(stage.layers) for stage in (first, last)] == [2, 6]
    assert trial.side.geometry == first
    assert catalog.slots == last.slots < first.slots
    assert catalog.ready <= last.slots
    assert catalog.used == 0
    assert catalog.ready == last.slots or prefault == "ahead"


def test_chunk_is_found_when_the_last_stage_has_saved_it() -> None:
    """While only the first stage has saved its part and reported it, the chunk is not found."""
    trial = Trial(SHAPE._replace(device=True), 1)
    try:
        index, jobs = trial.side.catalog.index(0), trial.side.jobs.in_flight
        trial.engines[0].pace(1, 1, backwards=False)
        trial.do(("add", 0, len(trial.documents[0]) - 1, 0, 3, 0, 0))
        for _ in range(3):
            trial.do(("step", 0))
        assert {(job.ok, job.bad) for job in jobs.values()} == {(1, 0)}
        assert not index
        trial.do(("drain",))
        assert not jobs
        assert index
        assert not trial.violations
    finally:
        trial.close()


def _engine(**changes: Any) -> Any:
    parallel = {
        "pipeline_parallel_size": 2, "world_size": 2, "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1, "distributed_executor_backend": "mp",
    }  # fmt: skip
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel | changes),
        speculative_config=SimpleNamespace(method="dspark") if changes.get("drafts") else None,
        scheduler_config=SimpleNamespace(async_scheduling="asynchronous" in changes.get("drafts", "")),
        use_v2_model_runner="V2" in changes.get("drafts", ""),
    )
    config.model_config = SimpleNamespace(enable_sleep_mode=False)
    return config


@pytest.mark.parametrize(
    ("changes", "wording"),
    [
        ({"drafts": "V1, asynchronous"}, "speculative decoding by vLLM's runner V1 is not supported; unset specul"),
        ({"drafts": "V2"}, "decoding without asynchronous scheduling is not supported; set async_scheduling to True"),
        ({"distributed_executor_backend": "ray"}, "'ray' .only the last stage reports. is not supported; use 'mp'"),
    ],
    ids=str,
)
def test_stages_that_would_not_be_followed_are_refused(changes: dict[str, Any], wording: str) -> None:
    """With drafts, runner V1 does not end the connector's steps on the first stage.

    With vLLM's first Ray executor, only the last stage reports.
    """
    with pytest.raises(UnsupportedError, match=wording):
        check_engine(_engine(**changes))


def test_a_state_that_an_earlier_stage_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM offers the states of answers before the first stage has moved these states.

    So the setting that keeps such states is refused.
    """
    monkeypatch.setattr(drafters, "check_states", lambda _: None)
    shape = SHAPES["async-scheduler-pipeline-2-states-drafter"]
    moves = [("embed", 0, 0, 0, 31), ("probe",)]
    assert not run_moves(shape, 1, moves).broken
    (broken,) = run_moves(shape._replace(dense=True), 1, moves).broken
    assert "rank 0, layer g1.l0: 32 of 32 tokens" in broken


def test_loads_within_a_step_are_refused() -> None:
    """Before vLLM learns that a load has failed, it computes the next steps of a pipeline and uses their output."""
    wording = "kvpipe: load='sync' with pipeline_parallel_size=2 is not supported; set load to 'auto' or 'async'"
    with pytest.raises(UnsupportedError, match=f"^{wording}$"):
        Trial(SHAPE._replace(load="sync"))


def test_a_stage_without_a_layer_of_a_group_is_refused() -> None:
    """If a stage has no layer of a group, vLLM makes the group empty on this stage."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["here"], spec), KVCacheGroupSpec([], spec)]
    cache = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(UnsupportedError, match="a pipeline stage without a layer of KV cache group 1 is not"):
        make_geometry(cache, load_settings())
