"""Engines with different layouts share one cache: two ranks find chunks that one rank has stored, and vice versa."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.tiny.engine import Engine
from tests.engine.common import assert_clean, baseline, engine, prompt, whole_blocks
from tests.rigs.tier_worlds import WORLDS

pytestmark = pytest.mark.engine

FIRST, SECOND = prompt(300, 81), prompt(611, 82)
TOKENS = 20
OWN: dict[str, Any] = {"enable_prefix_caching": False}


@pytest.fixture(autouse=True)
def _one_core_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def _hits(live: Engine, kind: str) -> int:
    side = live.connector.scheduler
    assert side is not None
    return side.tracer.hit_tokens.get(kind, 0)


def _stored(live: Engine) -> int:
    return assert_clean(live)["chunks_stored"]


@pytest.mark.parametrize(("kind", "recipe"), [("disk", "llama"), ("redis", "gemma2-hybrid")])
def test_one_rank_then_two_then_one(tmp_path: Path, kind: str, recipe: str) -> None:
    """A restart with another number of ranks keeps the stored chunks. More or fewer ranks give the same answers."""
    expected = baseline([FIRST, SECOND], TOKENS, recipe, **OWN)
    with WORLDS[kind](tmp_path) as world:
        tier = json.loads(world.spec.model_dump_json(exclude_none=True))
        config = {"chunk_tokens": 64, "tiers": [tier]}
        with engine(recipe, config, **OWN) as one:
            assert one.generate([FIRST], TOKENS) == expected[:1]
            assert _stored(one) > 0
        with engine(recipe, config, tensor_parallel_size=2, **OWN) as two:
            assert two.generate([FIRST], TOKENS) == expected[:1]
            assert _hits(two, kind) == whole_blocks(two, len(FIRST))
            assert two.generate([SECOND], TOKENS) == expected[1:]
            assert _stored(two) > 0
        with engine(recipe, config, **OWN) as one:
            assert one.generate([FIRST, SECOND], TOKENS) == expected
            assert_clean(one)
            assert _hits(one, kind) == whole_blocks(one, len(FIRST), len(SECOND))


def test_latents_are_stored_once(tmp_path: Path) -> None:
    """Latents that are equal on two ranks are stored once, in the size of one rank's part.

    Engines with one rank and with two ranks find each other's chunks.
    """
    found, options = [], OWN | {"dtype": "bfloat16"}
    for ranks, folder, again in ((1, "a", False), (2, "b", False), (2, "a", True), (1, "b", True)):
        config = {"chunk_tokens": 64, "tiers": [{"kind": "disk", "path": str(tmp_path / folder)}]}
        with engine("deepseek-mla", config, tensor_parallel_size=ranks, **options) as live:
            live.generate([FIRST], 1)
            assert_clean(live)
            assert _hits(live, "disk") == (whole_blocks(live, len(FIRST)) if again else 0)
        found.append(sorted((file.name, file.stat().st_size) for file in (tmp_path / folder).rglob("*-g0-*")))
    assert len({tuple(one) for one in found}) == 1
    assert found[0]
