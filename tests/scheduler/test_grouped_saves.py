"""Tests of `save_decode_steps`: generated tokens are saved only in every n-th step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvpipe.connectors.vllm.trial import arrivals
from kvpipe.connectors.vllm.trial.shapes import BLOCK, Shape
from kvpipe.connectors.vllm.trial.trial import Trial
from tests.rigs.scheduler_world import UNIT, SchedulerWorld


def _generate(world: SchedulerWorld, *requests: Any) -> None:
    """Add one unit to each request. The unit's last token remains to be computed."""
    for request in requests:
        world.grow(request, request.num_tokens // UNIT + 1)
        request.num_computed_tokens = request.num_tokens - 1


def _decode(world: SchedulerWorld, *requests: Any) -> None:
    """Compute one more unit of each request."""
    _generate(world, *requests)
    world.succeed(*world.step(*requests))


@pytest.mark.parametrize(("stages", "steps"), [(1, 4), (2, 4), (2, 3), (4, 2)])
def test_every_request_is_saved_when_requests_take_turns_in_the_stages(stages: int, steps: int) -> None:
    """With p pipeline stages, a request decodes only in every p-th step. These steps must include a step that saves."""
    world = SchedulerWorld(pipeline_stages=stages, save_steps=steps)
    world.side.slots_ready({0: world.side.catalog.slots})
    requests = [world.request(f"r{turn}", 1) for turn in range(stages)]
    for request in requests:
        world.admit(request)
        world.succeed(*world.step(request))
    for _ in range(steps + 1):
        for request in requests:
            _decode(world, request)
    assert min(map(world.found, requests)) > steps


@pytest.mark.parametrize(("running", "saving"), [(1, 32), (2, 2), (16, 2), (17, 4), (33, 8), (65, 16), (129, 32)])
def test_default_saves_in_more_steps_when_more_requests_run(running: int, saving: int) -> None:
    """`saving` of 32 steps save the generated tokens of all requests."""
    world = SchedulerWorld(save_steps=None, slots=512)
    requests = [world.request(f"r{number}", 1) for number in range(running)]
    for request in requests:
        world.admit(request)
    assert len(world.step(*requests)) == running
    saves: list[int] = []
    for _ in range(32):
        _generate(world, *requests)
        saves.append(len(world.step(*requests)))
    assert [count for count in saves if count] == [running] * saving


def test_saves_are_at_most_16_steps_apart_when_the_number_of_requests_changes() -> None:
    """Each step decides anew, from the present number of requests, whether it saves."""
    world = SchedulerWorld(save_steps=None)
    request, *others = (world.request(f"r{number}", 1) for number in range(17))
    for one in (request, *others):
        world.admit(one)
    world.step(request, *others)
    saves = []
    for step, running in enumerate((2, 17) * 32):
        _generate(world, request)
        jobs = world.step(request, *others[: running - 1])
        world.succeed(*jobs)
        saves += [step] * len(jobs)
    assert max(later - earlier for earlier, later in pairwise(saves)) <= 16


@pytest.mark.parametrize("steps", [0, 1, 14, 15, 16, 30, 31, 32])
def test_at_most_the_tokens_of_15_steps_are_lost_when_a_request_ends_or_is_preempted(steps: int) -> None:
    """Two requests run, so one step in 16 saves. Both requests add one unit per step, and stop after `steps` steps."""
    world = SchedulerWorld(save_steps=None)
    over, preempted = requests = [world.request(name, 1) for name in ("a", "b")]
    for request in requests:
        world.admit(request)
    world.succeed(*world.step(*requests))
    for _ in range(steps):
        _decode(world, *requests)
    held = world.found(over)
    assert steps + 1 - held <= 15
    world.side.finished(over)
    world.preempt(preempted)
    assert world.admit(preempted) >= held * UNIT - 1


def test_generated_tokens_that_are_computed_again_are_saved_at_once() -> None:
    """A preempted request resumes without a hit.

    One step may compute again the tokens that many steps have generated.
    """
    world = SchedulerWorld(save_steps=1024)
    request, other = world.request("a", 1), world.request("b", 1)
    for one in (request, other):
        world.admit(one)
    world.succeed(*world.step(request, other))
    for _ in range(4):
        _decode(world, request, other)
    world.preempt(request)
    assert world.admit(request) == UNIT
    world.succeed(*world.step(request, other))
    assert (world.found(request), world.found(other)) == (5, 1)


def test_prompt_is_saved_at_once_if_it_could_not_be_saved_when_it_was_computed() -> None:
    """The prompt's save has failed.

    The next decode step saves the prompt again, and does not wait for the 1024th step.
    """
    world = SchedulerWorld(save_steps=1024)
    request = world.request("a", 3)
    world.admit(request)
    (job,) = world.step(request)
    world.report((job, 0, 1))
    assert world.found(request) == 0
    _decode(world, request)
    assert world.found(request) >= 3


@pytest.mark.parametrize(
    ("windows", "local"), [((2 * BLOCK,), ()), ((None, 2 * BLOCK), ()), ((None, 3 * BLOCK), (1,))], ids=str
)
def test_answers_are_saved_before_their_blocks_leave_a_window(
    windows: tuple[int | None, ...], local: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ends long before the step that would save the generated tokens of all requests."""
    monkeypatch.setattr(arrivals, "ANSWER_TOKENS_MAX", 8 * BLOCK)
    shape = Shape(windows=windows, locals=local, load="async", save_steps=1024, blocks=36, pool_slots=24)
    trial = Trial(shape, 0)
    for move in [("add", 1, BLOCK, 0, 6 * BLOCK), ("drain",)]:
        trial.do(move)
    trial.close()
    assert trial.side.counters["save_out_of_window"] == 0
    saved = trial.side.counters["units_saved"] // len(windows)
    assert saved >= 6 - max(window // BLOCK for window in windows if window)


def test_the_chunk_of_the_saved_end_is_used_when_a_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a request ends, the policy is notified of all its chunks, even of the last chunk, which is not full."""
    world = SchedulerWorld(chunk_units=4, save_steps=1024)
    request = world.request("a", 2)
    world.admit(request)
    world.succeed(*world.step(request))
    for _ in range(4):
        _decode(world, request)
    assert world.found(request) == 2
    refreshed: list[Any] = []
    monkeypatch.setattr(world.side.catalog, "refresh", lambda chunks, **_: refreshed.extend(chunks))
    world.side.finished(request)
    assert refreshed == [world.side.catalog.find(0, request.block_hashes[1])]
