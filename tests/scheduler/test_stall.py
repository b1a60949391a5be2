"""Tests of two rules: which loads are asynchronous, and how long an idle step waits. No scheduler is used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.scheduler.stall import Idle, Stall

TOKEN_BYTES = 2 * 100 // 4  # two layers, pages of 100 bytes for 4 tokens
GEOMETRY = Geometry((Group((Layer("a", 100), Layer("b", 100)), block_tokens=4),), 16, 1 << 20)


@pytest.mark.parametrize(
    ("running", "loading", "rate", "stall_ms_max", "expected"),
    [
        (0, False, 1.0, 50, False),  # no other request waits, however slow the load is
        (0, True, 1.0, 0, False),
        (1, False, 0.0, 50, False),  # the rate was never measured
        (1, False, 1000 * TOKEN_BYTES / 0.05, 50, False),  # the load takes exactly the longest allowed time
        (1, False, 999 * TOKEN_BYTES / 0.05, 50, True),
        (1, True, 1e12, 50, True),  # the load would wait for the other load
        (1, False, 0.0, 0, True),  # no wait is allowed
    ],
)
def test_load_is_asynchronous_when_others_would_wait_too_long(
    running: int, loading: bool, rate: float, stall_ms_max: int, expected: bool
) -> None:
    """A load of 1000 tokens makes other requests wait. This wait is compared with the longest allowed wait."""
    stall = Stall(GEOMETRY, stall_ms_max)
    stall.running, stall.rate = running, rate
    assert stall.too_long(1000, loading=loading) is expected


def test_the_loads_of_a_step_add_up() -> None:
    """Ten hits of 30 ms in one step would take 300 ms. So the second hit is already loaded asynchronously."""
    stall = Stall(GEOMETRY, 50)
    stall.running, stall.rate = 1, 1000 * TOKEN_BYTES / 0.03
    assert not stall.too_long(1000, loading=False)
    stall.due = 1000
    assert stall.too_long(1000, loading=False)


@pytest.mark.parametrize("stall_ms_max", [0, 2])
def test_wait_for_another_requests_load_is_limited(stall_ms_max: int) -> None:
    """`stall_ms_max` limits the time for which other requests wait for a load."""
    idle = Idle(stall_ms_max)
    waits = [idle.wait_ms(SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None), loading=True) for _ in "12"]
    assert waits == [0, stall_ms_max]
