"""The path of events to the trace file and the log: a bounded queue, and one thread that writes.

`Recorder.put` appends to a deque and wakes no thread (the writer polls every 50 ms), so it takes the caller less than a
microsecond whatever the disk does. Events that do not fit are counted; the trace has their number where they are
missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import Protocol, TypeVar

import msgspec

from kvpipe import files
from kvpipe.cores import bind_this_thread
from kvpipe.statemachine.core import Cursor, Edge, State
from kvpipe.trace import log
from kvpipe.trace.events import SCHEDULER, Dropped, Ended, Event, Fault, RequestAdmitted, RequestDone, Started, tag_of
from kvpipe.trace.transitions import Taken

QUEUE_EVENTS_MAX = 1 << 17
POLL_S = 0.05
COMPLAINTS_S = 60.0
THROTTLE = 1000
CLOSE_S_MAX = 2.0
_PASSING = {errno.ENOSPC, errno.EAGAIN, errno.EDQUOT}
_OPEN = os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCK_S_MAX = 1.0
_WHY_CHARS_MAX = 400
_SLICE_EVENTS = 64  # encoded at a time: the thread that computes gets the interpreter in between
_HASH_MAX = 1 << 32
_LINES_PER_REQUEST = {RequestAdmitted, RequestDone}
_T = TypeVar("_T")


class Recorder:
    """Records the events of one side of one process. `lifecycle`, `transitions`, `detail`: which kinds; read only."""

    def __init__(
        self,
        rank: int = SCHEDULER,
        *,
        lifecycle: bool = False,
        transitions: bool = False,
        detail: bool = False,
        sample: float = 1.0,
        queue_events_max: int = QUEUE_EVENTS_MAX,
    ) -> None:
        """`lifecycle`: two events per request. `transitions`: also the moves of requests. `detail`: everything.

        `rank`: -1 for the scheduler side. `sample`: the share of requests, chosen by their ids, of which `transitions`
        and `detail` are recorded. `queue_events_max`: beyond so many waiting events, events are dropped.
        """
        self.rank, self.lifecycle, self.transitions, self.detail = rank, lifecycle, transitions, detail
        self._share = int(sample * _HASH_MAX)
        self._max = queue_events_max
        self._queue: deque[Event | Taken] = deque()
        self.dropped = self.lost = 0  # in the queue, and at a sink
        self._gap = 0
        self.request, self.epoch, self.step = "", 0, 0

    def put(self, event: Event) -> None:
        """Record `event`, or count it as dropped if the queue is full. On any thread."""
        if len(self._queue) < self._max:
            if self._gap:
                self._report_gap()
            self._queue.append(event)
        else:
            self._gap += 1
            self.dropped += 1

    def took(
        self, request: str, epoch: int, step: int, cursor: Cursor, number: int, was: State, edge: Edge, why: str
    ) -> None:
        """Record that `cursor`, whose number in the trace is `number`, took `edge` in state `was`. As `put`."""
        queue = self._queue
        if len(queue) < self._max:
            if self._gap:
                self._report_gap()
            queue.append(Taken(monotonic_ns(), request, epoch, step, cursor.machine, number, was, edge, why))
        else:
            self._gap += 1
            self.dropped += 1

    def take(self, count: int = QUEUE_EVENTS_MAX) -> list[Event]:
        """Remove and return the oldest events, up to `count`."""
        queue = self._queue
        taken = [queue.popleft() for _ in range(min(len(queue), count))]
        out: list[Event] = []
        for one in taken:
            try:
                out.append(one.event(self.rank) if isinstance(one, Taken) else one)
            except Exception:  # noqa: BLE001  (it is lost alone)
                self.lost += 1
        return out

    @property
    def waiting(self) -> int:
        """The number of events that wait in the queue."""
        return len(self._queue)

    @property
    def losses(self) -> dict[str, int]:
        """How many events were lost: "queue": it was full; "sink": they could not be written."""
        return {"queue": self.dropped, "sink": self.lost}

    def end(self, dropped: int) -> None:
        """Record the end of this side's events, also in a full queue. `dropped`: events lost so far."""
        if self._gap:
            self._report_gap()
        self._queue.append(Ended(monotonic_ns(), self.rank, "", 0, self.step, dropped=dropped))

    def _report_gap(self) -> None:
        """Record how many events are missing here."""
        count, self._gap = self._gap, 0
        self._queue.append(Dropped(*self.of("", 0), count=count, why="the queue was full"))

    def sampled(self, request: str) -> bool:
        """Whether `request` is in the sample. The answer is the same on every rank."""
        return self._share >= _HASH_MAX or zlib.crc32(request.encode("utf-8", "surrogatepass")) < self._share

    def about(self, request: str, epoch: int) -> None:
        """Attribute later events of chunks to this request; "" and 0: to none."""
        self.request, self.epoch = request, epoch

    def of(self, request: str, epoch: int) -> tuple[int, int, str, int, int]:
        """Return the first fields of an event of a request: now (ns), rank, request, epoch, step."""
        return monotonic_ns(), self.rank, request, epoch, self.step

    def fault(self, name: str, seen: int, fields: dict[str, object]) -> None:
        """Record a fault. `seen`: how often it has happened."""
        message = {key: str(value)[:400] for key, value in fields.items() if key != "request"}
        self.put(Fault(*self.of(str(fields.get("request", "")), 0), name=name, seen=seen, fields=message))


