"""vLLM may offer a state under the key of a boundary at which no step has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.connectors.vllm.remedies.overrun import overrun
from kvpipe.protocol.geometry import Geometry, Group, Layer

GEOMETRY = Geometry(
    (Group((Layer("a", 64),), 32), Group((Layer("s", 64),), 32, state=True)), 128, 64 * 4096, match_tokens=8
)


@pytest.mark.parametrize(
    ("start", "scheduled", "tokens", "prompt", "wrong"),
    [
        (8, 32, 32, 81, True),  # the step begins within the block, and continues after it
        (8, 24, 32, 81, False),  # the step ends with the block
        (40, 8, 40, 81, False),  # the state is copied before the step continues
        (8, 93, 80, 101, False),  # the state is exported
        (0, 40, 32, 81, False),  # the step begins with a block, so the state is exported or not offered
        (31, 4, 32, 20, False),  # a decode step with drafts is not checked
        (40, 60, 64, 50, True),  # after a preemption, one step computes the rest of the prompt and the old answer
    ],
)
def test_step_beyond_a_boundary_leaves_no_state(
    start: int, scheduled: int, tokens: int, prompt: int, *, wrong: bool
) -> None:
    """A prefill step that ran over a boundary has left no state at the boundary."""
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
