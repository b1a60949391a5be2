"""The suite that every inference engine with a kvpipe connector must pass (docs/new-engine.md).

A connector's test module has a subclass of `EngineConformance`, whose fixture `make` returns a maker of engines:

    class TestMine(EngineConformance):
        @pytest.fixture
        def make(self):
            return MyDriver  # MyDriver(options): an `EngineDriver` with kvpipe; MyDriver(None): one without kvpipe

Every test runs a workload on an engine with kvpipe and on an engine without kvpipe. The test disturbs the engine with
kvpipe, as the test's docstring describes. Then the test checks that both engines gave the same answers, and that as
many blocks are free as at the start. kvpipe must have no open leases, jobs or requests. A request has 48 tokens, and at
most 3 requests run at a time.
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
    """The options of an engine with kvpipe.

    `keys`: kvpipe's configuration. `copier`: returns the transfer engine, or None for the device's own.
    """

    keys: Mapping[str, Any]
    copier: Callable[[], TransferEngine | None] = lambda: None


class EngineDriver(Protocol):
    """An engine with or without kvpipe, as the tests drive the engine."""

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler side of kvpipe. The tests never read this property of an engine without kvpipe."""

    @property
    def workers(self) -> Sequence[WorkerSide]:
        """The worker sides of kvpipe, by rank."""

    @property
    def busy(self) -> bool:
        """Whether to make another step, because of requests, loads in progress or `SchedulerSide.pending`."""

    @property
    def free_blocks(self) -> int:
        """The number of blocks that no request and no copy holds."""

    def add(self, request_id: str, prompt: Sequence[int], new_tokens: int) -> None:
        """Queue a request. The engine's answer has `new_tokens` tokens and must depend on the prompt only."""

    def step(self) -> None:
        """Schedule and compute one step, which may be empty."""

    def answer(self, request_id: str) -> object:
        """Return the answer to a finished request. The tests compare answers with ``==``."""

    def preempt(self, request_id: str) -> bool:
        """Preempt a request, so that it loses its blocks. Returns False if the request is not running."""

    def abort(self, request_id: str) -> None:
        """Abort a request in any state."""

    def forget(self) -> None:
        """Empty the engine's own prefix cache, if it has one."""

    def reset(self) -> None:
        """Empty the engine's own prefix cache, and reset kvpipe, so that no saved chunk is found any more."""

    def shutdown(self) -> None:
        """Shut kvpipe down. The engine must still be able to make steps."""


Make = Callable[[Options | None], EngineDriver]
"""A function that makes an engine with kvpipe for `Options`, and an engine without kvpipe for None."""


class _EngineRun:
    """One engine with kvpipe, and the requests that were sent to the engine."""

    def __init__(self, make: Make, *, copier: Callable[[], TransferEngine | None] = lambda: None, **keys: Any) -> None:
        self.driver = make(Options({"prefault": "use"} | keys, copier))
        self._make, self._blocks = make, self.driver.free_blocks
        self._asked: dict[str, tuple[int, ...]] = {}

    def add(self, *seeds: int) -> list[str]:
        """Queue one prompt for each seed, and return the requests' ids. All prompts share the first half."""
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
        """Make steps while the engine is busy. `each(step)` is called before each step."""
        limit = time.monotonic() + WAIT_S
        for step in itertools.count():
            if not self.driver.busy:
                return
            assert time.monotonic() < limit, f"still busy after {step} steps"
            each(step)
            self.driver.step()
            time.sleep(0 if step % 16 else IDLE_S)

    def warm(self, *seeds: int) -> None:
        """Compute prompts, then empty the engine's own prefix cache, so that only kvpipe has their KV."""
        self.add(*seeds)
        self.run()
        self.driver.forget()

    def abort(self, name: str) -> None:
        """Abort a request, and expect no answer for this request."""
        self.driver.abort(name)
        del self._asked[name]

    @property
    def loaded(self) -> int:
        """The number of tokens for which loads were planned."""
        return self.driver.scheduler.counters["tokens_loaded"]

    def faults(self) -> dict[str, int]:
        """Return the number of faults by name, from the scheduler side and all worker sides."""
        every = [self.driver.scheduler.counters, *(worker.counters for worker in self.driver.workers)]
        return {name: count for counters in every for name, count in counters.faults.items()}

    def check(self, *, faults: bool = False) -> None:
        """Assert that answers equal those of an engine without kvpipe, and that nothing is left open.

        `faults` says whether counted faults are permitted.
        """
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
    """Replace the method `name` of `worker` by a function that calls the method twice."""
    once = getattr(worker, name)

    def twice(*args: Any, **kwargs: Any) -> None:
        once(*args, **kwargs)
        once(*args, **kwargs)

    setattr(worker, name, twice)


