"""Events pass from `put` to the file and the log in order, in a bounded queue, without a delay of the caller."""

from __future__ import annotations

import errno
import io
import logging
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvpipe.config.settings import load_settings
from kvpipe.config.tracing import tracing
from kvpipe.errors import ConfigError
from kvpipe.testing.logged import capture_logs
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.trace import events as e
from kvpipe.trace import log, recorder
from kvpipe.trace.reader import Trace, files_of
from kvpipe.trace.recorder import FileSink, LogSink, Recorder, Writer

BIG = 1 << 30


def _event(number: int, request: str = "r") -> e.LeasesTaken:
    return e.LeasesTaken(number, 0, request, 1, 2, chunks=number)


Numbered = e.Dropped | e.LeasesTaken


def _file(path: Path, bytes_max: int = BIG) -> FileSink:
    return FileSink(path, bytes_max, e.Started(0, 0, "", 0, 0, layers=3))


def _numbers(*paths: Path) -> list[int]:
    return [one.chunks for path in paths for one in Trace(path) if isinstance(one, e.LeasesTaken)]


class Memory:
    """A sink that keeps events. The sink may hang, or report events as lost."""

    def __init__(self) -> None:
        """Start without events."""
        self.events: list[e.Event] = []
        self.closed = False
        self.lost = 0
        self.why = ""
        self.hold = threading.Event()
        self.hold.set()

    def write(self, events: Sequence[e.Event]) -> str:
        """See `Sink`."""
        self.hold.wait(WAIT_S)
        self.events += events
        self.lost += len(events) if self.why else 0
        return self.why

    def close(self) -> None:
        """See `Sink`."""
        self.closed = True


def _until(true: Callable[[], bool]) -> None:
    assert eventually(true)


def test_events_arrive_in_order_with_engine_and_both_clocks() -> None:
    """Every sink gets every event once. The wall clock and the monotonic clock are read at the same moment."""
    sinks = Memory(), Memory()
    reported = Recorder(0, lifecycle=True)
    writer = Writer(reported, sinks, "engine")
    before = time.time_ns()
    for number in range(200):
        reported.put(e.LeasesTaken(time.monotonic_ns(), 0, "r", 1, 2, chunks=number))
    after = time.time_ns()
    writer.close()
    for sink in sinks:
        taken = [one for one in sink.events if isinstance(one, e.LeasesTaken)]
        assert [one.chunks for one in taken] == list(range(200))
        assert all(one.engine == "engine" and before - 10**6 <= one.wall_ns <= after + 10**6 for one in taken)
        assert isinstance(sink.events[-1], e.Ended)
        assert sink.closed
    writer.close()
    assert sum(isinstance(one, e.Ended) for one in sinks[0].events) == 1


def test_a_full_queue_drops_and_reports_how_many() -> None:
    """`put` never waits.

    Events for which the queue has no room are counted, and the trace has their number at their place.
    """
    sink = Memory()
    sink.hold.clear()
    reported = Recorder(0, queue_events_max=10)
    writer = Writer(reported, [sink], "engine")
    reported.put(_event(0))
    _until(lambda: not reported.waiting)  # the writer hangs in the sink
    for number in range(1, 31):
        reported.put(_event(number))
    assert reported.dropped == 20
    sink.hold.set()
    _until(lambda: len(sink.events) >= 11)
    reported.put(_event(99))
    writer.close()
    assert [one.chunks for one in sink.events if isinstance(one, e.LeasesTaken)] == [*range(11), 99]
    assert [one.count for one in sink.events if isinstance(one, e.Dropped)] == [20]
    (ended,) = [one for one in sink.events if isinstance(one, e.Ended)]
    assert ended.dropped == 20
    assert writer.dropped == 20


