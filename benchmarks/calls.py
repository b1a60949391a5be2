"""Compares the cost of vLLM's calls into kvpipe with the calls' cost at commit `BEFORE`, on the same machine.

`python -m benchmarks calls`. Each of the two source trees runs in two processes. The two trees run alternately in short
rounds, because the machine's speed varies. A figure compares each tree's least time. `BEFORE` is the last commit before
the scheduler side and the worker side became separate packages (decision 17). If `BEFORE` is not in the repository's
history, nothing is measured.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from benchmarks.report import Figure

BEFORE: Final = "ef91409"
PROCESSES: Final = 2
ROUNDS: Final = 40
REPEATS: Final = 10
RATIO_MAX: Final = 1.03
LAYERS: Final = 32
SLOTS: Final = 16384
"""The number of slots of a common pool. Both trees use plain dicts for pools of this size (decision 30)."""
TOKENS: Final = 1000
MANY: Final = range(64)
LONG: Final = 131_072
_TREE: Final = Path(__file__).parents[1]


def run() -> list[Figure]:
    """Return the ratio of each call's time to its time at `BEFORE`. The list is empty if `BEFORE` is missing."""
    with TemporaryDirectory(prefix="kvpipe-before-") as folder:
        before = Path(folder) / "tree"
        if not _git("worktree", "add", "--detach", str(before), BEFORE):
            return []
        try:
            now, then = _least((_TREE, before))
        finally:
            _git("worktree", "remove", "--force", str(before))
    return [
        Figure(name, us / then[name], RATIO_MAX, "x", f"{us:.3g} us, at {BEFORE} {then[name]:.3g}")
        for name, us in now.items()
    ]


def _git(*arguments: str) -> bool:
    done = subprocess.run(["git", "-C", str(_TREE), *arguments], capture_output=True, text=True, check=False)  # noqa: S603, S607
    if done.returncode:
        print(f"calls: the baseline is commit {BEFORE}. {done.stderr.strip()}", file=sys.stderr)
    return not done.returncode


def _least(trees: Sequence[Path]) -> list[dict[str, float]]:
    """Return, for each tree, the least time of each call over all rounds, in microseconds."""
    least: list[dict[str, float]] = [{} for _ in trees]
    with ExitStack() as stack:
        started = [
            (known, stack.enter_context(_start(tree)))
            for _ in range(PROCESSES)
            for known, tree in zip(least, trees, strict=True)
        ]
        for number in range(ROUNDS):
            for known, process in started:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{number}\n")
                process.stdin.flush()
                answer = next((line for line in process.stdout if line.startswith("{")), "")
                if not answer:
                    raise ChildProcessError(f"a process of one of {trees} has ended")
                for name, us in json.loads(answer).items():
                    known[name] = min(us, known.get(name, us))
        for _, process in started:
            assert process.stdin is not None
            process.stdin.close()
    return least


def _start(tree: Path) -> subprocess.Popen[str]:
    path = {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", __file__], env=os.environ | path, cwd=tree, text=True, stdin=PIPE, stdout=PIPE
    )


# ---- in a process of its own, with either tree's kvpipe --------------------------------------------------------------


