"""Registers the profiles of Hypothesis before any test module is imported."""

import atexit
import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from property_tests.profiles import register

register()
# garbage collection is off while tests are imported: modules are never garbage, but each collection would search them
gc.disable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the controller of pytest-xdist collect garbage, because it imports no tests."""
    if not hasattr(session.config, "workerinput") and session.config.getoption("numprocesses", None):
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude all present objects from later collections of garbage. These objects live as long as the process.

    About 50,000 of them are garbage. Searching for this garbage would take each worker a second.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a temporary folder for Unix sockets. A socket's path has at most about 100 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="kvp", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
