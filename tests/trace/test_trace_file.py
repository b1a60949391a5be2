"""Tests of the trace's file: its mode, refused kinds of files, and the cost of a bad event or a held lock."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from kvpipe.config.settings import load_settings
from kvpipe.config.tracing import tracing
from kvpipe.errors import ConfigError
from kvpipe.testing.logged import capture_logs
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.reader import Trace
from kvpipe.trace.recorder import LogSink, Recorder, Writer
from tests.trace.test_recorder import Memory
from tests.trace.test_recorder import _event as event
from tests.trace.test_recorder import _file as file
from tests.trace.test_recorder import _numbers as numbers


@pytest.mark.parametrize("where", ["queue", "file", "log"])
def test_one_bad_event_costs_no_other(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 64 events cannot be made, encoded or logged. Only this event is lost and counted."""
    reported, sink = Recorder(0), Memory()
    path = tmp_path / "trace"
    bad: Any = event(31, "\ud800" if where == "file" else "bad")
    if where == "queue":
        bad = transitions.TakenEdge(1, "r", 1, 1, None, 1, None, None, "")  # type: ignore[arg-type]
    for one in [*map(event, range(31)), bad, *map(event, range(32, 64))]:
        reported._queue.append(one)
    logged: list[int] = []

    def log_event(one: e.Event) -> None:
        if isinstance(one, e.LeasesTaken):
            assert one.request != "bad"
            logged.append(one.chunks)

    monkeypatch.setattr("kvpipe.trace.log.log_event", log_event)
    writer = Writer(reported, [LogSink(0), file(path), sink], "engine")
    writer.close()
    whole, less = [*range(64)], [*range(31), *range(32, 64)]
    kept = [one.chunks for one in sink.events if isinstance(one, e.LeasesTaken)]
    assert kept == (less if where == "queue" else whole)
    assert numbers(path) == (whole if where == "log" else less)
    assert logged == (whole if where == "file" else less)
    assert reported.losses == {"queue": 0, "sink": 1}


def test_a_trace_is_its_owners_alone(tmp_path: Path) -> None:
    """The file and the next file have mode 0600 under any umask. An existing file keeps its mode."""
    before = os.umask(0)
    try:
        path = tmp_path / "trace"
        sink = file(path, 2000)
        for i in range(20):
            assert not sink.write([event(i)])
        sink.close()
        assert {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()} == {0o600}
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        os.umask(before)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """If there is a link at the trace's path, events are lost, and the link's target is neither written nor created."""
    path, beyond = tmp_path / "trace", tmp_path / "beyond"
    for _ in range(2):
        path.symlink_to(beyond)
        sink = file(path)
        assert "Too many levels of symbolic links" in sink.write([event(1)])
        sink.close()
        path.unlink()
        assert not beyond.exists() or beyond.read_bytes() == b"mine"
        beyond.write_bytes(b"mine")


def test_a_lock_on_a_full_trace_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds the lock of a full trace, so the file cannot be rotated.

    Events are lost and counted, and the writer does not wait long.
    """
    monkeypatch.setattr("kvpipe.trace.recorder._LOCK_S_MAX", 0.05)
    path = tmp_path / "trace"
    sink = file(path, 2000)
    assert not sink.write([event(i) for i in range(20)])
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "keeps the file locked" in sink.write([event(20)])
    assert not sink.write([event(21)])
    sink.close()
    assert [one.count for one in Trace(path) if isinstance(one, e.Dropped)] == [1]


@pytest.mark.parametrize("kind", ["link", "folder", "socket", "no folder"])
def test_path_that_cannot_be_a_trace_is_refused(kind: str, tmp_path: Path) -> None:
    """The path is refused with one sentence before the engine starts."""
    path = tmp_path / ("a/trace" if kind == "no folder" else "t")
    if kind == "link":
        path.symlink_to(tmp_path / "beyond")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    with pytest.raises(ConfigError, match=rf"trace_file='.+': .*{kind.removeprefix('no ')}.*name"):
        tracing(load_settings({"trace_file": str(path)}), "e", "worker", 0, 1)


@pytest.mark.parametrize("kind", ["pipe", "device", "file", "new"])
def test_path_that_can_be_a_trace_is_accepted(kind: str, tmp_path: Path) -> None:
    """A pipe, a character device and a file are accepted. A warning reports a file that others can read."""
    path = Path("/dev/null") if kind == "device" else tmp_path / "t"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "file":
        path.touch()
        path.chmod(0o644)
    with capture_logs() as lines:
        recorder, writer = tracing(load_settings({"trace_file": str(path)}), "e", "worker", 0, 1)
        writer.close()
    assert recorder.lost == (1 if kind == "pipe" else 0)
    doubts = [line["why"] for line in lines if line["event"] == "trace_file_shared"]
    assert doubts == (["its mode 0644 lets others read it"] if kind == "file" else [])
