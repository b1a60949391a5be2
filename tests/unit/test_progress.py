"""Tests of the order of test files in `make test`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import progress


def test_files_of_unknown_and_of_long_duration_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this order, short files run last, so no core waits long at the end.

    The order within a file does not change.
    """
    monkeypatch.setattr(progress, "_durations", lambda: {"short.py": 0.1, "long.py": 200.0})
    names = ("short.py::a", "long.py::a", "new.py::b", "new.py::a")
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    progress.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["new.py::b", "new.py::a", "long.py::a", "short.py::a"]
