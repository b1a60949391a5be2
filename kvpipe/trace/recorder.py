"""The path of events to the trace file and the log is a bounded queue and one thread that writes.

`Recorder.put` appends to a deque and wakes no thread (the writer polls every 50 ms). Therefore a call takes less than 1
us, even with a slow disk. Events that do not fit into the queue are dropped and counted. Where events are missing, the
trace has an event with their number.
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
from typing import Final, Protocol, TypeVar

import msgspec

from kvpipe.inputs import files
from kvpipe.machine.cores import bind_this_thread
from kvpipe.statemachine.core import Cursor, Edge, State
from kvpipe.trace import log
from kvpipe.trace.events import SCHEDULER, Dropped, Ended, Event, Fault, RequestAdmitted, RequestDone, Started, tag_of
from kvpipe.trace.transitions import TakenEdge

QUEUE_EVENTS_MAX = 1 << 17
POLL_S = 0.05
COMPLAINTS_S = 60.0
THROTTLE = 1000
CLOSE_S_MAX = 2.0
_PASSING = {errno.ENOSPC, errno.EAGAIN, errno.EDQUOT}
_OPEN = os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCK_S_MAX = 1.0
_WHY_CHARS_MAX = 400
_SLICE_EVENTS = 64  # events that are written per slice; between slices, other threads can take the interpreter's lock
_HASH_MAX = 1 << 32
LOSSES: Final = ("queue", "sink")
"""The places at which events are lost: a full queue, or a sink that could not write the events."""
_LINES_PER_REQUEST = {RequestAdmitted, RequestDone}
_T = TypeVar("_T")


class Recorder:
    """The recorder of the events of one side of one process.

    The read-only attributes `lifecycle`, `transitions` and `detail` say which events are recorded.
    """

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
        """`lifecycle` records two events per request, `transitions` also the requests' moves, and `detail` all events.

        `rank` is -1 for the scheduler side. `sample` is the share of requests, chosen by their ids, for which
        `transitions` and `detail` are recorded. If `queue_events_max` events wait, further events are dropped.
        """
        self.rank, self.lifecycle, self.transitions, self.detail = rank, lifecycle, transitions, detail
        self._share = int(sample * _HASH_MAX)
        self._max = queue_events_max
        self._queue: deque[Event | TakenEdge] = deque()
        self.dropped = self.lost = 0  # the numbers of events lost at the full queue, and at a sink
        self._gap = 0
        self.request, self.epoch, self.step = "", 0, 0

    def put(self, event: Event) -> None:
        """Record `event`, or count it as dropped if the queue is full. Any thread may call this method."""
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
        """Record, as `put` does, that a cursor took `edge` in state `was`.

        `number` is the cursor's number in the trace.
        """
        queue = self._queue
        if len(queue) < self._max:
            if self._gap:
                self._report_gap()
            queue.append(TakenEdge(monotonic_ns(), request, epoch, step, cursor.machine, number, was, edge, why))
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
                out.append(one.event(self.rank) if isinstance(one, TakenEdge) else one)
            except Exception:  # noqa: BLE001  (only this event is lost)
                self.lost += 1
        return out

    @property
    def waiting(self) -> int:
        """The number of events that wait in the queue."""
        return len(self._queue)

    @property
    def losses(self) -> dict[str, int]:
        """The numbers of lost events, by the places in `LOSSES`."""
        return dict(zip(LOSSES, (self.dropped, self.lost), strict=True))

    def end(self, dropped: int) -> None:
        """Record the end of this side's events, even in a full queue. `dropped` is the number of lost events."""
        if self._gap:
            self._report_gap()
        self._queue.append(Ended(monotonic_ns(), self.rank, "", 0, self.step, dropped=dropped))

    def _report_gap(self) -> None:
        """Record how many events are missing at this place."""
        count, self._gap = self._gap, 0
        self._queue.append(Dropped(*self.of("", 0), count=count, why="the queue was full"))

    def sampled(self, request: str) -> bool:
        """Return whether `request` is in the sample. The answer is the same on every rank."""
        return self._share >= _HASH_MAX or zlib.crc32(request.encode("utf-8", "surrogatepass")) < self._share

    def about(self, request: str, epoch: int) -> None:
        """Attribute later events of chunks to this request. With "" and 0, they belong to no request."""
        self.request, self.epoch = request, epoch

    def of(self, request: str, epoch: int) -> tuple[int, int, str, int, int]:
        """Return the first fields of an event of a request: now (ns), rank, request, epoch, step."""
        return monotonic_ns(), self.rank, request, epoch, self.step

    def fault(self, name: str, seen: int, fields: dict[str, object]) -> None:
        """Record a fault. `seen` is the number of times that the fault has occurred."""
        message = {key: str(value)[:400] for key, value in fields.items() if key != "request"}
        self.put(Fault(*self.of(str(fields.get("request", "")), 0), name=name, seen=seen, fields=message))


OFF = Recorder(queue_events_max=0)
"""A recorder that records nothing."""


class Sink(Protocol):
    """A destination of events. Only the writer's thread calls a sink."""

    lost: int
    """The number of events that the sink could not write so far."""

    def write(self, events: Sequence[Event]) -> str:
        """Write `events`. Some events may fail while all other events succeed.

        Returns why some events are lost, or "" if none is lost.
        """

    def close(self) -> None:
        """Write the remaining events, and close files or connections."""


