"""States that vLLM offers under the key of a boundary at which no step has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.connectors.vllm.remedies.overrun import overrun
from kvpipe.geometry import Geometry, Group, Layer

GEOMETRY = Geometry(
    (Group((Layer("a", 64),), 32), Group((Layer("s", 64),), 32, state=True)), 128, 64 * 4096, match_tokens=8
)


@pytest.mark.parametrize(
    ("start", "scheduled", "tokens", "prompt", "wrong"),
    [
        (8, 32, 32, 81, True),  # begins within the block, and goes on behind it
        (8, 24, 32, 81, False),  # ends with it
        (40, 8, 40, 81, False),  # copied before the step goes on
        (8, 93, 80, 101, False),  # exported
        (0, 40, 32, 81, False),  # begins with a block: exported, or not offered
        (31, 4, 32, 20, False),  # drafts of a decode
        (40, 60, 64, 50, True),  # a preempted request's answer
    ],
)
def test_a_step_that_went_on_behind_its_block(
    start: int, scheduled: int, tokens: int, prompt: int, *, wrong: bool
) -> None:
    """It left no state there."""
    computed = start + (1 if start == 31 else scheduled)
    request: Any = SimpleNamespace(
        request_id="one", num_computed_tokens=start, num_prompt_tokens=prompt, num_tokens=max(prompt, computed)
    )
    other: Any = SimpleNamespace(request_id="other", num_computed_tokens=0, num_prompt_tokens=9, num_tokens=9)
    step: Any = SimpleNamespace(
        num_scheduled_tokens={"one": scheduled, "other": 9},
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads={"one": [(1, 5, tokens)]}),
    )
    assert overrun(step, [other, request], GEOMETRY) == ({5} if wrong else set())
    assert overrun(SimpleNamespace(num_scheduled_tokens={"one": 4}), [request], GEOMETRY) == set()