def main() -> None:
    """Read a round's number from each line of standard input, and write each call's least time in microseconds."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tree = _Tree()
    gc.collect()
    gc.freeze()  # vLLM also freezes all objects when an engine has started
    for number in sys.stdin:
        took: dict[str, list[float]] = {}
        _lookups(tree, int(number), took)
        _lives(tree, (1 + int(number)) * len(MANY), took)
        _steps(tree, int(number), took)
        print(json.dumps({name: min(some) for name, some in took.items()}), flush=True)


class _Tree:
    """Access to the current kvpipe or to kvpipe at `BEFORE`, whose modules and functions have other names."""

    def __init__(self) -> None:
        here = self._import("scheduler.side", "connectors.vllm.scheduler")
        self.old = not here.__name__.startswith("kvpipe.scheduler")
        self._made, self._geometry = here.SchedulerSide, self._import("protocol.geometry", "geometry")
        self._load_settings = self._import("config.settings", "config").load_settings
        self.messages = self._import("protocol.messages", "messages", "plan")
        self._reports = self._import("protocol.messages", "messages", "connectors.vllm.metadata")
        self._pipeline = self._import("worker.pipeline", "pipeline").Pipeline
        self.side, self.manager = self._side()

    def _import(self, *names: str) -> Any:
        for name in names[:-1]:
            with suppress(ModuleNotFoundError):
                return importlib.import_module(f"kvpipe.{name}")
        return importlib.import_module(f"kvpipe.{names[-1]}")

    def geometry(self) -> Any:
        """Return a geometry of `SLOTS` slots of 256 tokens."""
        layers = tuple(self._geometry.Layer(f"l{i}", 1024) for i in range(LAYERS))
        return self._geometry.Geometry((self._geometry.Group(layers, 16),), 256, SLOTS * 16 * 1024 * LAYERS)

    def _side(self) -> tuple[Any, Any]:
        geometry, manager = self.geometry(), Manager()
        options = {"hash_tokens": 16, "ranks": 1, "saves": True, "loads": True}
        same = {} if self.old else {"save_decode_steps": 1, "policy": "lru"}  # `BEFORE` always does the same
        settings = self._load_settings({"chunk_tokens": 256, "prefault": "use", **same})
        if self.old:
            side = self._made(settings, geometry, **options)
            side.bind(manager)
            return side, manager
        adapter = self._import("connectors.vllm.engine_protocols", "connectors.vllm.adapter")
        room = self._import("connectors.vllm.remedies.admission").LoadAdmission(geometry, 8192, 1 << 17)
        remedies, blocks = adapter.Remedies(geometry, room), adapter.ManagedBlocks(manager)
        try:
            hooks = self._import("scheduler.hooks", "scheduler.base")
            side = self._made(settings, geometry, hooks.EngineFacts(**options), hooks.EngineHooks(recovery=remedies))
        except AttributeError:  # an older tree
            side = self._made(settings, geometry, **options, recovery=remedies)
        side.bind(blocks)
        remedies.bind(blocks, side.counters)
        return side, manager

    def admitted(self, request: Any, blocks: list[Any], tokens: int) -> None:
        """Report to the scheduler side that `request` was admitted with `blocks`."""
        self.side.admitted(request, SimpleNamespace(blocks=(blocks,)) if self.old else (blocks,), tokens)

    def report(self, jobs: Iterable[Any]) -> Any:
        """Return a report in which all `jobs` are done."""
        done = {job.id: self._reports.Tally(1, 0) for job in jobs}
        return done if self.old else self._reports.Report(done)

    def end(self, requests: Iterable[Any]) -> None:
        """End requests and empty the pool, because later steps would be slower with saved chunks (`Catalog.sweep`)."""
        for one in requests:
            self.side.finished(one)
        self.side.reset()
        self.manager.req_to_blocks.clear()
        for _ in range(SLOTS // 64):
            self.side.plan_step(output_of({}))

    def pipeline(self) -> Any:
        """Return a pipeline that copies nothing."""
        if self.old:
            counters = self._import("trace.log").Counters()
            return self._pipeline(_NoCopy(), self.geometry(), wait_ms_max=1000, counters=counters, layerwise=True)
        context = self._import("worker.context").RankContext(self._load_settings({}))
        return self._pipeline(context, _NoCopy(), self.geometry())


class Manager:
    """The part of vLLM's cache manager that kvpipe's planning reads."""

    def __init__(self) -> None:
        """Make a manager without blocks."""
        self.req_to_blocks: dict[str, list[Any]] = {}
        self.num_cached_block: dict[str, int] = {}
        self.coordinator = SimpleNamespace(single_type_managers=[self])

    def reset_prefix_cache(self) -> bool:
        """Return True, as vLLM's manager does after it has emptied the prefix cache."""
        return True


