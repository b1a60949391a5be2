"""The engine's pace of computing prompts is measured between steps, and decides which requests wait for tiers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpipe.scheduler.pace import BURST_STEPS_MAX, BURSTS, LOAD_S, Pace
from kvpipe.statemachine import stage as m
from tests.trials.test_fetches import ADD, in_play

PREFILL, DECODE = 8192, 8
PREFILL_S, DECODE_S = 0.4, 0.02


def _paced(steps: Sequence[int], *, ahead: bool = False) -> float:
    """Return the pace after steps with these tokens.

    With `ahead`, each step is planned when the previous step begins.
    """
    pace, now_s, before_s = Pace(), 100.0, 0.0
    for tokens in steps:
        pace.step([tokens], now_s)
        takes_s = PREFILL_S if tokens == PREFILL else DECODE_S
        now_s, before_s = now_s + (before_s if ahead else takes_s), takes_s
    return pace.s_per_token


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("prompt", [1, 2, 5, 3 * BURST_STEPS_MAX])
def test_burst_is_measured_until_the_next_step(prompt: int, *, ahead: bool) -> None:
    """A *burst* is consecutive steps with prompts.

    A burst is measured until the next step begins, whether or not that step was planned earlier. Decoding does not
    count.
    """
    steps = ([DECODE] * 5 + [PREFILL] * prompt) * 9 + [DECODE] * 3
    assert _paced(steps, ahead=ahead) == pytest.approx(
        PREFILL_S / PREFILL, rel=DECODE_S / PREFILL_S / min(prompt, 5) + 1e-9
    )


def test_pace_is_unknown_until_a_prompt_was_computed() -> None:
    """The pace is unknown until a prompt's first step has ended.

    A large batch that decodes with drafts does not count as a prompt.
    """
    assert _paced([DECODE] * 40) == _paced([]) == _paced([DECODE, PREFILL]) == 0.0
    pace = Pace()
    for at in range(9):
        pace.step([DECODE] * 256, at * 0.1)
    assert pace.s_per_token == 0.0


def test_idle_times_and_hiccups_do_not_count() -> None:
    """The pace is the median of the last bursts, so idle times after single bursts do not count."""
    pace, now_s = Pace(), 0.0
    for burst in range(BURSTS):
        pace.step([PREFILL], now_s)
        pace.step([DECODE], now_s + PREFILL_S)
        now_s += PREFILL_S + (60.0 if burst % 3 == 0 else DECODE_S)
    pace.step([DECODE], now_s)
    assert pace.s_per_token == pytest.approx((PREFILL_S + DECODE_S) / PREFILL)


def test_pace_follows_a_faster_device() -> None:
    """If a device becomes faster, the pace becomes the new speed after a few bursts."""
    pace, now_s = Pace(), 0.0
    for takes_s in [0.6] * 20 + [0.2] * BURSTS:
        pace.step([PREFILL], now_s)
        pace.step([DECODE], now_s + takes_s)
        now_s += takes_s + DECODE_S
    assert pace.s_per_token == pytest.approx((0.2 + DECODE_S) / PREFILL)


def test_the_load_is_the_share_of_time_that_prompts_take() -> None:
    """If prompts take half of the time, the load is one half, whatever other steps there are.

    After a long pause the load is zero.
    """
    pace, now_s = Pace(), 0.0
    assert pace.load == 0.0
    while now_s < 10 * LOAD_S:
        pace.step([PREFILL], now_s)
        pace.step([DECODE], now_s + PREFILL_S)
        pace.step([DECODE], now_s + PREFILL_S + DECODE_S)
        now_s += 2 * PREFILL_S
    assert pace.load == pytest.approx(0.5, abs=0.05)
    pace.step([DECODE], now_s + 20 * LOAD_S)
    assert pace.load < 0.01


def test_an_engine_is_busy_until_a_burst_is_over() -> None:
    """The engine counts as busy until two steps after the last step of a prompt."""
    pace, seen = Pace(), list[bool]()
    for at, tokens in enumerate([DECODE, PREFILL, PREFILL, DECODE, DECODE]):
        pace.step([tokens], at * 0.1)
        seen.append(pace.busy)
    assert seen == [False, True, True, True, False]


def test_request_waits_for_more_chunks_as_long_as_computing_the_arrived_chunks_takes() -> None:
    """At ten seconds per token, the 128 tokens that have arrived would take 21 minutes to compute.

    So the request waits 21 minutes for more chunks, but not half an hour.
    """
    step = ("schedule",), ("update",)
    with in_play() as played:
        played.do(ADD, ("schedule",), ("update",), ("hold", True), *step)
        assert played.waiting == [m.FETCHING]
        (stage,) = played.staging._stages
        stage.taken, played.staging.patience.pace.s_per_token = {0: 128}, 10.0
        played.do(("late",), *step)
        assert played.waiting == [m.FETCHING]
        played.do(("late",), ("late",), *step)
        assert played.waiting != [m.FETCHING]
        assert played.trial.side.counters["tier_lookup_late"] == 1
        played.do(("hold", False), ("drain",))
