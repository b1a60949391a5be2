"""Tensor parallelism: every rank saves and loads its own part, and a failure on one rank fails the job on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.trial.processors import complete
from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.connect import ask_status
from kvpipe.statemachine.node_client import ATTACHED
from tests.engine.common import assert_clean, baseline, engine, prompt, whole_blocks
from tests.rigs.forked import forked_ranks

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 31), prompt(140, 32)]
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_prefix_caching": False}


@pytest.fixture(autouse=True)
def _one_core_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest.mark.spawned
def test_two_ranks() -> None:
    """Two ranks give the same answers with loaded KV as with computed KV."""
    with forked_ranks():  # the ranks without kvpipe are forked, because each spawned rank has to import vLLM
        expected = baseline(PROMPTS, 12, **TWO_RANKS)
    with engine(kvpipe={}, **TWO_RANKS) as live:
        for _ in range(2):
            assert live.generate(PROMPTS, 12) == expected
        stats = assert_clean(live)
        assert stats["tokens_loaded"] == whole_blocks(live, 300, 140)
        assert "load_failed" not in stats


@pytest.mark.parametrize("load", ["sync", "async"])
def test_one_rank_of_two_fails_its_loads(load: str) -> None:
    """If the load of one rank fails, the request is recomputed on both ranks."""
    expected = baseline(PROMPTS, 12, **TWO_RANKS)
    with engine(kvpipe={"load": load}, connector="OneRankFails", module="tests.engine.faulty", **TWO_RANKS) as live:
        for _ in range(3):
            assert live.generate(PROMPTS, 12) == expected
        stats = assert_clean(live)
        assert stats["load_failed"] >= 2
        assert stats["tokens_loaded"] > 0


def test_latents_on_two_ranks_give_the_answers_of_a_prefix_cache(short_path: Path) -> None:
    """Private pools and a node's memory give the answers of vLLM's own prefix cache, with and without a hit.

    The prefix cache gives the expected answers, because an answer without a hit may differ. On a CPU, vLLM's rotary
    kernel gives MLA other keys if a step has another number of tokens. A node's memory has one copy of the latents. One
    rank saves this copy, and both ranks load the copy.
    """
    options = TWO_RANKS | {"recipe": "deepseek-mla", "dtype": "bfloat16"}
    node = {"pool": "node", "pool_dir": str(short_path / "node"), "keep_s": 1, "pool_bytes_max": "64MiB"}

    def answers(live: Engine) -> list[list[list[int]]]:
        return [[live.generate([tokens], 12)[0] for tokens in PROMPTS] for _ in range(2)]

    with complete("amx"):  # on a CPU, vLLM has a prefix cache of MLA only with AMX
        with engine(**options | {"enable_prefix_caching": True}) as plain:
            expected = answers(plain)
        for config in ({}, node):
            with engine(kvpipe={"chunk_tokens": 128, **config}, **options) as live:
                assert answers(live) == expected
                stats = assert_clean(live)
                assert stats["tokens_loaded"] == whole_blocks(live, 300, 140)
                side = live.connector.scheduler
                assert side is not None
                assert (side.node is not None) == bool(config)
                if side.node is not None:
                    assert side.node.pool.layout.slot_bytes == side.geometry.slot_bytes + side.node.pool.note_bytes


def test_two_ranks_share_a_node_s_memory(short_path: Path) -> None:
    """A slot of the node's memory has a part for each rank. Another engine loads these parts."""
    config = {
        "pool": "node", "pool_dir": str(short_path / "node"), "keep_s": 1, "pool_bytes_max": "64MiB",
        "chunk_tokens": 32,
    }  # fmt: skip
    expected = baseline(PROMPTS, 12, **TWO_RANKS)
    sizes = []
    for found in (0, 1):
        with engine(kvpipe=config, **TWO_RANKS) as live:
            side = live.connector.scheduler
            assert side is not None
            assert isinstance(side.catalog, NodeCatalog)
            layout = side.catalog.pool.layout
            sizes.append(layout.slot_bytes // side.geometry.slot_bytes)
            status = ask_status(short_path / "node")
            assert status is not None
            (memory,) = status.memories
            pids = [len(row.pids) for row in memory.clients if row.state == ATTACHED]
            assert pids == [3], "the scheduler and two ranks"
            assert live.generate(PROMPTS, 12) == expected
            assert bool(assert_clean(live).get("tokens_loaded")) == bool(found)
    assert sizes == [2, 2]