OFF = Recorder(queue_events_max=0)
"""Records nothing."""


class Sink(Protocol):
    """A destination of events. Called on the writer's thread only."""

    lost: int
    """How many events it could not write so far."""

    def write(self, events: Sequence[Event]) -> str:
        """Write `events`, each of which may fail by itself. Returns why some are lost; "" if none is."""

    def close(self) -> None:
        """Write what is left, and close files or connections."""


def each(events: Sequence[Event], do: Callable[[Event], _T]) -> tuple[list[_T], str]:
    """Return (`do(event)` for each event, why it raised for some, or ""). Those are left out."""
    made, why = [], ""
    for event in events:
        try:
            made.append(do(event))
        except Exception as error:  # noqa: BLE001  (a bad one is lost alone)
            why = f"{type(event).__name__} cannot be recorded: {error!r}"[:_WHY_CHARS_MAX]
    return made, why


class Writer:
    """The thread that passes a recorder's events to sinks."""

    def __init__(
        self, recorder: Recorder, sinks: Iterable[Sink], engine: str, cpus: frozenset[int] = frozenset()
    ) -> None:
        """Start the thread, bound to `cpus` if any are given. `engine`: the engine's id, for every event."""
        self._cpus = cpus
        self._recorder, self._sinks, self._engine = recorder, tuple(sinks), engine
        self._wall_ns = time.time_ns() - monotonic_ns()
        self._complained_s = -COMPLAINTS_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="kvpipe-trace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is queued and end the thread, within `CLOSE_S_MAX` if a sink hangs. Idempotent."""
        if not self._stop.is_set():
            self._recorder.end(self.dropped)
            self._stop.set()
            self._thread.join(CLOSE_S_MAX)

    @property
    def dropped(self) -> int:
        """How many events were lost, in the queue or at a sink."""
        return self._recorder.dropped + self._recorder.lost

    def _main(self) -> None:
        if self._cpus:
            bind_this_thread(self._cpus)
        while not self._stop.wait(POLL_S):
            self._flush()
        self._flush()
        for sink in self._sinks:
            with contextlib.suppress(Exception):
                sink.close()

    def _flush(self) -> None:
        recorder = self._recorder
        while recorder.waiting:
            events = recorder.take(_SLICE_EVENTS)
            for event in events:
                event.engine, event.wall_ns = self._engine, event.t_ns + self._wall_ns
                event.request = log.bounded(event.request)
            for sink in self._sinks:
                before = sink.lost
                try:
                    why = sink.write(events)
                except Exception as error:  # noqa: BLE001  (one sink's bug must not silence the others)
                    why, before = f"{type(sink).__name__}: {error!r}", sink.lost - len(events)
                if why:
                    recorder.lost += sink.lost - before
                    self._complain(why)
            time.sleep(0)

    def _complain(self, why: str) -> None:
        """Log that events are lost, once a minute at most: the trace itself may not be writable."""
        now = time.monotonic()
        if now - self._complained_s >= COMPLAINTS_S:
            self._complained_s = now
            log.warn("trace_lost", why=why, events=self._recorder.lost)


