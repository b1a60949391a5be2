"""What every engine behind kvpipe must keep, with its adapter: see docs/new-engine.md.

A test module of an adapter has a subclass of `EngineConformance`, whose fixture `make` makes an engine:

    class TestMine(EngineConformance):
        @pytest.fixture
        def make(self):
            return MyDriver  # MyDriver(options): an `EngineDriver`, with kvpipe; MyDriver(None): without

Every test runs a workload on an engine with kvpipe and on one without, disturbs the first (see its docstring), and
demands the same answers, the same free blocks, and nothing left open. It takes 48 tokens a request, and at most 3
requests at a time.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import pytest

from kvpipe.scheduler.side import SchedulerSide
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.testing.faults import FaultyCpuEngine
from kvpipe.testing.held import HeldEngine
from kvpipe.testing.overriding import not_overridden
from kvpipe.testing.waiting import WAIT_S
from kvpipe.transfer.base import Direction, TransferEngine
from kvpipe.worker.side import WorkerSide

__all__ = ["EngineConformance", "EngineDriver", "Make", "Options"]

IDLE_S: Final = 0.001
NEW_TOKENS: Final = 8
VOCABULARY: Final = 50
HOOKS: Final = ("start_loads", "wait_layer", "save_layer", "end_step", "unbind")


class Options(NamedTuple):
    """How kvpipe is to be set up: keys of its configuration, and what copies, if not the device's own."""

    keys: Mapping[str, Any]
    copier: Callable[[], TransferEngine | None] = lambda: None


class EngineDriver(Protocol):
    """An engine, with kvpipe or without, as the checks drive it."""

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler side of kvpipe. Not asked for without kvpipe."""

    @property
    def workers(self) -> Sequence[WorkerSide]:
        """The worker sides of kvpipe, by rank."""

    @property
    def busy(self) -> bool:
        """Whether there is a reason for a step: requests, loads that have not ended, `SchedulerSide.pending`."""

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody holds."""

    def add(self, request_id: str, prompt: Sequence[int], new_tokens: int) -> None:
        """Queue a request; the engine's answer has `new_tokens` tokens and depends on the prompt alone."""

    def step(self) -> None:
        """Schedule and compute one step. There may be nothing to compute."""

    def answer(self, request_id: str) -> object:
        """Return what a finished request was answered. It is compared with ``==``."""

    def preempt(self, request_id: str) -> bool:
        """Take the blocks of a running request away. Returns whether it runs."""

    def abort(self, request_id: str) -> None:
        """Give up a request in whatever state."""

    def forget(self) -> None:
        """Empty the engine's own prefix cache, if it has one."""

    def reset(self) -> None:
        """Empty it, and have kvpipe forget everything."""

    def shutdown(self) -> None:
        """End kvpipe's threads. Steps go on."""


Make = Callable[[Options | None], EngineDriver]
"""Makes an engine; without kvpipe for None."""


