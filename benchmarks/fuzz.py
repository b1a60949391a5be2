"""Measures how many steps of vLLM's real scheduler the fuzz harness makes per second, with one process per core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.pool import Pool

from benchmarks.report import Figure
from kvpipe.connectors.vllm.trial.moves import trial_moves
from kvpipe.connectors.vllm.trial.nightly import make_pool
from kvpipe.connectors.vllm.trial.nightly import run_moves as try_moves
from kvpipe.connectors.vllm.trial.shapes import SHAPES, Shape
from kvpipe.connectors.vllm.trial.trial import Move

SEEDS = range(12)
WARM_UP_SEED = 1000

Moves = Callable[[Shape, int], Iterable[Move]]


def run() -> list[Figure]:
    """Measure steps with and without the worker side, and the same moves with kvpipe bypassed."""
    cores = os.cpu_count() or 1
    every = list(SHAPES.values())
    alone = [shape._replace(ranks=0) for shape in every]
    with make_pool(cores) as pool:
        _rate(pool, every, trial_moves, [WARM_UP_SEED] * 2 * cores)
        both, idle = _rate(pool, every, trial_moves), _rate(pool, every, _bypassed)
        alone_both, alone_idle = _rate(pool, alone, trial_moves), _rate(pool, alone, _bypassed)
        two = _rate(pool, [SHAPES["two-ranks"]] * len(every), trial_moves)

    def figure(name: str, rate: float, limit: float, beside: float = 0.0) -> Figure:
        baseline = f"{rate / beside:.2f} x the same with kvpipe bypassed ({beside:.0f})" if beside else ""
        return Figure(name, rate, limit, "steps/s", baseline, at_least=True)

    return [
        figure("scheduler steps without the worker side", alone_both, 1000, alone_idle),
        figure("steps with two ranks of four layers, content oracle on", two, 300),
        figure("steps with the worker side, all shapes, content oracle on", both, 300, idle),
    ]


def _rate(pool: Pool, shapes: list[Shape], moves: Moves, seeds: Iterable[int] = SEEDS) -> float:
    begin = time.perf_counter()
    steps = pool.map(partial(_steps, shapes, moves), seeds, 1)
    return sum(steps) / (time.perf_counter() - begin)


def _steps(shapes: list[Shape], moves: Moves, seed: int) -> int:
    steps = 0
    for i, shape in enumerate(shapes):
        ran = try_moves(shape, seed + i, moves(shape, seed + i))
        if ran.broken:
            raise RuntimeError(ran.broken[0])
        steps += ran.steps
    return steps


def _bypassed(shape: Shape, seed: int) -> Iterable[Move]:
    yield "bypass", True
    yield from (move for move in trial_moves(shape, seed) if move[0] != "bypass")
