"""Measures a real engine's first token with prompts loaded from disk, and the cost of a remote tier that is down."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Figure
from benchmarks.throughput import LOADS
from benchmarks.warm import LENGTHS, WARM_ENGINE, bind_cores, prompt, ttft
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.scheduler.side import SchedulerSide

REPEATS = 3
PAIRS = 15
DEAD = {"kind": "redis", "host": "127.0.0.1", "port": 1, "timeout_ms_max": 500}


def _side(engine: Engine) -> SchedulerSide:
    side = engine.connector.scheduler
    assert side is not None
    return side


@contextlib.contextmanager
def _without_tiers(engine: Engine) -> Iterator[None]:
    """Remove the tiers from the idle engine, as if the engine had been configured without tiers."""
    side = _side(engine)
    staging, side.staging = side.staging, None
    try:
        yield
    finally:
        side.staging = staging


def run() -> list[Figure]:
    """Return the figures of both tiers, each measured on a separate engine."""
    bind_cores()
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=Path(__file__).parents[1]))  # /tmp may be in memory
    try:
        return [*_from_disk(folder), *_dead_tier()]
    finally:
        shutil.rmtree(folder)


def _from_disk(folder: Path) -> list[Figure]:
    disk = {"kind": "disk", "path": str(folder / "kv"), "bytes_max": "8GiB", "direct": "on"}
    waits = dict.fromkeys(("lookup_ms_max", "lookup_slow_ms_max"), 60_000)
    config: dict[str, Any] = {"pool_bytes_max": "3GiB", "tiers": [disk], **waits}
    engine = Engine(str(make_model("big-kv")), kvpipe=config, enable_prefix_caching=False, **WARM_ENGINE)
    side, out = _side(engine), []
    while side.catalog.ready < side.catalog.slots:  # the whole first prompt must be saved
        engine.generate([prompt(64, 1)], 2)
    for n in LENGTHS:
        tokens = prompt(n, 2000 + n)
        cold = ttft(engine, tokens)
        engine.settle()
        warm = []
        for _ in range(REPEATS):
            side.catalog.reset()
            before = side.tracer.hit_tokens.get("disk", 0)
            warm.append(ttft(engine, tokens))
            assert side.tracer.hit_tokens["disk"] - before >= n - 256, "it came from elsewhere"
            engine.settle()
        mib = n // 32 * side.geometry.groups[0].bytes_per_block >> 20
        beside = f"disk {median(warm) * 1e3:.0f} ms ({mib / median(warm):.0f} MiB/s), cold {cold * 1e3:.0f} ms"
        out.append(Figure(f"first token from disk / cold, {n} tokens", median(warm) / cold, 0.3, "x", beside))
    engine.close()
    return out


def _dead_tier() -> list[Figure]:
    config = {"pool_bytes_max": "2GiB", "tiers": [DEAD]}
    engine = Engine(str(make_model("serving")), kvpipe=config, num_gpu_blocks_override=600)
    seconds: dict[tuple[str, bool], list[float]] = {(load, dead): [] for load in LOADS for dead in (False, True)}
    seed = 0
    for pair in range(-1, PAIRS):  # the first pair warms up
        for load, (requests, size, answer, _) in LOADS.items():
            for dead in (False, True) if pair % 2 else (True, False):
                prompts = [prompt(size, seed + i) for i in range(requests)]
                seed += requests
                with contextlib.nullcontext() if dead else _without_tiers(engine):
                    begin = time.perf_counter()
                    engine.generate(prompts, answer)
                    took = time.perf_counter() - begin
                if pair >= 0:
                    seconds[load, dead].append(took)
    engine.close()
    out = []
    for load, (requests, size, answer, _) in LOADS.items():
        none, dead_s = seconds[load, False], seconds[load, True]
        ratio = median(a / b for a, b in zip(none, dead_s, strict=True))
        rate = requests * (size + answer) / median(dead_s)
        beside = f"{rate:.0f} tokens/s; median of {PAIRS} pairs in one engine"
        out.append(Figure(f"throughput, remote tier down, {load}", ratio, 0.98, "of none", beside, at_least=True))
    return out
