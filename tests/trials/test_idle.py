"""Announced prompts keep no engine busy and take little memory. Their fetched chunks do not count as used too early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cache.policy.hints import Action
from kvpipe.features import announced as a
from kvpipe.scheduler.wishes import Wish
from kvpipe.trace.log import bounded
from tests.trials.test_announced import PAUSE_S, STEPS, announcing, over, steps


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "due"])
def test_idle_engine_may_stop_soon(*, begun: bool) -> None:
    """An idle engine soon stops making steps, although announcements wait or tiers are slow.

    The engine may be about to end, or to pause for new weights.
    """
    with announcing() as (played, clock):
        side: Any = played.trial.side
        side.prefetching.idle_s_max = 0.0
        clock.now_s += PAUSE_S if begun else PAUSE_S - a.IDLE_S
        played.do(("hold", True), ("add", 3, 20, 0, 3, 0, 0), *STEPS * 4)
        assert not played.trial.live
        assert side.prefetching.has_work()
        played.do(*STEPS * 2)
        assert not side.prefetching.has_work()
        assert not [stage for stage in played.staging._stages if stage.ahead]
        played.do(("hold", False), ("drain",))
        clock.now_s += PAUSE_S
        steps(played)
        assert side.counters["chunks_prefetched"] > 0, "there are steps again"


def test_fetched_chunks_do_not_count_as_used_before_their_request_arrives() -> None:
    """In a later turn, the announced prompt's chunks are found in memory.

    This does not count as a use of the chunks.
    """
    with announcing() as (played, clock):
        counters, begin_s = played.trial.side.counters, clock.now_s
        clock.now_s = begin_s + a.TURNS[0] * PAUSE_S + 1
        steps(played)
        brought = counters["chunks_prefetched"]
        clock.now_s = begin_s + a.TURNS[1] * PAUSE_S + 1
        steps(played)
        assert over(played, "in_vain") == 1
        assert (counters["prefetch_used"], counters["chunks_prefetched"]) == (0, brought)
        catalog = played.trial.side.catalog
        assert sum(catalog.evict(chunk) for chunk in [*catalog.ahead.chunks]) == brought
        assert counters["prefetch_wasted"] == brought


def test_announcement_keeps_only_a_part_of_a_long_name() -> None:
    """512 announcements may be remembered for 30 days, so only the beginning of a long request name is kept."""
    with announcing() as (played, _):
        side: Any = played.trial.side
        (known,) = side.prefetching.announced.prompts.values()
        request: Any = SimpleNamespace(
            request_id="r" * 1_000_000, block_hashes=known.asked.block_hashes, num_tokens=199, num_prompt_tokens=199,
            cache_salt=None, lora_request=None, mm_features=(), prompt_embeds=None, all_token_ids=[*range(199)],
            session_id=None,
        )  # fmt: skip
        wishes = (Wish(Action.RESUME, PAUSE_S),)
        side.prefetching.finished(SimpleNamespace(request=request, wishes=wishes), {})
        (one,) = side.prefetching.announced.prompts.values()
        assert one is not known
        assert one.request_id == bounded(request.request_id)
