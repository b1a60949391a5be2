"""Measures the costs of a recorded event, of tracing in an engine's throughput, and of reading a trace of 1 GiB."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.report import Figure
from benchmarks.warm import bind_cores
from benchmarks.warm import prompt as make_prompt
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.statemachine.core import Cursor, Edge, State
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.recorder import FileSink, Recorder
from tests.rigs.synthetic_trace import play

RECORDED = 20_000
GIGABYTE = 1 << 30
PAIRS = 40
_SHOW = """
import sys
from kvpipe.cli.main import main
main(["trace", "show", sys.argv[1]])
print(open("/proc/self/status").read())
"""
REQUESTS, PROMPT, ANSWER = 8, 32, 16


def run() -> list[Figure]:
    """Return all figures. Events are measured first, while the process has few objects, and the engine last."""
    return [*_per_event(), *_reading(), *_throughput()]


# ---- per event ------------------------------------------------------------------------------------------------------


def _per_event() -> list[Figure]:
    recorder = Recorder(0, lifecycle=True, transitions=True, detail=True, queue_events_max=RECORDED * 2)
    machine = transitions.MACHINES["request"].compile()

    def watch(cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        recorder.took("request-1", 1, 2, cursor, 7, was, edge, why)

    quiet, watched = Cursor(machine, "r"), Cursor(machine, "r", watch)
    for cursor in (quiet, watched):
        cursor.fire("admit_empty")

    def moves(cursor: Cursor) -> Callable[[], None]:
        def once() -> None:
            for _ in range(RECORDED // 2):
                cursor.fire("preempt")
                cursor.fire("admit_empty")

        return once

    def others() -> None:
        for _ in range(RECORDED):
            recorder.put(e.LeasesTaken(*recorder.of("request-1", 1), chunks=3))

    silent, recorded = _us(moves(quiet), recorder), _us(moves(watched), recorder)
    return [
        Figure("a transition, recorded", recorded - silent, 1.0, "us", f"{silent:.2f} us without"),
        Figure("an event of another kind, recorded", _us(others, recorder), 1.0, "us", "on the thread that records it"),
        Figure("an event, encoded and written", _written_us(), 10.0, "us", "on the writer's thread"),
    ]


def _us(once: Callable[[], None], recorder: Recorder) -> float:
    """Return the median microseconds per event. The queue is emptied before `once` records `RECORDED` events."""
    once()
    taken = []
    for _ in range(9):
        recorder.take()
        begin = time.perf_counter()
        once()
        taken.append(time.perf_counter() - begin)
    recorder.take()
    return median(taken) / RECORDED * 1e6


def _written_us() -> float:
    with tempfile.TemporaryDirectory() as folder:
        sink = FileSink(Path(folder) / "trace", GIGABYTE, e.Started(0, 0, "", 0, 0))
        events: list[e.Event] = [e.LeasesTaken(i, 0, "request-1", 1, 2, chunks=3) for i in range(64)]
        begin = time.perf_counter()
        for _ in range(500):
            sink.write(events)
        taken = time.perf_counter() - begin
        sink.close()
    return taken / 500 / len(events) * 1e6


# ---- reading --------------------------------------------------------------------------------------------------------


def _reading() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        block = b"".join(msgspec.json.encode(event) + b"\n" for event in play(700, ranks=2, layers=32))
        with path.open("wb") as file:
            while file.tell() < GIGABYTE:
                file.write(block)
        begin = time.perf_counter()
        command = [sys.executable, "-c", _SHOW, str(path)]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603  (our own)
        seconds = time.perf_counter() - begin
    peak_kib = int(out.rpartition("VmHWM:")[2].split()[0])
    lines = int(out.partition(": ")[2].split()[0])
    return [
        Figure("a trace of 1 GB, shown", seconds, 10.0, "s", f"{lines / 1e6:.1f} M lines, by the command itself"),
        Figure("the same, its memory", peak_kib / 1024, 200.0, "MiB", "the whole process, at its peak"),
    ]


# ---- an engine ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _silent(engine: Engine) -> Iterator[None]:
    """Switch tracing off in the scheduler and the worker of the idle engine."""
    recorders = [engine.connector.recorder, engine.worker_connector.recorder]
    kept = [(one.lifecycle, one.transitions, one.detail) for one in recorders]
    for one in recorders:
        one.lifecycle = one.transitions = one.detail = False
    try:
        yield
    finally:
        for one, (lifecycle, transitions, detail) in zip(recorders, kept, strict=True):
            one.lifecycle, one.transitions, one.detail = lifecycle, transitions, detail


def _throughput() -> list[Figure]:
    """Return medians of ratios of consecutive runs in one engine: two equal engines differ by more than the limit."""
    bind_cores()
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    out = []
    with tempfile.TemporaryDirectory() as folder, _stdout_to(Path(folder) / "log"):
        for name, kvpipe, least in (
            ("with two lines per request", {"log_requests": True}, 0.99),
            ("every transition to a file", {"trace_file": f"{folder}/trace"}, 0.95),
        ):
            options = {"pool_bytes_max": "2GiB"} | kvpipe
            engine = Engine(str(make_model("serving")), kvpipe=options, num_gpu_blocks_override=600)
            taken: dict[bool, list[float]] = {False: [], True: []}
            seed = 0
            for pair in range(-1, PAIRS):  # the first pair warms up
                for on in (False, True) if pair % 2 else (True, False):
                    prompts = [make_prompt(PROMPT, seed + i) for i in range(REQUESTS)]
                    seed += REQUESTS
                    with contextlib.nullcontext() if on else _silent(engine):
                        begin = time.perf_counter()
                        engine.generate(prompts, ANSWER)
                        seconds = time.perf_counter() - begin
                    if pair >= 0:
                        taken[on].append(seconds)
            engine.close()
            ratio = median(a / b for a, b in zip(taken[False], taken[True], strict=True))
            tokens = REQUESTS * (PROMPT + ANSWER)
            beside = f"{tokens / median(taken[True]):.0f} of {tokens / median(taken[False]):.0f} tokens/s untraced"
            out.append(Figure(f"throughput, traced {name}", ratio, least, "of untraced", beside, at_least=True))
    return out


@contextlib.contextmanager
def _stdout_to(path: Path) -> Iterator[None]:
    """Redirect standard output, and so the log, to a file, as an operator does."""
    kept = os.dup(1)
    with path.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
