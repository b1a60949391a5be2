"""Measures the pipeline's costs on the host: hooks, the delay from an event to a transition, and idle threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median, quantiles

import numpy as np
import torch

from benchmarks.gpu.rig import LLAMA_8B, LLAMA_70B_TP4, PAGES, Gpu, Rig
from benchmarks.report import Figure
from kvpipe.protocol.messages import Job, Kind, StepPlan
from kvpipe.transfer.cuda import POLL_S_MAX, POLL_US_MIN
from kvpipe.transfer.waves import OrderingPoint

SYNCHRONISING = (
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize",
    "cuCtxSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2", "cudaMemcpyToSymbol",
    "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaHostRegister", "cudaMallocHost",
)  # fmt: skip
REQUESTS = 64
IN_FLIGHT = 4  # steps that are queued without a wait
CPU_TICKS = 100


def _jobs(rig: Rig, step: int) -> tuple[Job, ...]:
    """Return a job per request, with blocks in random order. Jobs that load and save a chunk alternate."""
    blocks = iter(rig.blocks_for(rig.blocks))
    jobs = []
    for number in range(REQUESTS):
        kind = Kind.LOAD_SYNC if number % 2 else Kind.SAVE
        rows = np.array([(0, number, page, next(blocks)) for page in range(PAGES)], "<i4")
        jobs.append(Job(step * REQUESTS + number, int(kind), f"r{number}", 1, rows.tobytes()))
    return tuple(jobs)


MODES = {"": POLL_US_MIN, ", blocking events": 0}
"""The least polling interval of the completion thread in microseconds, by the suffix of a figure's name.

With 0, the thread sleeps until an event wakes it.
"""


def hooks(gpu: Gpu, steps: int) -> Iterator[Figure]:
    """Measure the host time of each hook with 80 layers and 64 requests, and count synchronising calls in hooks."""
    for mode, poll_us_min in MODES.items():
        yield from _hooks(gpu, steps, mode, poll_us_min)


def _hooks(gpu: Gpu, steps: int, mode: str, poll_us_min: int) -> Iterator[Figure]:
    from kvpipe.config.settings import load_settings
    from kvpipe.worker.context import RankContext
    from kvpipe.worker.pipeline import Pipeline

    rig = Rig(gpu, gpu.sized(LLAMA_70B_TP4), REQUESTS, None, poll_us_min=poll_us_min)
    rig.wait_pinned()
    pipe = Pipeline(RankContext(load_settings()), rig.engine, rig.geometry, blocks=rig.blocks)
    took: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., object], *args: object) -> None:
        began = time.perf_counter_ns()
        call(*args)
        took.setdefault(name, []).append((time.perf_counter_ns() - began) / 1e3)

    work = torch.ones(1 << 16, device=gpu.where)

    def step(number: int) -> None:
        plan = StepPlan(number, _jobs(rig, number))
        timed("begin (bind)", pipe.begin, plan)
        timed("start_load_kv", pipe.start_loads)
        for layer in range(rig.shape.layers):
            timed("wait_for_layer_load", pipe.wait_layer, layer)
            work.mul_(1.0)
            timed("save_kv_layer", pipe.save_layer, layer)
        timed("wait_for_save", pipe.end_step)

    for number in range(steps + 2):
        step(number)
        gpu.sync()
        time.sleep(0.01)
        pipe.collect()
        if number == 1:
            took.clear()
    for name, times in took.items():
        p99 = quantiles(times, n=100)[98] if len(times) > 1 else times[0]
        beside = f"median {median(times):.1f}, p99 {p99:.1f}"
        yield Figure(f"host time of {name}{mode}", fmean(times), 15, "us", beside)
    # a thread that waits for blocking events makes synchronising calls, so these are not counted
    if not gpu.simulated and not mode:

        def several() -> None:
            gpu.sleep(50)
            for number in range(IN_FLIGHT):
                step(steps + 2 + number)

        beside = f"profiled, {IN_FLIGHT} steps under way"
        yield Figure("synchronising calls in hooks", _synchronising(several), 0, "calls", beside)
    pipe.shutdown()
    rig.close()


def _synchronising(run: Callable[[], None]) -> float:
    """Return the number of calls in `run` that may make the host wait for the device, without the profiler's own."""
    return float(sum((_profiled(run) - _profiled(lambda: None)).values()))


