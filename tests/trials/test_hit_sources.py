"""vLLM's metric of hits by source: kvpipe tells vLLM's real scheduler the source of a hit's tokens."""

from __future__ import annotations

import pytest
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefixCacheStats

from kvpipe.testing.held_tier import DictSpec
from kvpipe.tiers.disk.spec import DiskSpec
from kvpipe.tiers.redis.spec import RedisSpec
from tests.trials.test_fetches import Played, in_play


def _run(played: Played) -> tuple[dict[str, int], dict[CacheHitSource, int]]:
    """Run one request without vLLM's own cache.

    Return the request's hits as kvpipe counted them, and as vLLM counted them.
    """
    scheduler, before = played.trial.scheduler, dict(played.trial.side.tracer.hit_tokens)
    scheduler.connector_prefix_cache_stats = stats = PrefixCacheStats()
    assert scheduler.reset_prefix_cache()
    after = played.run()
    hits = {tier: tokens - before.get(tier, 0) for tier, tokens in after.items() if tokens != before.get(tier, 0)}
    return hits, stats.hits_by_source


@pytest.mark.parametrize(
    ("spec", "source"), [(DiskSpec, CacheHitSource.DISK), (RedisSpec, CacheHitSource.EXTERNAL_UNSPECIFIED)]
)
def test_hits_are_reported_by_source(
    spec: type[DictSpec], source: CacheHitSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit may come from a tier, from memory, or from both."""
    monkeypatch.setattr(DictSpec, "medium", spec.medium)
    with in_play() as played:
        hits, sources = _run(played)
        (tier,) = hits
        assert sources == {source: hits[tier]}
        whole = hits[tier]
        hits, sources = _run(played)
        assert hits == {"memory": whole}
        assert sources == {CacheHitSource.HOST: whole}
        catalog = played.trial.side.catalog
        catalog.evict(max(catalog.chunks(), key=lambda chunk: chunk.ready))
        hits, sources = _run(played)
        assert hits.keys() == {"memory", tier}
        assert sources == {CacheHitSource.HOST: hits["memory"], source: hits[tier]}


def test_part_of_a_hit_has_the_source_of_its_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler may load fewer tokens than were found.

    If an error occurs in kvpipe, only the sources of the hit stay unknown.
    """
    with in_play() as played:
        connector = played.trial.kvpipe
        assert connector is not None
        monkeypatch.setattr(played.trial.side, "hit_by_tier", lambda _: {"memory": 64, "tier": 32})
        role = connector.scheduler_role
        role._sources["tier"] = CacheHitSource.DISK
        ask = connector.get_external_cache_hit_sources
        request = object()
        for tokens, host, disk in ((96, 64, 32), (80, 64, 16), (40, 40, 0)):
            expected = {CacheHitSource.HOST: host} | ({CacheHitSource.DISK: disk} if disk else {})
            assert ask(request, tokens) == expected  # type: ignore[arg-type]
        monkeypatch.undo()
        assert ask(request, 40) == {}  # type: ignore[arg-type]
        assert connector.counters["contained_error"] == 1