def each(events: Sequence[Event], do: Callable[[Event], _T]) -> tuple[list[_T], str]:
    """Return the results of `do` for the events for which it did not raise, and the reason of an exception, or ""."""
    made, why = [], ""
    for event in events:
        try:
            made.append(do(event))
        except Exception as error:  # noqa: BLE001  (only the bad event is lost)
            why = f"{type(event).__name__} cannot be recorded: {error!r}"[:_WHY_CHARS_MAX]
    return made, why


class Writer:
    """The thread that passes a recorder's events to sinks."""

    def __init__(
        self, recorder: Recorder, sinks: Iterable[Sink], engine: str, cpus: frozenset[int] = frozenset()
    ) -> None:
        """Start the thread, bound to `cpus` if any are given. Every event gets the engine's id `engine`."""
        self._cpus = cpus
        self._recorder, self._sinks, self._engine = recorder, tuple(sinks), engine
        self._wall_ns = time.time_ns() - monotonic_ns()
        self._complained_s = -COMPLAINTS_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="kvpipe-trace", daemon=True)
        self._thread.start()

    def set_layers(self, layers: int) -> None:
        """Set the number of layers of a rank's copies.

        This number is not known when `tracing` makes the writer, because the rank has no caches yet.
        """
        for sink in self._sinks:
            if isinstance(sink, FileSink):
                sink.layers = layers

    def close(self) -> None:
        """Write the queued events and end the thread. After `CLOSE_S_MAX` a hanging sink is abandoned. Idempotent."""
        if not self._stop.is_set():
            self._recorder.end(self.dropped)
            self._stop.set()
            self._thread.join(CLOSE_S_MAX)

    @property
    def dropped(self) -> int:
        """The number of events that were lost, at the full queue or at a sink."""
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
        """Log that events are lost, at most once a minute, because the trace itself may not be writable."""
        now = time.monotonic()
        if now - self._complained_s >= COMPLAINTS_S:
            self._complained_s = now
            log.warn("trace_lost", why=why, events=self._recorder.lost)


class FileSink:
    """A sink that appends lines of JSON to a file, which processes may share. `FILE.1` has the older half."""

    def __init__(self, path: Path, bytes_max: int, started: Started) -> None:
        """`bytes_max` is the limit of both files together. `started` is this process's first event in every file."""
        self._path, self._half, self._started = path, bytes_max // 2, started
        self.layers = started.layers  # if the number changes, `started` is written again before the next event
        self._encoder = msgspec.json.Encoder()
        self._fd = -1
        self._regular = True
        self.lost = 0
        self._unreported = 0  # the number of lost events that the file does not report yet
        self._why = ""

    def write(self, events: Sequence[Event]) -> str:
        """Write `events`, as `Sink.write`. Whole lines are written at once, so that lines of processes do not mix."""
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
        except Exception as error:  # noqa: BLE001  (the next line has the number of missing events)
            self._loses(whole, f"{self._path}: {getattr(error, 'strerror', None) or error}")
            if not isinstance(error, OSError) or error.errno not in _PASSING:
                self.close()  # the next call of `write` opens the file again
            return self._why
        self._unreported = 0
        return odd

    def _loses(self, count: int, why: str) -> None:
        self.lost, self._unreported, self._why = self.lost + count, self._unreported + count, why

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, first: Event) -> None:
        """Open the file. If the file is full, or if another process has begun a new file, begin a new file."""
        if self._started.layers != self.layers:
            self._started.layers = self.layers
            self.close()
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
        # If a pipe is full or has no reader, events are lost, and the writer's thread is not blocked.
        piped = self._path.exists() and not self._path.is_file()
        self._fd = os.open(self._path, (os.O_WRONLY if piped else os.O_RDWR) | _OPEN, 0o600)
        self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        started = self._started
        started.t_ns, started.wall_ns, started.engine = first.t_ns, first.wall_ns, first.engine
        try:
            self._put([self._encoder.encode(started)])
        except OSError:
            # closed, so that a later event tries `started` again: no event may precede `started` in the file
            self.close()
            raise
        started.part += 1

    def _rotate(self) -> None:
        """Rename the full file to `FILE.1`, unless another process has done so."""
        until = time.monotonic() + _LOCK_S_MAX
        while not files.try_lock(self._fd):
            if time.monotonic() > until:  # the lock's owner may hang, so do not wait again for each event
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
        """Return whether a full disk or a crash has cut off the file's last line."""
        size = os.fstat(self._fd).st_size
        return size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"


class LogSink:
    """A sink that writes events to kvpipe's log."""

    def __init__(self, level: int, *, requests: bool = True) -> None:
        """Log events from `level` (of Python's `logging`) on. `requests` says whether to log two lines per request."""
        self._level, self._requests = level, requests
        self.lost = 0
        self._seen: Counter[str] = Counter()

    def write(self, events: Sequence[Event]) -> str:
        """Log `events`. The first event of a frequent kind is logged, and then every 1000th event of this kind."""
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
        """Do nothing, because this sink has no file or connection."""