def _profiled(run: Callable[[], object]) -> Counter[str]:
    """Return the synchronising calls that the profiler sees, by name."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    names = (str(event.name) for event in profiler.events() or [])  # type: ignore[no-untyped-call]
    return Counter(name for name in names if name in SYNCHRONISING)


def latency(gpu: Gpu, samples: int) -> Iterator[Figure]:
    """Measure the time from the firing of an event until the loop thread has moved the cursor."""
    for mode, poll_us_min in MODES.items():
        yield from _latency(gpu, samples, mode, poll_us_min)


def _latency(gpu: Gpu, samples: int, mode: str, poll_us_min: int) -> Iterator[Figure]:
    from kvpipe.config.settings import load_settings
    from kvpipe.worker.context import RankContext
    from kvpipe.worker.pipeline import Pipeline

    shape = gpu.sized(LLAMA_8B)._replace(layers=1)
    rig = Rig(gpu, shape, 8, None, poll_us_min=poll_us_min)
    rig.wait_pinned()
    pipe = Pipeline(RankContext(load_settings()), rig.engine, rig.geometry, blocks=rig.blocks)
    moved: list[int] = []
    landed = pipe.copies._landed

    def notified(*args: object) -> None:
        landed(*args)  # type: ignore[arg-type]
        moved.append(time.perf_counter_ns())

    pipe.copies._landed = notified  # type: ignore[method-assign, assignment]
    took = []
    for number in range(samples):
        rows = np.array([(0, number % 8, page, page) for page in range(PAGES)], "<i4").tobytes()
        gpu.sleep(0.3 + number % 5)
        pipe.begin(StepPlan(number, (Job(number, int(Kind.SAVE), "r", 1, rows),)))
        pipe.save_layer(0)
        batch = pipe._save
        pipe.end_step()
        mark = batch.last.mark  # the fence at the step's end has queued the copy
        if isinstance(mark, OrderingPoint) and mark.landed is not None:
            while not mark.landed.query():
                time.sleep(0)  # let other threads get the interpreter
        fired = time.perf_counter_ns()
        while len(moved) <= number:
            time.sleep(0.000_02)
        took.append((moved[number] - fired) / 1e3)
        pipe.collect()
    yield Figure(f"from event to transition{mode}", median(took), 200, "us", f"p90 {quantiles(took, n=10)[8]:.0f}")
    yield Figure(f"threads when idle{mode}", _idle_percent(2.0 if not gpu.simulated else 0.5), 3, "% of a core")
    pipe.shutdown()
    rig.close()


def wakeups(gpu: Gpu, samples: int) -> Iterator[Figure]:
    """Compare ways to wait for an event by their share of a core, and by their delay compared to a busy loop."""

    def poll(event: torch.cuda.Event) -> None:
        pause_s = POLL_US_MIN / 1e6
        while not event.query():  # type: ignore[no-untyped-call]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)

    def spin(event: torch.cuda.Event) -> None:
        while not event.query():  # type: ignore[no-untyped-call]
            pass

    late: dict[str, list[float]] = {}
    busy: dict[str, float] = {}
    ways: dict[str, Callable[[torch.cuda.Event], object]] = {
        "asking without a pause": spin, "polling with back-off": poll, "a blocking event": lambda e: e.synchronize()
    }  # fmt: skip
    for number in range(samples):
        for way, wait in ways.items():
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            gpu.sync()
            began, cpu = time.perf_counter(), time.thread_time()
            gpu.sleep(1 + number % 7)
            event.record()
            wait(event)
            late.setdefault(way, []).append((time.perf_counter() - began) * 1e6)
            busy[way] = busy.get(way, 0) + time.thread_time() - cpu
    first = late["asking without a pause"]
    for way, took in late.items():
        share = busy[way] / (sum(took) / 1e6) * 100
        delay = median(a - b for a, b in zip(took, first, strict=True))
        yield Figure(f"waiting for an event by {way}", delay, 200, "us later", f"{share:.0f} % of a core while waiting")


def _idle_percent(seconds: float) -> float:
    """Return the percentage of a core that kvpipe's idle threads use."""

    def ticks() -> int:
        total = 0
        for thread in threading.enumerate():
            if thread.name.startswith("kvpipe"):
                stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="ascii")
                total += sum(map(int, stat.rsplit(")", 1)[1].split()[11:13]))
        return total

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / CPU_TICKS / seconds * 100
