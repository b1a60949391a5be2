"""Tests of the conformance suites as their users see them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvpipe.testing.waiting import WAIT_S

SUITES = {
    "engine_conformance.EngineConformance": ("make", "test_hits_are_loaded"),
    "policy_conformance.PolicyConformance": ("make", "test_any_moves"),
    "tier_conformance.TierConformance": ("world", "test_health_returns"),
    "transfer_conformance.TransferConformance": ("world", "test_what_was_saved_is_what_is_loaded"),
}
"""For each suite, the name that a subclass must define, and the name of one test of the suite."""


USE = """
from kvpipe.testing.{module} import {name}

class Test{name}({name}):
    pass
"""
KIND = """
import pytest
from hypothesis import Phase, settings

settings.register_profile("once", phases=[Phase.generate], database=None)
settings.load_profile("once")

@pytest.fixture(scope="module")
def kind():
    return ""
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of pytest for one test of a subclass of each suite. All tests run in one process."""
    folder = tmp_path_factory.mktemp("suites")
    (folder / "conftest.py").write_text(KIND, encoding="utf-8")
    for suite in SUITES:
        module, name = suite.split(".")
        (folder / f"test_{module}.py").write_text(USE.format(module=module, name=name), encoding="utf-8")
    claims = " or ".join(claim for _, claim in SUITES.values())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", claims]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=5 * WAIT_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "passed" not in done.stdout
    return done.stdout


@pytest.mark.parametrize("suite", SUITES)
def test_suite_without_a_required_name_fails_and_names_it(suite: str, printed: str) -> None:
    """A subclass of a suite lacks a required name: its tests fail, and the message has the name.

    Pytest does not collect the suite itself.
    """
    (module, name), (method, claim) = suite.split("."), SUITES[suite]
    assert f"Test{name} does not override `{method}`: it must return " in printed
    bad = re.findall(rf"^(?:ERROR|FAILED) (test_{module}\.py::\w+::\w+)", printed, flags=re.MULTILINE)
    assert set(bad) == {f"test_{module}.py::Test{name}::{claim}"}
