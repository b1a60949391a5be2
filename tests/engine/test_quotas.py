"""Quotas in a real engine: the guaranteed share of a salt keeps its hits, even if other salts send many prompts."""

from __future__ import annotations

import pytest

from tests.engine.common import assert_clean, baseline, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine
QUOTAS = [{"name": "alice", "salt": "alice's", "share": 0.5}, {"name": "bob", "salt": "bob's", "limit": 0.5}]
POOL_TOKENS = 1024


def test_share_of_a_quota_keeps_its_hits() -> None:
    """Prompts of others evict each other's chunks, but not Alice's chunks.

    Answers equal those of an engine without a connector.
    """
    mine, rest = prompt(330, 1), [prompt(330, 2 + i) for i in range(8)]
    expected = baseline([mine, *rest], 4, enable_prefix_caching=False)
    with engine(kvpipe={"chunk_tokens": 64}, enable_prefix_caching=False) as probe:
        assert probe.connector.scheduler is not None
        slot_bytes = probe.connector.scheduler.geometry.slot_bytes
    for quotas, kept in (([], False), (QUOTAS, True)):
        keys = {"chunk_tokens": 64, "pool_bytes_max": slot_bytes * POOL_TOKENS // 64, "quotas": quotas}
        with engine(kvpipe=keys, enable_prefix_caching=False) as live:
            assert live.generate([mine], 4, salt="alice's") == expected[:1]
            live.settle()
            for i, (one, answer) in enumerate(zip(rest, expected[1:], strict=True)):
                assert live.generate([one], 4, salt="bob's" if i % 2 else None) == [answer]
                live.settle()
            before = assert_clean(live).get("tokens_loaded", 0)
            assert live.generate([mine], 4, salt="alice's") == expected[:1]
            stats = assert_clean(live)
            assert (stats.get("tokens_loaded", 0) - before == whole_blocks(live, 330)) == kept
            assert stats["slots_used"] == POOL_TOKENS // 64
