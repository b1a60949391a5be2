"""Tests of commands ignore the kvpipe settings of the user who runs the tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove every environment variable of kvpipe."""
    for name in [n for n in os.environ if n.upper().startswith("KVPIPE_")]:
        monkeypatch.delenv(name)
