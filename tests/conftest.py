"""Hypothesis profiles are registered before a test module is imported."""

import atexit
import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from property_tests.profiles import register

register()
# No collection until all tests are imported: modules never become garbage, and every search of them takes time.
gc.disable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Collect garbage in the controller of pytest-xdist, which imports no tests."""
    if not hasattr(session.config, "workerinput") and session.config.getoption("numprocesses", None):
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude all objects that are imported by now from later collections of garbage, because these objects stay."""
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a temporary folder with a short path for Unix sockets.

    A socket's path may have about 100 bytes at most.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvp", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
