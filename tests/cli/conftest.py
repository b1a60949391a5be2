"""Commands are tested without the settings of whoever runs the tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of kvpipe's is set."""
    for name in [n for n in os.environ if n.upper().startswith("KVPIPE_")]:
        monkeypatch.delenv(name)
