"""A repeated prompt is found, with all kinds of drafts and all ways to divide blocks."""

from __future__ import annotations

import pytest

from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.errors import UnsupportedError

SHAPES_OF_STATES = sorted(name for name, shape in SHAPES.items() if shape.states)
KINDS = [(name, dense) for name in SHAPES_OF_STATES for dense in (False, True)]
REFUSED = [(name, dense) for name, dense in KINDS if dense and SHAPES[name].stages > 1 and SHAPES[name].drafts]
"""Shapes that kvpipe refuses, because an earlier pipeline stage does not have the states of answers."""
STEPS_MAX = 200


def run(trial: Trial) -> None:
    """Run until no request is left and vLLM has freed the blocks that steps in flight could write."""
    for _ in range(STEPS_MAX):
        trial.do(("step", 3))
        trial.do(("tick", 50, 50))
        if not (trial.scheduler.has_requests() or trial.scheduler.deferred_frees):
            return
    raise AssertionError("it does not end")


@pytest.mark.parametrize(("shape", "dense"), [kind for kind in KINDS if kind not in REFUSED])
def test_repeated_prompt_is_found(shape: str, *, dense: bool) -> None:
    """After vLLM has dropped the prompt, kvpipe has the last state that vLLM has offered, and all KV before it."""
    trial = Trial(SHAPES[shape]._replace(dense=dense, failing=False), seed=3)
    try:
        hits = 0
        for _ in range(3):
            trial.do(("add", 0, 98, 0, 2, 0, 0))
            run(trial)
            assert trial.scheduler.kv_cache_manager.reset_prefix_cache()
            hits = trial.side.stats().get("tokens_loaded", 0)
        assert (trial.violations, trial.wrong) == ([], [])
        assert hits > 0
    finally:
        trial.close()


@pytest.mark.parametrize("shape", sorted(name for name, shape in SHAPES.items() if shape.policy != "lru"))
def test_evictions_do_not_depend_on_the_speed_of_the_machine(shape: str) -> None:
    """The policy's clock counts steps, so a sequence has only one outcome."""
    trial = Trial(SHAPES[shape], seed=3)
    try:
        trial.do(("add", 0, 98, 0, 2, 0, 0))
        for _ in range(3):
            assert trial.side.catalog.now_s == trial.steps
            trial.do(("step", 3))
    finally:
        trial.close()


@pytest.mark.parametrize(("shape", "dense"), REFUSED)
def test_state_that_an_earlier_stage_lacks_is_refused(shape: str, *, dense: bool) -> None:
    """With drafts, vLLM offers states of answers, and an earlier pipeline stage does not have these states."""
    with pytest.raises(UnsupportedError, match=r"prefix_cache_retention_interval=None .*; set it to 0$"):
        Trial(SHAPES[shape]._replace(dense=dense, failing=False), seed=3)