class FileSink:
    """Appends lines of JSON to a file that several processes may share. The older half is kept as `FILE.1`."""

    def __init__(self, path: Path, bytes_max: int, started: Started) -> None:
        """`bytes_max`: of both files together. `started`: this process's first event in every file."""
        self._path, self._half, self._started = path, bytes_max // 2, started
        self._encoder = msgspec.json.Encoder()
        self._fd = -1
        self._regular = True
        self.lost = 0
        self._unreported = 0  # of those: not yet reported in the file
        self._why = ""

    def write(self, events: Sequence[Event]) -> str:
        """See `Sink`. It writes whole lines at once, so that lines of several processes do not mix."""
        lines, odd = each(events, self._encoder.encode)
        whole = len(lines)
        if odd:
            self._loses(len(events) - whole, odd)
        try:
            self._open(events[0])
            if self._unreported:
                at = events[0]
                gap = Dropped(at.t_ns, at.rank, "", 0, at.step, at.wall_ns, at.engine, self._unreported, self._why)
                lines.insert(0, self._encoder.encode(gap))
            self._put(lines)
        except Exception as error:  # noqa: BLE001  (whatever it was, the next line has the number of missing events)
            self._loses(whole, f"{self._path}: {getattr(error, 'strerror', None) or error}")
            if not isinstance(error, OSError) or error.errno not in _PASSING:
                self.close()  # opened anew with the next events
            return self._why
        self._unreported = 0
        return odd

    def _loses(self, count: int, why: str) -> None:
        self.lost, self._unreported, self._why = self.lost + count, self._unreported + count, why

    def close(self) -> None:
        """See `Sink`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, first: Event) -> None:
        """Open the file; begin a new one if it is full, or if another process has begun one."""
        if self._fd >= 0:
            if not self._regular:
                return
            here = os.fstat(self._fd)
            try:
                there = os.stat(self._path)  # noqa: PTH116  (beside fstat)
                if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino) and here.st_size < self._half:
                    return
            except FileNotFoundError:
                pass
            self._rotate()
        # a pipe that nobody reads, or that is full, loses events; it does not hold anybody up
        piped = self._path.exists() and not self._path.is_file()
        self._fd = os.open(self._path, (os.O_WRONLY if piped else os.O_RDWR) | _OPEN, 0o600)
        self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        started = self._started
        started.t_ns, started.wall_ns, started.engine = first.t_ns, first.wall_ns, first.engine
        try:
            self._put([self._encoder.encode(started)])
        except OSError:
            self.close()  # nothing may follow in a file that does not name its writer
            raise
        started.part += 1

    def _rotate(self) -> None:
        """Rename the full file to `FILE.1`, unless another process has done so."""
        until = time.monotonic() + _LOCK_S_MAX
        while not files.try_lock(self._fd):
            if time.monotonic() > until:  # its lock is held by one that does not write: do not wait with every event
                raise BlockingIOError(errno.EAGAIN, "another process keeps the file locked")
            time.sleep(POLL_S / 10)
        try:
            there = os.stat(self._path)  # noqa: PTH116
            if there.st_ino == os.fstat(self._fd).st_ino:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
        except FileNotFoundError:
            pass
        finally:
            self.close()

    def _put(self, lines: list[bytes]) -> None:
        data = b"\n".join(lines) + b"\n"
        if self._regular and self._is_torn():
            data = b"\n" + data
        done = 0
        while done < len(data):
            done += os.write(self._fd, data[done:])

    def _is_torn(self) -> bool:
        """Whether the file's last line was cut off by a full disk or a crash."""
        size = os.fstat(self._fd).st_size
        return size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"


class LogSink:
    """Writes events to kvpipe's log."""

    def __init__(self, level: int, *, requests: bool = True) -> None:
        """`level`: the lowest level to log, as in Python's `logging`. `requests`: log the two lines per request."""
        self._level, self._requests = level, requests
        self.lost = 0
        self._seen: Counter[str] = Counter()

    def write(self, events: Sequence[Event]) -> str:
        """See `Sink`. Of frequent kinds the first is logged, then every thousandth."""
        reported, why = each(events, self._deliver)
        self.lost += len(events) - len(reported)
        return why

    def _deliver(self, event: Event) -> None:
        if event.level < self._level or (type(event) in _LINES_PER_REQUEST and not self._requests):
            return
        if event.throttled:
            name = tag_of(event)
            self._seen[name] += 1
            if self._seen[name] % THROTTLE != 1:
                return
        log.log_event(event)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
