"""Compares a real engine's warm time to first token with the cold time and with vLLM's own prefix cache."""

from __future__ import annotations

import os
import random
import time
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

import torch

from benchmarks.report import Figure, median_s
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import VOCAB, make_model
from kvpipe.machine.cores import CPUS_AT_START  # imported before this thread is bound to a core
from kvpipe.trace.log import log

REPEATS = 5
LENGTHS = (2048, 4096, 8192)
WARM_ENGINE: dict[str, Any] = {
    "max_model_len": 8256,
    "max_num_batched_tokens": 8256,
    "num_gpu_blocks_override": 600,
}


def bind_cores() -> None:
    """Bind this thread, which runs the forward, to core 0. kvpipe's threads use the other cores."""
    log.info("cores", engine=[0], kvpipe=sorted(CPUS_AT_START - {0}))
    os.sched_setaffinity(0, {0})


def prompt(tokens: int, seed: int) -> list[int]:
    """Return a random prompt of `tokens` tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(tokens)]


def ttft(engine: Engine, tokens: list[int]) -> float:
    """Return the seconds until a single request has its first and only token."""
    begin = time.perf_counter()
    engine.generate([tokens], 1)
    return time.perf_counter() - begin


def run() -> list[Figure]:
    """Return the figures of each prompt length."""
    bind_cores()
    model = str(make_model("big-kv"))
    prompts = {n: prompt(n, 1000 + n) for n in LENGTHS}
    cold: dict[int, float] = {}
    own: dict[int, float] = {}
    engine = Engine(model, enable_prefix_caching=True, **WARM_ENGINE)
    engine.generate([prompt(64, 1)], 2)
    for n, tokens in prompts.items():
        cold[n] = ttft(engine, tokens)
        own[n] = median(ttft(engine, tokens) for _ in range(REPEATS))
    engine.close()
    warm: dict[int, float] = {}
    engine = Engine(model, kvpipe={"pool_bytes_max": "3GiB"}, enable_prefix_caching=False, **WARM_ENGINE)
    engine.generate([prompt(64, 1)], 2)
    for n, tokens in prompts.items():
        ttft(engine, tokens)
        engine.settle()
        warm[n] = median(ttft(engine, tokens) for _ in range(REPEATS))
    page_bytes = engine.connector.geometry.groups[0].bytes_per_block
    engine.close()
    out = []
    for n in LENGTHS:
        nbytes = n // 32 * page_bytes
        source = torch.ones(nbytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        copy = median_s(lambda t=target, s=source: t.copy_(s), 5)  # type: ignore[misc]
        del source, target
        beside = f"warm {warm[n] * 1e3:.0f} ms, cold {cold[n] * 1e3:.0f} ms"
        out.append(Figure(f"warm first token / cold, {n} tokens", warm[n] / cold[n], 0.15, "x", beside))
        beside = f"copy {copy * 1e3:.0f} ms, own prefix cache {own[n] * 1e3:.0f} ms, {nbytes >> 20} MiB"
        name = f"warm first token / (copy + own prefix cache), {n} tokens"
        out.append(Figure(name, warm[n] / (copy + own[n]), 1.3, "x", beside))
    return out
