"""Replicas of an engine have names of their own in traces."""

from __future__ import annotations

import pytest

from kvpipe.connectors.vllm.started import traced_engine_name


@pytest.mark.parametrize(
    ("given", "called"),
    [
        ("4fa8270b-6c4e-4ab0-9d7e-0f9f0d8f6f3a", "4fa8270b"),
        ("4fa8270b-6c4e-4ab0-9d7e-0f9f0d8f6f3a_dp1", "4fa8270b_dp1"),
        ("kvpipe-engine-0", "kvpipe-engine-0"),
        ("mine_dp12", "mine_dp12"),
    ],
)
def test_replicas_have_names_of_their_own(given: str, called: str) -> None:
    """A random id is shortened. An id that the user has set, and the number of the replica, are not shortened."""
    assert traced_engine_name(given) == called
