"""Real engines share the memory of their node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpipe.node.processes import holder_of
from kvpipe.testing.waiting import eventually
from tests.engine.child_engine import Child, child
from tests.engine.common import assert_clean, baseline, engine, prompt

PROMPTS = [prompt(300, 91), prompt(200, 92)]
TOKENS = 8
DUE = 288 + 192
"""The number of tokens in whole blocks of the prompts."""


@pytest.fixture
def node(short_path: Path) -> dict[str, Any]:
    """Return the configuration of engines that share one memory."""
    return {
        "chunk_tokens": 128, "pool": "node", "pool_dir": str(short_path / "node"), "keep_s": 5,
        "pool_bytes_max": "64MiB",
    }  # fmt: skip


def test_engines_share_one_memory(node: dict[str, Any]) -> None:
    """An engine loads chunks that another engine has saved, and gives the same answers.

    After the other engine was killed, the first engine continues. A new engine hits with its first request. After its
    reset, an engine does not find its earlier chunks, but other engines still find them.
    """
    wanted, more = baseline(PROMPTS, TOKENS), [prompt(100, 93)]
    wanted_more = baseline(more, TOKENS)
    options: dict[str, Any] = {"kvpipe": node, "enable_prefix_caching": False}
    with engine(**options) as second:
        side = second.connector.scheduler
        assert side is not None
        first = Child(options)
        answers, hits = first.generate(PROMPTS, TOKENS)
        assert answers == wanted
        assert not hits.get("memory")
        assert second.generate(PROMPTS, TOKENS) == wanted
        assert side.tracer.hit_tokens["memory"] == DUE
        first.kill()
        assert second.generate(more, TOKENS) == wanted_more
        with child(**options) as third:
            assert third.generate(PROMPTS, TOKENS)[0] == wanted
            answers, hits = third.generate(more, TOKENS)
            assert answers == wanted_more
            assert hits["memory"] == DUE + 96
            assert second.connector.reset_cache()
            assert second.generate(PROMPTS, TOKENS) == wanted
            assert side.tracer.hit_tokens["memory"] == DUE
            assert third.generate(PROMPTS, TOKENS)[1]["memory"] == 2 * DUE + 96
        second.settle()
        assert second.generate(PROMPTS, TOKENS) == wanted
        assert side.tracer.hit_tokens["memory"] == 2 * DUE
        assert_clean(second)


def test_engines_of_two_models_share_one_memory(node: dict[str, Any]) -> None:
    """Each engine restarts while the other engine serves, and hits with its first request. Answers stay right."""
    wanted, other = baseline(PROMPTS, TOKENS), baseline(PROMPTS, TOKENS, "llama-mha")
    options: dict[str, Any] = {"kvpipe": node | {"pool_bytes_max": "128MiB"}, "enable_prefix_caching": False}
    first = Child(options)
    assert first.generate(PROMPTS, TOKENS)[0] == wanted
    second = Child(options | {"recipe": "llama-mha"})
    answers, hits = second.generate(PROMPTS, TOKENS)
    assert answers == other
    assert not hits.get("memory")
    first.kill()
    answers, hits = second.generate(PROMPTS, TOKENS)
    assert (answers, hits["memory"]) == (other, DUE)
    with engine(**options) as first_again:
        side = first_again.connector.scheduler
        assert side is not None
        assert first_again.generate(PROMPTS, TOKENS) == wanted
        assert side.tracer.hit_tokens["memory"] == DUE
        second.close()
        with child(recipe="llama-mha", **options) as second_again:
            answers, hits = second_again.generate(PROMPTS, TOKENS)
            assert (answers, hits["memory"]) == (other, DUE)
        assert first_again.generate(PROMPTS, TOKENS) == wanted
        assert_clean(first_again)


def test_engines_find_chunks_of_the_memory_in_a_tier(node: dict[str, Any], tmp_path: Path) -> None:
    """After all engines and the holder have ended, an engine hits from disk.

    Other engines then find in memory what this engine has fetched. The last tokens of each prompt are also found.
    """
    tier = {"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB"}
    options: dict[str, Any] = {"kvpipe": node | {"tiers": [tier], "keep_s": 1}, "enable_prefix_caching": False}
    wanted = baseline(PROMPTS, TOKENS)
    with child(**options) as first:
        assert first.generate(PROMPTS, TOKENS) == (wanted, {"memory": 0})
    stored = sorted(path.name for path in (tmp_path / "kv").rglob("*-g0-*"))
    assert stored
    assert eventually(lambda: not holder_of(Path(node["pool_dir"])))
    with engine(**options) as second, child(**options) as third:
        side = second.connector.scheduler
        assert side is not None
        assert second.generate(PROMPTS, TOKENS) == wanted
        assert side.tracer.hit_tokens == {"memory": 0, "disk": DUE}
        answers, hits = third.generate(PROMPTS, TOKENS)
        assert answers == wanted
        assert hits == {"memory": DUE}
        assert_clean(second)
    assert sorted(path.name for path in (tmp_path / "kv").rglob("*-g0-*")) == stored


def test_second_turn_loads_all_whole_blocks_of_the_first(node: dict[str, Any]) -> None:
    """The last tokens of a request, including the blocks of its answer, are published when the request ends."""
    first, more = prompt(100, 94), prompt(20, 95)
    (answer,) = baseline([first], 70)
    wanted = baseline([first + answer + more], TOKENS)
    with engine(kvpipe=node, enable_prefix_caching=False) as live:
        assert live.generate([first], 70) == [answer]
        live.settle()
        assert live.generate([first + answer + more], TOKENS) == wanted
        assert assert_clean(live)["tokens_loaded"] == 160


def test_ranks_with_another_pool_fail_every_job(node: dict[str, Any]) -> None:
    """A rank with another pool than the scheduler side copies nothing and fails every job. Answers stay right."""
    wanted = baseline(PROMPTS, TOKENS)
    with engine(kvpipe=node, enable_prefix_caching=False) as live:
        side = live.connector.scheduler
        assert side is not None
        side._pool_token = b"another memory"
        assert live.generate(PROMPTS, TOKENS) == wanted
        assert live.generate(PROMPTS, TOKENS) == wanted
        assert not side.tracer.hit_tokens.get("memory")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"quotas": [{"name": "a", "salt": "a"}]}, "quotas"),
        ({"pool_bytes_max": "1MiB", "chunk_tokens": 1024}, "pool_bytes_max"),
    ],
)
def test_unsupported_settings_are_refused(node: dict[str, Any], keys: dict[str, Any], named: str) -> None:
    """The engine does not start, and the error names the key."""
    with pytest.raises(ValueError, match=named), engine(kvpipe=node | keys):
        pass


def test_engine_may_fall_back_to_a_private_pool(node: dict[str, Any]) -> None:
    """With `pool_or_private`, an engine that cannot use the node's memory serves with a private pool."""
    wanted = baseline(PROMPTS, TOKENS)
    refused = node | {"quotas": [{"name": "a", "salt": "a"}], "pool_or_private": True}
    with engine(kvpipe=refused, enable_prefix_caching=False) as live:
        assert live.generate(PROMPTS, TOKENS) == wanted
        assert live.generate(PROMPTS, TOKENS) == wanted
        assert live.connector.settings.pool == "private"
        side = live.connector.scheduler
        assert side is not None
        assert side.node is None
        assert side.tracer.hit_tokens["memory"] == DUE
        assert_clean(live)
