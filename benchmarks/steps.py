"""Measures the cost of a decode step on a device that takes no time.

`python -m benchmarks steps` measures vLLM's thread, kvpipe's other threads and the scheduler's thread. Every copy lands
at once, so a figure is a lower bound of the cost on a GPU. vLLM's thread has a core of its own, and kvpipe's threads
share the other cores. Other programs disturb the figures by filling the cores' caches. So a step begins without a
pause, as soon as the copies of the previous step have landed, and a figure is the least of `ROUNDS` medians.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from benchmarks.calls import blocks_of, request_of
from benchmarks.host import make_side
from benchmarks.null_device import NullDevice
from benchmarks.report import Figure
from kvpipe.config.settings import load_settings
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import ONE_OK, Job, Kind, Report, StepPlan
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import Mover
from kvpipe.worker.caches import Hooks, PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.side import WorkerSide

ROUNDS: Final = 5
STEPS: Final = 64
_WORK: Final = bytes(1 << 18)
PAGE_BYTES: Final = 65_536
BLOCK_TOKENS: Final = 16
CHUNK_TOKENS: Final = 256
PREFILL_TOKENS: Final = 2048
BLOCKS: Final = 256
LAYERS: Final = (32, 80)
SAVES_CPU_US_MAX: Final = {0: 5, 4: 60, 16: 100, 64: 250}
WALL_MAX: Final = 1.5
"""The limit of wall time, as a multiple of the limit of CPU time."""
OTHERS_CPU_US_MAX: Final = {16: 100, 64: 500}
MEAN_CPU_US_MAX: Final = 54
"""The limit of a step's mean cost with 32 running requests: 3 % of a step of 1.81 ms."""
MEAN_SAVES: Final = {"each step saves": (2,), "default settings": (16, *(0,) * 7)}
"""The numbers of saves in successive steps, if 32 requests run and blocks have 16 tokens."""
RUNNING_US_MAX: Final = {32: 100, 64: 100, 256: 300}
PREFILL_US_MAX: Final = 500


class Cost(NamedTuple):
    """The cost of a step in microseconds: CPU and wall time of vLLM's thread, and CPU time of all other threads."""

    cpu: float
    wall: float
    others: float


def run() -> list[Figure]:
    """Measure first the steps of a rank, and then the steps of the scheduler."""
    load = os.getloadavg()[0]
    out = []
    for layers in LAYERS:
        rank = _Rank(layers)
        for saves, limit in SAVES_CPU_US_MAX.items():
            cost, name = rank.decode(saves), f"decode step, {layers} layers, {saves} saves"
            beside = f"load {load:.1f}"
            out.append(Figure(f"{name}: CPU of vLLM's thread", cost.cpu, limit, "us", beside))
            out.append(Figure(f"{name}: wall time of vLLM's thread", cost.wall, WALL_MAX * limit, "us", beside))
            if saves in OTHERS_CPU_US_MAX:
                most = OTHERS_CPU_US_MAX[saves]
                out.append(Figure(f"{name}: CPU of kvpipe's other threads", cost.others, most, "us", beside))
        if layers == min(LAYERS):
            for what, turns in MEAN_SAVES.items():
                cost, name = rank.turns(turns), f"mean decode step, {layers} layers, 32 running, {what}"
                beside = f"other threads {cost.others:.0f} us"
                out.append(Figure(f"{name}: CPU of vLLM's thread", cost.cpu, MEAN_CPU_US_MAX, "us", beside))
        if layers == max(LAYERS):
            cost, name = rank.prefill(), f"step with {PREFILL_TOKENS} tokens of prefill, {layers} layers"
            beside = f"wall {cost.wall:.0f} us, other threads {cost.others:.0f} us"
            out.append(Figure(f"{name}: CPU of vLLM's thread", cost.cpu, PREFILL_US_MAX, "us", beside))
        rank.end()
    for given in {"save_decode_steps": 1}, {}:
        out += [_scheduler(running, limit, **given) for running, limit in RUNNING_US_MAX.items()]
    return out