class _EngineRun:
    """One engine with kvpipe, and what was asked of it."""

    def __init__(self, make: Make, *, copier: Callable[[], TransferEngine | None] = lambda: None, **keys: Any) -> None:
        self.driver = make(Options({"prefault": "use"} | keys, copier))
        self._make, self._blocks = make, self.driver.free_blocks
        self._asked: dict[str, tuple[int, ...]] = {}

    def add(self, *seeds: int) -> list[str]:
        """Queue a prompt per seed, half of it common to all, and return their ids."""
        common = random.Random(-1)
        shared = [common.randrange(VOCABULARY) for _ in range(20)]
        names = []
        for seed in seeds:
            own = random.Random(seed)
            name = f"{len(self._asked)}.{seed}"
            self._asked[name] = (*shared, *(own.randrange(VOCABULARY) for _ in range(20)))
            self.driver.add(name, self._asked[name], NEW_TOKENS)
            names.append(name)
        return names

    def run(self, each: Callable[[int], object] = lambda _: None) -> None:
        """Step while there is a reason to; before each one `each(step)` is called."""
        limit = time.monotonic() + WAIT_S
        for step in itertools.count():
            if not self.driver.busy:
                return
            assert time.monotonic() < limit, f"still busy after {step} steps"
            each(step)
            self.driver.step()
            time.sleep(0 if step % 16 else IDLE_S)

    def warm(self, *seeds: int) -> None:
        """Compute prompts, and keep nothing of them but what kvpipe has."""
        self.add(*seeds)
        self.run()
        self.driver.forget()

    def abort(self, name: str) -> None:
        """Give a request up: it has no answer."""
        self.driver.abort(name)
        del self._asked[name]

    @property
    def loaded(self) -> int:
        """Tokens that loads were planned for."""
        return self.driver.scheduler.counters["tokens_loaded"]

    def faults(self) -> dict[str, int]:
        """Return what has gone wrong, on all sides."""
        every = [self.driver.scheduler.counters, *(worker.counters for worker in self.driver.workers)]
        return {name: count for counters in every for name, count in counters.faults.items()}

    def check(self, *, faults: bool = False) -> None:
        """Answers are those of an engine without kvpipe, and nothing is left open. `faults`: some are expected."""
        alone = self._make(None)
        for name, prompt in self._asked.items():
            alone.add(name, prompt, NEW_TOKENS)
        while alone.busy:
            alone.step()
        wrong = [name for name in self._asked if self.driver.answer(name) != alone.answer(name)]
        assert not wrong, f"other answers than without kvpipe: {wrong}"
        assert self.driver.free_blocks == self._blocks, "blocks are not free"
        stats = self.driver.scheduler.stats()
        left = {name: stats[name] for name in ("leases", "jobs_in_flight", "requests", "pieces_writing") if stats[name]}
        assert not left, f"left open: {left}"
        check_integrity(self.driver.scheduler.catalog)
        assert faults or not self.faults(), f"faults: {self.faults()}"
        self.driver.shutdown()


def _twice(worker: WorkerSide, name: str) -> None:
    """Have `worker` do everything under `name` twice."""
    once = getattr(worker, name)

    def twice(*args: Any, **kwargs: Any) -> None:
        once(*args, **kwargs)
        once(*args, **kwargs)

    setattr(worker, name, twice)


def _sometimes(worker: WorkerSide, name: str) -> None:
    """Leave out `name` in every second step of `worker`."""
    real, bind, steps = getattr(worker, name), worker.bind, [0]

    def count(plan: Any) -> None:
        steps[0] += 1
        bind(plan)

    def sometimes(*args: Any, **kwargs: Any) -> None:
        if steps[0] % 2:
            real(*args, **kwargs)

    setattr(worker, "bind", count)  # noqa: B010  (mypy: a method)
    setattr(worker, name, sometimes)


