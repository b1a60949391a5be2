"""Announced prompts do not keep an engine that has nothing else to do from stopping."""

from __future__ import annotations

from typing import Any

import pytest

from kvpipe.scheduler import announced as a
from tests.scheduler.test_announced import PAUSE_S, STEPS, announcing, steps


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "due"])
def test_an_engine_that_has_nothing_else_to_do_is_not_kept_from_stopping_for_long(*, begun: bool) -> None:
    """It may be about to end, or to pause for new weights, whatever was announced and however slow tiers are."""
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