def test_gap_is_reported_between_its_events() -> None:
    """The trace reports the gap between the events before and after it, so that a replay begins anew at this place."""
    reported = Recorder(0, queue_events_max=3)
    for number in range(5):
        reported.put(_event(number))
    taken = reported.take()
    reported.put(_event(5))
    taken += reported.take()
    message = [one.count if isinstance(one, e.Dropped) else -one.chunks for one in taken if isinstance(one, Numbered)]
    assert message == [0, -1, -2, 2, -5]
    for number in range(5):
        reported.put(_event(number))
    reported.end(0)
    assert [type(one) for one in reported.take()][-2:] == [e.Dropped, e.Ended]


def test_a_trace_that_cannot_be_written_is_logged(tmp_path: Path) -> None:
    """A trace that cannot be written cannot report the lost events.

    So the events are counted, and the number is logged once a minute.
    """
    reported = Recorder(0)
    with capture_logs() as lines:
        writer = Writer(reported, [_file(tmp_path / "gone" / "trace")], "engine")
        for number in range(5):
            reported.put(_event(number))
            _until(lambda: not reported.waiting)
        writer.close()
    (line,) = lines
    assert line["event"] == "trace_lost"
    assert "No such file" in line["why"]
    assert reported.losses == {"queue": 0, "sink": 6}


def test_hanging_sink_delays_neither_put_nor_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a sink hangs, `put` returns at once, and `close` returns within a time limit."""
    monkeypatch.setattr(recorder, "CLOSE_S_MAX", 0.1)
    sink = Memory()
    sink.hold.clear()
    reported = Recorder(0)
    writer = Writer(reported, [sink], "engine")
    reported.put(_event(0))
    _until(lambda: not reported.waiting)
    reported.put(_event(1))
    writer.close()
    assert not sink.closed, "it still hangs"
    sink.hold.set()


def test_a_sink_that_raises_loses_its_events_only() -> None:
    """The other sinks and the writer's thread continue without a loss."""

    class Broken(Memory):
        def write(self, events: Sequence[e.Event]) -> str:
            raise ValueError(f"cannot take {len(events)}")

    sink = Memory()
    reported = Recorder(0)
    with capture_logs() as logs:
        writer = Writer(reported, [Broken(), sink], "engine")
        reported.put(_event(0))
        _until(lambda: bool(sink.events))
        reported.put(_event(1))
        writer.close()
    assert [one.chunks for one in sink.events if isinstance(one, e.LeasesTaken)] == [0, 1]
    assert ["Broken: ValueError" in line["why"] for line in logs if line["event"] == "trace_lost"] == [True]
    assert reported.losses == {"queue": 0, "sink": 3}


def test_the_sample_depends_on_the_request_id_only() -> None:
    """Whether a request is traced depends only on the request's id."""
    names = [f"request-{i}" for i in range(2000)]
    half, other = Recorder(0, sample=0.5), Recorder(3, sample=0.5)
    chosen = [name for name in names if half.sampled(name)]
    assert chosen == [name for name in names if other.sampled(name)]
    assert 800 < len(chosen) < 1200
    assert all(Recorder(sample=1.0).sampled(name) for name in names)
    assert not any(Recorder(sample=0.0).sampled(name) for name in names)
    assert half.sampled("\ud800") in {True, False}, "whatever its id is made of"


# ---- the file -------------------------------------------------------------------------------------------------------


def test_file_begins_with_its_writer(tmp_path: Path) -> None:
    """A file begins with the event `started`. A second process appends its own `started`."""
    path = tmp_path / "trace"
    for rank in (0, 1):
        sink = FileSink(path, BIG, e.Started(0, rank, "", 0, 0, layers=3))
        assert not sink.write([_event(rank)])
        sink.close()
    started = [one for one in Trace(path) if isinstance(one, e.Started)]
    assert [one.rank for one in started] == [0, 1]
    assert _numbers(path) == [0, 1]


