"""No process of a child engine is left after the end of the child, even if a rank hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest

from kvpipe.testing.waiting import WAIT_S
from tests.engine import child_engine
from tests.engine.child_engine import Child
from tests.rigs.forked import members

pytestmark = pytest.mark.engine


def _serve_with_a_rank_that_hangs(pipe: Connection, _options: dict[str, Any], environment: dict[str, str]) -> None:
    """Stand in for an engine whose rank hangs. The engine's own process hangs, too, if `environment` says so."""
    if not (rank := os.fork()):
        os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(rank, os.WUNTRACED)
    pipe.send(([], {}))
    while "hangs" in environment:
        time.sleep(WAIT_S)


@pytest.fixture
def ends_late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Child:
    """Return an engine with a rank that hangs. `request.param` says whether the engine's own process hangs, too."""
    monkeypatch.setattr(child_engine, "serve", _serve_with_a_rank_that_hangs)
    made = Child({}, {"hangs": ""} if request.param else {})
    assert made._pipe.poll(WAIT_S)
    assert members(made._process.pid)
    return made


@pytest.mark.parametrize("ends_late", [False, True], indirect=True)
def test_kill_ends_a_rank_that_hangs(ends_late: Child) -> None:
    """The rank ignores the end of the engine's own process."""
    ends_late.kill()
    assert not members(ends_late._process.pid)


@pytest.mark.parametrize("ends_late", [False, True], indirect=True)
def test_close_reports_and_kills_a_process_that_hangs(ends_late: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that closes an engine fails if a process of the engine does not end. No process is left all the same."""
    monkeypatch.setattr(child_engine, "WAIT_S", 0.3)
    monkeypatch.setattr("kvpipe.testing.waiting.EVENTUALLY_S", 0.3)
    with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
        ends_late.close()
    assert not members(ends_late._process.pid)