class _Rank:
    """A rank whose layers share one tensor. One tensor is enough, because only addresses are used, and no bytes."""

    def __init__(self, layers: int) -> None:
        mine, *others = sorted(os.sched_getaffinity(0))
        names = [f"layer.{number}" for number in range(layers)]
        slot_bytes = layers * PAGE_BYTES * CHUNK_TOKENS // BLOCK_TOKENS
        self._slots = max(SAVES_CPU_US_MAX)
        group = Group(tuple(Layer(name, PAGE_BYTES) for name in names), BLOCK_TOKENS)
        geometry = Geometry((group,), CHUNK_TOKENS, pool_bytes_max=self._slots * slot_bytes)
        cache = torch.zeros(BLOCKS * PAGE_BYTES, dtype=torch.uint8).view(BLOCKS, 1, BLOCK_TOKENS, -1)
        hooks = Hooks(replayed=lambda context: context is None, fences_late=True)
        caches = PagedCaches(geometry, dict.fromkeys(names, cache), BLOCKS, hooks)
        engine = CudaEngine(NullDevice(), mover=Mover.STAGED, calibrate_s_max=0)
        self._side = WorkerSide(RankContext(load_settings({"prefault": "use"})), caches, engine=engine)
        while engine.pinned_slots < self._slots:
            time.sleep(0.001)
        gc.collect()
        gc.freeze()  # vLLM also freezes all objects when an engine has started
        for thread in Path("/proc/self/task").iterdir():
            number = int(thread.name)
            os.sched_setaffinity(number, {mine} if number == os.getpid() else set(others) or {mine})
        self._names, self._jobs, self._step = names, 0, 0

    def decode(self, saves: int) -> Cost:
        """Return the cost of a step, without hooks, in which each of `saves` requests saves a block."""
        return self._least((saves,), 1, ())

    def turns(self, saves: Sequence[int]) -> Cost:
        """Return the mean cost of successive steps, without hooks. `saves` has each step's number of saved blocks."""
        return self._least(saves, 1, ())

    def prefill(self) -> Cost:
        """Return the cost of a step with one request's prefill, with all hooks."""
        return self._least((1,), PREFILL_TOKENS // BLOCK_TOKENS, self._names)

    def end(self) -> None:
        """Shut the rank down and free its memory."""
        self._side.shutdown()
        gc.unfreeze()

    def _least(self, saves: Sequence[int], pages: int, hooked: Iterable[str]) -> Cost:
        return Cost(*map(min, zip(*(self._round(saves, pages, hooked) for _ in range(ROUNDS)), strict=True)))

    def _round(self, saves: Sequence[int], pages: int, hooked: Iterable[str]) -> Cost:
        cpu, wall, pipeline = list[int](), list[int](), self._side.pipeline
        made = [self._plan(saves[at % len(saves)], pages) for at in range(STEPS)]
        before = time.process_time_ns() - time.thread_time_ns()
        for plan in made:
            began, began_cpu = time.perf_counter_ns(), time.thread_time_ns()
            self._run(plan, hooked)
            cpu.append(time.thread_time_ns() - began_cpu)
            wall.append(time.perf_counter_ns() - began)
            while len(pipeline.copies.outbox) < pipeline.in_flight:
                hashlib.sha1(_WORK, usedforsecurity=False)  # releases the interpreter's lock, as a forward does
        others = time.process_time_ns() - time.thread_time_ns() - before
        assert not self._side.counters.faults, self._side.counters.faults
        middle = mean if len(saves) > 1 else median
        return Cost(middle(cpu) / 1e3, middle(wall) / 1e3, others / STEPS / 1e3)

    def _plan(self, saves: int, pages: int) -> StepPlan:
        per_chunk, jobs, self._step = CHUNK_TOKENS // BLOCK_TOKENS, list[Job](), self._step + 1
        for number in range(saves):
            self._jobs += 1
            first = self._step % per_chunk if pages == 1 else 0
            block = self._step * 7 + number * 3
            places = range(first, first + pages)
            rows = [
                (0, (number + at // per_chunk) % self._slots, at % per_chunk, (block + at) % BLOCKS) for at in places
            ]
            jobs.append(Job(self._jobs, int(Kind.SAVE), f"cmpl-{number:032x}-0", 1, np.array(rows, "<i4").tobytes()))
        return StepPlan(self._step, tuple(jobs))

    def _run(self, plan: StepPlan, hooked: Iterable[str]) -> None:
        """Make vLLM's calls of a step."""
        side = self._side
        side.handle_preemptions()
        side.bind(plan)
        side.start_loads(hooked or None)
        for name in hooked:
            side.wait_layer(name)
            side.save_layer(name)
        side.end_step()
        side.collect()
        side.take_bad_blocks(late=False)
        side.take_report()
        side.unbind()


def _scheduler(running: int, limit: float, **given: Any) -> Figure:
    """Measure the scheduler's steps with `running` decoding requests and the settings `given`.

    Each step handles the reports of the previous step. With `save_decode_steps: 1` each step plans saves, and the
    figure is a median. By default only some steps plan saves, so the figure is a mean.
    """
    side, manager = make_side(**given)
    prompt, answer = 1000, ROUNDS * STEPS
    total = prompt + running // 4 + answer
    blocks, requests = blocks_of(total), list[SimpleNamespace]()
    for number in range(running):
        request = request_of(f"r{number}", prompt, seed=number)
        request.later_hashes = request_of("", total, seed=number).block_hashes
        manager.req_to_blocks[request.request_id] = blocks
        side.lookup(request, 0)
        side.admitted(request, (blocks,), 0)
        requests.append(request)
    first = SimpleNamespace(num_scheduled_tokens={one.request_id: prompt for one in requests}, preempted_req_ids=set())
    plan = side.plan_step(first)
    for number, request in enumerate(requests):  # so that the requests complete their blocks in different steps
        request.num_computed_tokens = prompt
        _decode(request, 1 + number % BLOCK_TOKENS)
    step: Any = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(first.num_scheduled_tokens, 1), preempted_req_ids=set()
    )
    saves, rounds = 0, list[float]()
    for _ in range(ROUNDS):
        took = list[int]()
        for _ in range(STEPS):
            began = time.thread_time_ns()
            side.reported(Report({job.id: ONE_OK for job in plan.jobs}))
            plan = side.plan_step(step)
            took.append(time.thread_time_ns() - began)
            saves += len(plan.jobs)
            for request in requests:
                _decode(request, 1)
        rounds.append((median if given else mean)(took) / 1e3)
    beside, what = f"{saves / ROUNDS / STEPS:.1f} saves a step", "each step saves" if given else "default settings"
    title = f"decode step, {running} running, {what}: CPU of the scheduler's thread"
    return Figure(title, min(rounds), limit, "us", beside)


def _decode(request: SimpleNamespace, tokens: int) -> None:
    """Add `tokens` computed tokens and as many new tokens to a request, as vLLM's scheduler does after a step."""
    request.num_computed_tokens += tokens if request.num_tokens > request.num_prompt_tokens else tokens - 1
    request.num_tokens += tokens
    request.block_hashes = request.later_hashes[: request.num_tokens // BLOCK_TOKENS]