@pytest.mark.parametrize("events", [0, 1])
def test_a_file_states_the_layers_of_a_rank_that_has_its_caches_now(tmp_path: Path, events: int) -> None:
    """A rank learns its number of layers after its first events, and then repeats `started` with this number.

    The first line of each later file has the number, too.
    """
    path = tmp_path / "trace"
    sink = _file(path)
    writer = Writer(Recorder(0), [sink], "engine")
    assert not events or not sink.write([_event(0)])
    writer.set_layers(1)
    for number in (1, 2):
        assert not sink.write([_event(number)])
    writer.close()
    assert [one.layers for one in Trace(path) if isinstance(one, e.Started)] == [3] * events + [1]


def test_processes_share_a_file_line_by_line(tmp_path: Path) -> None:
    """Four processes append to one file. No line is torn or lost."""
    path = tmp_path / "trace"
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, '.')\n"
        "from kvpipe.testing.waiting import WAIT_S\n"
        "from kvpipe.trace import recorder\n"
        "from tests.trace.test_recorder import _event, _file\n"
        "recorder._LOCK_S_MAX = WAIT_S\n"
        "sink = _file(Path(sys.argv[1]))\n"
        "for i in range(300): assert not sink.write([_event(i), _event(i)])\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(4)]
    assert [child.wait(WAIT_S) for child in children] == [0] * 4
    trace = Trace(path)
    assert sum(isinstance(one, e.LeasesTaken) for one in trace) == 2400
    assert not trace.unread


def test_full_file_is_renamed_and_a_new_file_begins(tmp_path: Path) -> None:
    """Both files have at most `trace_bytes_max` bytes. A process that finds the file renamed opens the new file."""
    path = tmp_path / "trace"
    bytes_max = 40_000
    sinks = _file(path, bytes_max), _file(path, bytes_max)
    for number in range(600):
        assert not sinks[number % 2].write([_event(number)])
        assert sum(part.stat().st_size for part in files_of(path)) <= bytes_max + 2000
    old, new = files_of(path)
    assert old.name == "trace.1"
    assert old.stat().st_size >= bytes_max // 2 - 500, "put aside once, not by both"
    held = sorted(_numbers(old, new))
    assert held == list(range(held[0], 600))
    parts = [one.part for one in Trace(new) if isinstance(one, e.Started)]
    assert parts
    assert all(parts)
    for sink in sinks:
        sink.close()


@pytest.fixture
def small_disk() -> Iterator[int]:
    """Limit the size of files. As on a full disk, the last write is cut off."""
    import signal

    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, old[1]))
    yield 3000
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_loses_events_and_reports_it(tmp_path: Path, small_disk: int) -> None:
    """When the disk has room again, a line has the number of missing events. The reader skips the torn line."""
    path = tmp_path / "trace"
    sink = _file(path)
    lost = [number for number in range(40) if sink.write([_event(number)])]
    assert lost
    assert path.stat().st_size == small_disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    assert not sink.write([_event(100)])
    sink.close()
    trace = Trace(path)
    events = list(trace)
    assert [one.count for one in events if isinstance(one, e.Dropped)] == [len(lost)]
    assert _numbers(path) == [*range(lost[0]), 100]
    assert trace.unread.total() == 1
    assert sum(isinstance(one, e.Started) for one in events) == 2, "each time that the file was opened"


def test_torn_line_loses_one_event(tmp_path: Path) -> None:
    """A torn line of any process loses only this line, because the next writer begins a new line."""
    path = tmp_path / "trace"
    path.write_bytes(b'{"event":"step_r')
    sink = _file(path)
    assert not sink.write([_event(1)])
    with path.open("ab") as other:
        other.write(b'{"event":"lo')
    assert not sink.write([_event(2)])
    sink.close()
    trace = Trace(path)
    assert [type(one) for one in trace] == [e.Started, e.LeasesTaken, e.LeasesTaken]
    assert trace.unread.total() == 2