class EngineConformance:
    """The claims."""

    @pytest.fixture
    def make(self) -> Make:
        """Return what makes an engine, such as a class of `EngineDriver`. Subclasses override it."""
        not_overridden(self, "make", "what makes an engine, such as a class of `EngineDriver`")

    @pytest.mark.parametrize("load", ["sync", "async"])
    def test_hits_are_loaded(self, make: Make, load: str) -> None:
        """What was computed once is loaded, layer by layer or before the request runs."""
        run = _EngineRun(make, load=load)
        run.warm(1, 2)
        run.add(1, 2, 3)
        run.run()
        assert run.loaded > 0, "nothing was loaded"
        run.check()

    @pytest.mark.parametrize("load", ["sync", "async"])
    def test_calls_may_repeat(self, make: Make, load: str) -> None:
        """Every hook of every step runs twice, and a step ends once more after it has ended."""
        run = _EngineRun(make, load=load)
        for worker in run.driver.workers:
            for name in HOOKS:
                _twice(worker, name)
        run.warm(1, 2)
        run.add(1, 2, 3)
        run.run()
        assert run.loaded > 0, "nothing was loaded"
        run.check()

    @pytest.mark.parametrize("hook", HOOKS)
    def test_calls_may_be_missing(self, make: Make, hook: str) -> None:
        """In every second step one of the hooks does not run: that costs time, and no answer.

        Bytes move when somebody waits for them, and not before.
        """
        run = _EngineRun(make, load="sync", copier=HeldEngine)
        for worker in run.driver.workers:
            _sometimes(worker, hook)
        for _ in range(4):
            run.warm(1, 2, 3)
        assert run.loaded > 0, "nothing was loaded"
        run.check(faults=True)

    def test_steps_may_be_empty(self, make: Make) -> None:
        """Steps without requests, before, between and after those with some, change nothing."""
        run = _EngineRun(make, load="sync")
        for _ in range(3):
            for _ in range(3):
                run.driver.step()
            for worker in run.driver.workers:
                worker.end_step()  # outside of any step
            run.warm(1, 2)
        assert run.loaded > 0, "nothing was loaded"
        run.check()

    @pytest.mark.parametrize("load", ["sync", "async"])
    def test_anybody_may_be_preempted(self, make: Make, load: str) -> None:
        """Blocks are taken away in any step, from requests that save, load and decode."""
        run = _EngineRun(make, load=load)
        run.warm(1)
        names, chosen = run.add(1, 2, 3), random.Random(0)
        taken = []
        run.run(lambda step: taken.append(step < 30 and run.driver.preempt(chosen.choice(names))))
        assert sum(taken) > 1, "nobody was preempted"
        run.check()

    @pytest.mark.parametrize("load", ["sync", "async"])
    def test_failed_loads_are_computed(self, make: Make, load: str) -> None:
        """Every second load leaves garbage in its blocks: its tokens are computed, and the garbage is not kept."""

        def fails(direction: Direction, second: bool, layer: int) -> bool:  # noqa: FBT001
            return direction is Direction.LOAD and second and layer == 0

        run = _EngineRun(make, load=load, copier=lambda: FaultyCpuEngine(0, fails))
        run.warm(1)
        for _ in range(3):
            run.warm(1, 2, 3)
        assert "load_failed" in run.faults(), "no load failed"
        run.check(faults=True)

    def test_requests_may_end_while_they_load(self, make: Make) -> None:
        """A request is given up while a load writes to its blocks: they are nobody else's until it has ended."""
        copiers: list[HeldEngine] = []

        def copier() -> HeldEngine:
            copiers.append(HeldEngine())
            return copiers[-1]

        run = _EngineRun(make, load="async", copier=copier)
        run.warm(1)
        free = run.driver.free_blocks
        (gone,) = run.add(1)
        run.driver.step()
        assert run.loaded > 0, "nothing was loaded"
        run.abort(gone)
        for _ in range(4):
            run.driver.step()
        assert run.driver.free_blocks < free, "blocks are free that a load still writes to"
        run.add(2, 3)

        def pass_time(_: int) -> None:
            for one in copiers:
                one.tick(Direction.LOAD, 1 << 10)

        run.run(pass_time)
        run.check()

    def test_ids_may_come_back(self, make: Make) -> None:
        """A request is given up in its first steps, again and again, and others take its place."""
        run = _EngineRun(make, load="sync")
        for steps in range(6):
            (gone,) = run.add(steps)
            for _ in range(steps):
                run.driver.step()
            run.abort(gone)
            assert run.add(steps) == [gone]
            run.run()
        run.check()

    def test_a_reset_forgets(self, make: Make) -> None:
        """After a reset nothing is found of what was saved, also of what was on its way then."""
        run = _EngineRun(make, load="sync")
        run.warm(1, 2)
        run.driver.reset()
        run.add(1, 2)
        run.driver.step()
        assert run.loaded == 0, "what was to be forgotten was loaded"
        run.driver.reset()
        run.run()
        run.check()

    def test_a_shutdown_costs_misses(self, make: Make) -> None:
        """When kvpipe ends in the middle of requests, the engine goes on without it."""
        run = _EngineRun(make, load="sync")
        run.warm(1)
        run.add(1, 2)
        run.driver.step()
        run.driver.shutdown()
        run.run()
        run.check(faults=True)
