"""kvpipe also counts preemptions that vLLM does not report."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.request import RequestStatus

from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import Trial

REQUESTS, STEPS_MAX = 6, 200


@pytest.mark.parametrize("aborts", [False, True])
def test_vllm_lacks_those_of_requests_that_were_aborted_before_their_next_output(aborts: bool) -> None:
    """vLLM reports a preemption only with the request's next output.

    kvpipe counts the preemption even if no output follows.
    """
    trial = Trial(SHAPES["sync"], 3)
    trial.scheduler.log_stats = True
    trial.scheduler.make_stats = lambda *_, **__: None
    update, received, lost = trial.scheduler.update_from_output, 0, 0

    def receive(*args: Any) -> Any:
        nonlocal received
        stated = update(*args)
        events = [event for outputs in stated.values() for one in outputs.outputs for event in one.events or ()]
        received += sum(event.type == EngineCoreEventType.PREEMPTED for event in events)
        return stated

    trial.scheduler.update_from_output = receive
    try:
        for i in range(REQUESTS):
            trial.do(("add", i, 100, i, 60, 0, 0))
        for _ in range(STEPS_MAX):
            trial.do(("step", 1))
            for place, request in reversed(list(enumerate(trial.live))):
                there = trial.scheduler.requests.get(request)
                if aborts and there is not None and there.status == RequestStatus.PREEMPTED:
                    lost += sum(event.type == EngineCoreEventType.PREEMPTED for event in there.events)
                    trial.do(("abort", place))
        trial.do(("drain",))
        assert trial.side.counters["preempted"] == received + lost > 0
        assert bool(lost) is aborts
    finally:
        trial.close()