def test_file_begins_with_its_writer_after_a_full_disk(
    tmp_path: Path, small_disk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full when the file was opened. The file still begins with `started`."""
    # EFBIG in place of ENOSPC, which is harder to cause in a test
    monkeypatch.setattr(recorder, "_PASSING", {errno.EFBIG})
    path = tmp_path / "trace"
    path.write_bytes(b"x" * (small_disk - 20) + b"\n")
    sink = _file(path)
    assert sink.write([_event(1)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    assert not sink.write([_event(2)])
    sink.close()
    assert [type(one) for one in Trace(path)] == [e.Started, e.Dropped, e.LeasesTaken]


def test_event_that_cannot_be_encoded_is_lost_alone(tmp_path: Path) -> None:
    """A request id that cannot be encoded loses only its own event. The file has the number of missing events."""
    path = tmp_path / "trace"
    sink = _file(path)
    assert "LeasesTaken cannot be recorded" in sink.write([_event(1), _event(2, "\ud800"), _event(3)])
    assert sink.lost == 1
    assert not sink.write([_event(4)])
    assert sink.write([_event(5, "\ud800")])
    sink.close()
    assert _numbers(path) == [1, 3, 4]
    assert [one.count for one in Trace(path) if isinstance(one, e.Dropped)] == [1, 1]


def test_pipe_without_a_reader_loses_events(tmp_path: Path) -> None:
    """Opening, filling and closing a pipe without a reader neither blocks nor raises."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    sink = _file(path)
    assert "pipe" in sink.write([_event(0)])  # the pipe has no reader yet
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert not sink.write([_event(1)])
    assert b'"chunks":1' in os.read(reader, 1 << 16)
    assert any(sink.write([_event(i)] * 64) for i in range(1000)), "never full"
    os.close(reader)
    assert sink.write([_event(2)])  # the pipe is broken
    assert sink.write([_event(3)])
    assert stat.S_ISFIFO(path.stat().st_mode)
    sink.close()


def test_missing_folder_loses_events_until_it_exists_again(tmp_path: Path) -> None:
    """When the folder exists again, the next events open the file anew."""
    folder = tmp_path / "gone"
    sink = _file(folder / "trace")
    assert "No such file" in sink.write([_event(0)])
    folder.mkdir()
    assert not sink.write([_event(1)])
    sink.close()
    assert _numbers(folder / "trace") == [1]


# ---- the log --------------------------------------------------------------------------------------------------------


def test_log_line_has_engine_request_and_epoch() -> None:
    """A line of the log has engine, request and epoch, and leaves out empty fields."""
    admitted = e.RequestAdmitted(1, -1, "r1", 2, 3, 4, "e1", prompt_tokens=10, hit_tokens={"memory": 4}, why="evicted")
    fault = e.Fault(1, 0, "r1", 0, 3, 4, "e1", name="job_failed", seen=1, fields={"job": "7"})
    with capture_logs() as lines:
        LogSink(logging.INFO).write([_event(1), admitted, fault])
    assert lines == [
        {"event": "request_admitted", "log_level": "info", "engine": "e1", "request": "r1", "epoch": 2, "step": 3,
         "prompt_tokens": 10, "hit_tokens": {"memory": 4}, "why": "evicted"},
        {"event": "job_failed", "log_level": "warning", "engine": "e1", "request": "r1", "rank": 0, "step": 3,
         "seen": 1, "job": "7"},
    ]  # fmt: skip


def test_sink_drops_events_below_its_level() -> None:
    """A sink with the level `warning` drops lower events, even if the log's own level accepts them."""
    with capture_logs() as lines:
        LogSink(logging.WARNING).write(
            [e.RequestAdmitted(1, -1, "r1", 2, 3, 4, "e1"), e.Stuck(1, 0, "r1", 0, 3, 4, "e1")]
        )
    assert [line["event"] for line in lines] == ["stuck"]


def test_every_thousandth_event_of_a_frequent_kind_is_logged() -> None:
    """For a frequent kind, the first event and every thousandth event are logged."""
    with capture_logs() as lines:
        LogSink(logging.INFO).write([e.Dropped(1, 0, "", 0, 0, count=i) for i in range(1, 2002)])
    assert [line["count"] for line in lines] == [1, 1001, 2001]


def test_a_field_may_have_any_name_and_any_text() -> None:
    """A field whose name the log itself uses gets an underscore. Control characters are escaped."""
    fields = dict.fromkeys(("event", "level", "exc_info", "method_name", "self"), "x") | {"why": "a\nb\x1b[31m"}
    with capture_logs() as lines:
        LogSink(logging.INFO).write([e.Fault(1, 0, "r\x1b", 0, 0, name="illegal_transition", seen=1, fields=fields)])
    (line,) = lines
    assert line["event"] == "illegal_transition"
    assert {name for name, value in line.items() if value == "x"} == {f"{name}_" for name in fields} - {"why_"}
    assert (line["why"], line["request"]) == ("a\\nb\\x1b[31m", "r\\x1b")


def test_a_closed_stderr_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stderr is closed. Neither the writer nor a thread that counts a fault raises."""
    closed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", closed)
    with capture_logs():
        log.log.addHandler(logging.StreamHandler())
        closed.close()
        assert not LogSink(logging.DEBUG).write([_event(1)])
        log.Counters().fault("job_failed")


def test_faults_are_reported_through_the_queue() -> None:
    """The thread that counts a fault only queues an event.

    An event is queued for the first fault and for each thousandth fault after it.
    """
    reported = Recorder(2, lifecycle=True)
    counters = log.Counters()
    counters.on_fault = reported.fault
    for _ in range(1001):
        counters.fault("job_failed", request="r", why="x" * 1000)
    first, again = reported.take()
    assert isinstance(first, e.Fault)
    assert isinstance(again, e.Fault)
    assert (first.name, first.request, first.rank, first.seen, again.seen) == ("job_failed", "r", 2, 1, 1001)
    assert len(first.fields["why"]) == 400
    assert counters.faults == {"job_failed": 1001}


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (False, False, False)),
        ({"log_requests": True}, (True, False, False)),
        ({"log_requests": True, "log_level": "warning"}, (False, False, False)),
        ({"log_level": "warning"}, (False, False, False)),
        ({"log_level": "debug"}, (True, True, True)),
        ({"trace_file": "t", "log_level": "error"}, (True, True, True)),
        ({"trace_file": "t", "trace_level": "info"}, (True, True, False)),
    ],
)
def test_settings_choose_the_recorded_events(
    given: dict[str, object], wanted: tuple[bool, bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings decide whether lifecycle events, transitions of requests, or all events are recorded."""
    monkeypatch.chdir(tmp_path)
    reported, writer = tracing(load_settings(given), "e", "worker", 0, 4)
    writer.close()
    assert (reported.lifecycle, reported.transitions, reported.detail) == wanted


@pytest.mark.parametrize(
    ("given", "logged"),
    [
        ({}, []),
        ({"trace_file": "t"}, []),
        ({"log_requests": True}, ["request_admitted", "request_done"]),
        ({"log_level": "debug"}, ["request_admitted", "request_done"]),
    ],
)
def test_lines_per_request_are_logged_on_request(
    given: dict[str, object], logged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two lines per request are logged only with `log_requests`.

    Other lines of the same level are always logged.
    """
    monkeypatch.chdir(tmp_path)
    with capture_logs() as lines:
        reported, writer = tracing(load_settings(given), "e", "scheduler", -1, 4)
        reported.put(e.RequestAdmitted(*reported.of("r", 1)))
        reported.put(e.RequestDone(*reported.of("r", 1)))
        reported.put(e.PoolReady(*reported.of("", 0)))
        writer.close()
    assert [line["event"] for line in lines if line["event"] != "ended"] == [*logged, "pool_ready"]


def test_a_trace_file_without_a_folder_is_refused(tmp_path: Path) -> None:
    """The file's folder does not exist. The file is refused before the engine starts."""
    with pytest.raises(ConfigError, match=r"trace_file='.*missing/t': its folder does not exist; create the folder"):
        tracing(load_settings({"trace_file": str(tmp_path / "missing" / "t")}), "e", "worker", 0, 4)
