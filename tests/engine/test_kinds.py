"""Kinds of caches whose models need kernels in Triton: on a CPU, by its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

SECONDS_MAX = 540


@pytest.mark.parametrize("family", ["deepseek-v4"])
def test_ladder(family: str) -> None:
    """The whole ladder, in a process that has the interpreter."""
    command = [sys.executable, "-m", "tests.engine.interpreted", family]
    ran = subprocess.run(
        command, env=dict(os.environ), capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
