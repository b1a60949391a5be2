"""Thousands of chunks of one block each.

The scheduler side's work per request does not depend on the number of chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpipe.cache.catalog import Catalog
from kvpipe.connectors.vllm.tiny.models import TOKEN_BYTES
from tests.engine.common import BLOCK, assert_clean, baseline, engine, prompt

pytestmark = pytest.mark.engine

SLOTS = 2000
ROUNDS, REQUESTS, TOKENS, ANSWER = 8, 60, 140, 4
# the number of chunks of a round; answers add none, because they end within a block
CHUNKS = REQUESTS * (TOKENS // BLOCK)
WORK = ("find", "known", "lease", "release", "refresh", "reserve", "write", "landed", "lost")


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count operations of the catalog.

    Probes of lookups are not counted, because a lookup repeats its probes while a disk is slow.
    """
    done: Counter[str] = Counter()

    def counted(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def count(self: Catalog, *arguments: Any, **more: Any) -> Any:
            done[name] += 1
            return operation(self, *arguments, **more)

        return count

    for name in WORK:
        monkeypatch.setattr(Catalog, name, counted(name, getattr(Catalog, name)))
    return done


def test_small_chunks_by_the_thousand(tmp_path: Path, work: Counter[str]) -> None:
    """Each round of new requests takes as much work as the first round.

    The repeated round has right answers, and all its chunks are hits.
    """
    rounds = [[prompt(TOKENS, 1000 * i + j) for j in range(REQUESTS)] for i in range(ROUNDS)]
    options: dict[str, Any] = {"enable_prefix_caching": False, "cache_tokens": 400 * BLOCK}
    expected = baseline(rounds[0] + rounds[-1], ANSWER, **options)
    kvpipe = {
        "chunk_tokens": BLOCK, "pool_bytes_max": SLOTS * BLOCK * TOKEN_BYTES, "prefault": "start",
        "tiers": str(tmp_path),
    }  # fmt: skip
    with engine(kvpipe=kvpipe, **options) as live:
        answers, counts = [], []
        for prompts in rounds:
            work.clear()
            answers.append(live.generate(prompts, ANSWER))
            live.settle()
            counts.append(dict(work))
        stats = assert_clean(live)
        assert (stats["slots"], stats["pieces_published"], stats["slots_used"]) == (SLOTS, *[ROUNDS * CHUNKS] * 2)
        assert answers[0] + answers[-1] == expected
        assert all(one["reserve"] == one["write"] == one["landed"] == CHUNKS for one in counts)
        assert max(sum(one.values()) for one in counts) <= 2 * sum(counts[0].values()) <= 50 * CHUNKS
        assert live.generate(rounds[0], ANSWER) + live.generate(rounds[-1], ANSWER) == expected
        assert assert_clean(live)["tokens_loaded"] == 2 * CHUNKS * BLOCK
