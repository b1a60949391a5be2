"""Every engine test is traced. The trace is replayed through the state machines, and every transition must be legal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.common import assert_legal, waiting
from tests.rigs.forked import forked_ranks


@pytest.fixture(autouse=True, scope="module")
def _patience() -> Iterator[None]:
    """Make waits long enough for a slow machine."""
    with waiting():
        yield


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork ranks instead of spawning them, unless the test has the marker `spawned`."""
    if request.node.get_closest_marker("spawned"):
        yield
    else:
        with forked_ranks():
            yield


@pytest.fixture(autouse=True)
def trace_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The trace file of the test. All engines and all their processes append to this file."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    monkeypatch.setenv("KVPIPE_TRACE_FILE", str(path))
    yield path
    assert_legal(path)