class _NoCopy:
    """A transfer engine that completes every copy at once, so that only kvpipe's own cost is measured."""

    piece_bytes = 1 << 20

    def claim(self, *_: object) -> bool:
        return True

    def submit(self, _plan: object, ticket: Any) -> None:
        ticket.complete()

    def guard_read(self, ticket: Any, timeout_s: float) -> Any:
        return ticket.wait(timeout_s)

    def abandon(self, ticket: Any) -> Any:
        return ticket.over

    fence = guard_read

    def _nothing(self, *_: object) -> None: ...

    attach = prepare = reached = scrub = shutdown = _nothing


def request_of(name: str, tokens: int, seed: int = 0) -> Any:
    """Return an object with the attributes of vLLM's request that kvpipe reads.

    Prompts with the same `seed` begin with the same tokens.
    """
    hashes = [f"{seed}:{i}".encode().ljust(32, b".") for i in range(tokens // 16)]
    return SimpleNamespace(
        request_id=name, num_tokens=tokens, num_prompt_tokens=tokens, num_computed_tokens=0,
        num_preemptions=0, block_hashes=hashes, all_token_ids=range(tokens), lora_request=None,
        skip_reading_prefix_cache=False, resumable=False,
    )  # fmt: skip


def blocks_of(tokens: int) -> list[Any]:
    """Return objects in place of the vLLM blocks that `tokens` tokens need."""
    return [SimpleNamespace(block_id=i, is_null=False) for i in range(-(-tokens // 16))]


def output_of(scheduled: dict[str, int], preempted: AbstractSet[str] = frozenset()) -> Any:
    """Return an output of vLLM's scheduler, with the tokens `scheduled` by request and the `preempted` requests."""
    return SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=preempted)


def _time(took: dict[str, list[float]], name: str, call: Callable[[], object], calls: int = 1) -> None:
    begin = time.perf_counter()
    call()
    took.setdefault(name, []).append((time.perf_counter() - begin) / calls * 1e6)


def _lookups(tree: _Tree, number: int, took: dict[str, list[float]]) -> None:
    """Measure lookups of prompts of 131,072 tokens, hit and missed, and steps with 256 running requests and with 1."""
    side, blocks = tree.side, blocks_of(LONG + 1)
    writer, reader, stranger = (request_of(name, LONG + 1, seed=-2 * number - (name == "s") - 1) for name in "wrs")
    tree.manager.req_to_blocks["w"] = blocks
    side.lookup(writer, 0)
    tree.admitted(writer, blocks, 0)
    side.reported(tree.report(side.plan_step(output_of({"w": LONG})).jobs))
    side.finished(writer)
    assert side.lookup(reader, 0)[0] == LONG
    assert side.lookup(stranger, 0)[0] == 0
    for _ in range(REPEATS):
        _time(took, "lookup again, 128k tokens, hit", lambda: side.lookup(reader, 0))
        _time(took, "lookup again, 128k tokens, miss", lambda: side.lookup(stranger, 0))
    side.finished(reader)
    side.finished(stranger)
    running = [request_of(f"r{i}", TOKENS, seed=-1000 - 256 * number - i) for i in range(256)]
    for request in running:
        tree.manager.req_to_blocks[request.request_id] = blocks[:64]
        side.lookup(request, 0)
        tree.admitted(request, blocks[:64], 0)
    side.reported(tree.report(side.plan_step(output_of({one.request_id: TOKENS for one in running})).jobs))
    for request in running:
        request.num_computed_tokens = TOKENS
    step, one = output_of({one.request_id: 1 for one in running}), output_of({"r0": 1})
    side.plan_step(step)
    for _ in range(REPEATS):
        _time(took, "plan a step, 256 running, nothing new", lambda: side.plan_step(step))
        _time(took, "plan a step, 1 running, nothing new", lambda: side.plan_step(one))
    tree.end(running)


def _lives(tree: _Tree, seed: int, took: dict[str, list[float]]) -> None:
    """Measure the calls of 64 requests that are saved, and of 64 requests that load the same prompts."""
    side, blocks = tree.side, blocks_of(TOKENS + 16)

    def come(name: str) -> list[Any]:
        fresh = [request_of(f"{name}{i}", TOKENS, seed=seed + i) for i in MANY]
        tree.manager.req_to_blocks.update((one.request_id, blocks[:63]) for one in fresh)
        return fresh

    def each(name: str, call: Any, some: Iterable[Any]) -> None:
        _time(took, name, lambda: [call(one) for one in some], len(MANY))

    def step(name: str, count: int) -> list[Any]:
        output, plans = output_of({one.request_id: count for one in requests}), list[Any]()
        each(name, lambda step: plans.append(side.plan_step(step)), [output])
        for one in requests:
            one.num_computed_tokens += count
        return [tree.report([job]) for job in plans[0].jobs]

    requests = come("saved")
    each("first lookup of a request, 1000 tokens, miss", lambda one: side.lookup(one, 0), requests)
    each("admission without a load", lambda one: tree.admitted(one, blocks[:63], 0), requests)
    each("report of a save", side.reported, step("plan a save of 1000 tokens", TOKENS))
    for i, one in zip(MANY, requests, strict=True):
        one.num_tokens, one.block_hashes = TOKENS + 16, request_of("", TOKENS + 16, seed=seed + i).block_hashes
        tree.manager.req_to_blocks[one.request_id] = blocks
    for report in step("plan a save of 16 more tokens", 16):
        side.reported(report)
    each("end of a request", side.finished, requests)
    requests = come("loaded")
    each("first lookup of a request, 1000 tokens, hit", lambda one: side.lookup(one, 0), requests)
    each("admission with a load of 992 tokens", lambda one: tree.admitted(one, blocks[:63], 992), requests)
    for one in requests:
        one.num_computed_tokens = 992
    each("report of a load", side.reported, step("send a load that was admitted", 8))
    for one in requests:
        side.finished(one)
    _preemptions(tree, come("local"), took)


def _preemptions(tree: _Tree, requests: list[Any], took: dict[str, list[float]]) -> None:
    """Measure the calls of 64 requests that are preempted, and whose prompts the engine itself holds."""
    side, blocks = tree.side, blocks_of(TOKENS)
    for one in requests:
        side.lookup(one, 992)
    admit: Callable[[Any], Any] = partial(tree.admitted, blocks=blocks, tokens=0)
    _time(took, "admission, held by the engine", lambda: [admit(one) for one in requests], len(MANY))
    for computed, name in (992, "first"), (1000, "second"):
        for one in requests:
            one.num_computed_tokens = computed
        output = output_of({one.request_id: 1000 - computed or 1 for one in requests})
        _time(took, f"the {name} step of 64, nothing to save", partial(side.plan_step, output))
    output = output_of({}, {one.request_id for one in requests})
    _time(took, "a step that preempts 64", partial(side.plan_step, output))
    for one in requests:
        one.num_computed_tokens, one.num_preemptions = 0, 1
    _time(took, "lookup after a preemption", lambda: [side.lookup(one, 0) for one in requests], len(MANY))
    tree.end(requests)


def _steps(tree: _Tree, number: int, took: dict[str, list[float]]) -> None:
    """Measure all hooks of a step on a rank."""
    pipeline, kinds = tree.pipeline(), tree.messages.Kind

    def job(number: int, kind: Any) -> Any:
        rows = np.asarray([(0, number % SLOTS, 0, number)], dtype="<i4").tobytes()
        return tree.messages.Job(number, int(kind), f"cmpl-{number:032x}-0", 1, rows)

    def step(plan: Any) -> None:
        pipeline.begin(plan)
        pipeline.start_loads()
        for layer in range(LAYERS):
            pipeline.wait_layer(layer)
            pipeline.save_layer(layer)
        pipeline.end_step()
        pipeline.collect()

    for at in range(REPEATS):
        for name, some in (("nothing", ()), ("8 saves", (kinds.SAVE,)), ("8 loads", (kinds.LOAD_SYNC,))):
            jobs = tuple(job(1 + (number * REPEATS + at) * 16 + i, kind) for kind in some for i in range(8))
            plan = tree.messages.StepPlan(1, jobs)
            _time(took, f"a step's hooks, {LAYERS} layers, {name}", partial(step, plan))
    pipeline.shutdown()


if __name__ == "__main__":
    main()
