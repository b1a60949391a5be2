"""The conformance suites, as whoever uses them meets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvpipe.testing.waiting import WAIT_S

SUITES = {
    "engine_conformance.EngineConformance": ("make", "test_hits_are_loaded"),
    "policy_conformance.PolicyConformance": ("make", "test_any_moves"),
    "tier_conformance.TierConformance": ("world", "test_health_returns"),
    "transfer_conformance.TransferConformance": ("world", "test_what_was_saved_is_what_is_loaded"),
}
"""What a subclass must override, and a claim."""


@pytest.mark.parametrize("suite", SUITES)
def test_what_was_not_overridden_is_named(suite: str, tmp_path: Path) -> None:
    """A suite whose user has forgotten what it must be given fails, and names it; the suite itself is not collected."""
    (module, name), (method, claim) = suite.split("."), SUITES[suite]
    text = f"""
import pytest
from kvpipe.testing.{module} import {name}

@pytest.fixture(scope="module")
def kind():
    return ""

class TestMine({name}):
    pass
"""
    (tmp_path / "test_mine.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py", "-k", claim]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"TestMine does not override `{method}`: it must return " in done.stdout
    assert "passed" not in done.stdout
