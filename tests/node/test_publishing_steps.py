"""An engine sends its reports as soon as a chunk has landed. So publication takes as few steps as the holder allows."""

from __future__ import annotations

import pytest

from kvpipe.protocol.engine import LATER
from kvpipe.protocol.messages import Report
from tests.node.tiered_worlds import UNIT_TOKENS, TieredWorlds


@pytest.mark.parametrize("slow", [False, True])
def test_fetched_chunks_are_found_in_the_first_step_after_their_publication(
    tiered: TieredWorlds, *, slow: bool
) -> None:
    """The holder carries a batch out at once, or (`slow`) at the engine's next poll.

    A private pool would take no step.
    """
    world, steps = tiered.start(), 0
    request = world.in_tier("a", 8)
    world.want(request)
    world.step()
    world.pool.slow = slow
    world.carry()
    world.carry()
    while world.side.lookup(request, 0) is LATER:
        world.step()
        steps += 1
    assert world.ask(request) == 8 * UNIT_TOKENS
    assert steps == slow


@pytest.mark.parametrize("slow", [False, True])
def test_saved_chunks_are_found_in_the_first_step_after_their_publication(tiered: TieredWorlds, *, slow: bool) -> None:
    """The engine sends its reports when the save has landed. The engine does not wait for the next step."""
    world, steps = tiered.start(), 0
    request = world.request("one", 8)
    world.requests = [request]
    world.admit(request)
    (job,) = world.step(request)
    world.pool.slow = slow
    world.end(job)
    while not world.found(request):
        world.step()
        steps += 1
    assert world.found(request) == 8
    assert steps == slow


def test_reports_that_the_holder_answers_while_a_step_runs_are_read_with_its_report(tiered: TieredWorlds) -> None:
    """If the holder answers during a step, the next lookup finds the published chunks. The step was planned before."""
    world = tiered.start()
    request = world.in_tier("a", 8)
    world.want(request)
    world.step()
    world.pool.mute = True
    world.carry()
    world.carry()
    world.step()
    assert world.side.lookup(request, 0) is LATER
    world.pool.mute = False
    world.side.reported(Report())
    answer = world.side.lookup(request, 0)
    assert answer is not LATER
    assert answer.tokens == 8 * UNIT_TOKENS
