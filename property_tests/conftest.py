"""Registers the Hypothesis profiles before the tests are imported, and provides the trials that tests share."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from property_tests.profiles import register

if TYPE_CHECKING:
    from property_tests.runs import Runs

register()
# garbage collection is off during imports: modules are never garbage, and each collection would search through them
gc.disable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Collect garbage in the controller of pytest-xdist, which imports no tests."""
    if not hasattr(session.config, "workerinput") and session.config.getoption("numprocesses", None):
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude all objects that exist now from later garbage collections.

    A worker of pytest-xdist first imports the modules that its trials need, so that these modules are excluded too.
    """
    if hasattr(session.config, "workerinput") and "kvpipe.connectors.vllm.trial.trial" in sys.modules:
        from kvpipe.connectors.vllm.trial.children import warm_up  # imports vLLM

        with contextlib.suppress(Exception):  # the tests then fail with the same error
            warm_up()
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


class _Spread(LoadScopeScheduling):
    """Gives each worker one test at a time, but gives all mutants with a test of their own to one worker, first.

    The process that forks the tests of these mutants takes 20 seconds to import vLLM.
    """

    def _split_scope(self, nodeid: str) -> str:
        own = "::test_mutant_with_its_own_test_"
        return own if own in nodeid else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Spread | None:
    """Replace the default scheduler of pytest-xdist. The groups of pytest-xdist 3.8 have no effect with pytest 9."""
    return _Spread(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """Return the trials of this test run, which all workers of pytest-xdist share."""
    from property_tests.runs import Runs  # imports vLLM

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "runs"
    folder.mkdir(exist_ok=True)
    return Runs(folder)