def _sometimes(worker: WorkerSide, name: str) -> None:
    """Replace the method `name` of `worker` by a function that does nothing in every second step."""
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
    """The tests of an engine with kvpipe."""

    @pytest.fixture
    def make(self) -> Make:
        """Return a function or class that makes an `EngineDriver`. Subclasses override this fixture."""
        not_overridden(self, "make", "what makes an engine, such as a class of `EngineDriver`")

    @pytest.mark.parametrize("load", ["sync", "async"])
    def test_hits_are_loaded(self, make: Make, load: str) -> None:
        """A prefix that was computed before is loaded, either layer by layer or before the request runs."""
        run = _EngineRun(make, load=load)
        run.warm(1, 2)
        run.add(1, 2, 3)
        run.run()
        assert run.loaded > 0, "nothing was loaded"
        run.check()

    @pytest.mark.parametrize("load", ["sync", "async"])
    def test_calls_may_repeat(self, make: Make, load: str) -> None:
        """Every hook of every step runs twice, so that each step also ends twice."""
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
        """If a hook does not run in every second step, requests take longer, but no answer changes.

        Bytes move only when a caller waits for them.
        """
        run = _EngineRun(make, load="sync", copier=HeldEngine)
        for worker in run.driver.workers:
            _sometimes(worker, hook)
        for _ in range(4):
            run.warm(1, 2, 3)
        assert run.loaded > 0, "nothing was loaded"
        run.check(faults=True)

    def test_steps_may_be_empty(self, make: Make) -> None:
        """Empty steps before, between and after steps with requests change nothing."""
        run = _EngineRun(make, load="sync")
        for _ in range(3):
            for _ in range(3):
                run.driver.step()
            for worker in run.driver.workers:
                worker.end_step()  # an extra call, while no step is running
            run.warm(1, 2)
        assert run.loaded > 0, "nothing was loaded"
        run.check()

    @pytest.mark.parametrize("load", ["sync", "async"])
    def test_anybody_may_be_preempted(self, make: Make, load: str) -> None:
        """Requests that save, load or decode may be preempted in any step."""
        run = _EngineRun(make, load=load)
        run.warm(1)
        names, chosen = run.add(1, 2, 3), random.Random(0)
        taken = []
        run.run(lambda _: taken.append(sum(taken) < 10 and run.driver.preempt(chosen.choice(names))))
        assert sum(taken) > 1, "nobody was preempted"
        run.check()

    @pytest.mark.parametrize("load", ["sync", "async"])
    def test_failed_loads_are_computed(self, make: Make, load: str) -> None:
        """Every second load fails and leaves garbage in its blocks.

        The tokens of such a load are computed, and the garbage is not saved.
        """

        def fails(direction: Direction, second: bool, layer: int) -> bool:  # noqa: FBT001
            return direction is Direction.LOAD and second and layer == 0

        run = _EngineRun(make, load=load, copier=lambda: FaultyCpuEngine(0, fails))
        run.warm(1)
        for _ in range(3):
            run.warm(1, 2, 3)
        assert "load_failed" in run.faults(), "no load failed"
        run.check(faults=True)

    def test_requests_may_end_while_they_load(self, make: Make) -> None:
        """A request is aborted while a load writes to its blocks. The blocks are not reused before the load ends."""
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
        """Requests are aborted in their first steps, and new requests with the same ids replace them."""
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
        """After a reset no chunk saved before the reset is found, not even a chunk whose save was in flight."""
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
        """If kvpipe shuts down while requests run, the engine continues without kvpipe."""
        run = _EngineRun(make, load="sync")
        run.warm(1)
        run.add(1, 2)
        run.driver.step()
        run.driver.shutdown()
        run.run()
        run.check(faults=True)
