"""On a real engine: throughput without reuse, and the warm time to first token, beside an engine without kvpipe."""

from __future__ import annotations

import os
import random
import time
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

import structlog
import torch

import kvpipe.connectors.vllm.worker  # notes the cores of the process before this thread is bound to one
from benchmarks.report import Figure, median_s
from kvpipe.testing.engine import Engine
from kvpipe.testing.models import VOCAB, make_model

log = structlog.get_logger("kvpipe.bench")

REPEATS = 5
ROUNDS, REPEATS_PER_ROUND = 4, 3
LENGTHS = (2048, 4096, 8192)
WARM_ENGINE: dict[str, Any] = {
    "max_model_len": 8256,
    "max_num_batched_tokens": 8256,
    "num_gpu_blocks_override": 600,
}
LOADS = {
    # name: (requests, prompt tokens, answer tokens, how much of the throughput must be left)
    "decode-heavy": (16, 32, 32, 0.99),
    "prefill-heavy": (4, 250, 2, 0.96),
}


def run() -> list[Figure]:
    """Every figure that needs an engine. The forward has core 0, kvpipe's threads have the rest."""
    log.info("cores", engine=[0], kvpipe=sorted(kvpipe.connectors.vllm.worker.CPUS_AT_START - {0}))
    os.sched_setaffinity(0, {0})
    return [*_throughput(), *_warm()]


def _prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(tokens)]


def _throughput() -> list[Figure]:
    model = str(make_model("serving"))
    seconds: dict[tuple[str, bool], list[float]] = {(load, on): [] for load in LOADS for on in (False, True)}
    seed = 0
    for on in (False, True) * ROUNDS:  # interleaved, so that a drifting machine shows in both
        engine = Engine(model, kvpipe={"pool_bytes_max": "2GiB"} if on else None, num_gpu_blocks_override=600)
        for load, (requests, prompt, answer, _) in LOADS.items():
            for repeat in range(REPEATS_PER_ROUND + 1):
                prompts = [_prompt(prompt, seed + i) for i in range(requests)]
                seed += requests
                begin = time.perf_counter()
                engine.generate(prompts, answer)
                if repeat:  # the first warms up
                    seconds[load, on].append(time.perf_counter() - begin)
        engine.close()
    out = []
    for load, (requests, prompt, answer, least) in LOADS.items():
        plain, piped = median(seconds[load, False]), median(seconds[load, True])
        tokens = requests * (prompt + answer)
        beside = f"{tokens / piped:.0f} of {tokens / plain:.0f} tokens/s without kvpipe"
        out.append(Figure(f"throughput, no reuse, {load}", plain / piped, least, "of plain", beside, at_least=True))
    return out


def _ttft(engine: Engine, tokens: list[int]) -> float:
    begin = time.perf_counter()
    engine.generate([tokens], 1)
    return time.perf_counter() - begin


def _warm() -> list[Figure]:
    model = str(make_model("big-kv"))
    prompts = {n: _prompt(n, 1000 + n) for n in LENGTHS}
    cold: dict[int, float] = {}
    own: dict[int, float] = {}
    engine = Engine(model, enable_prefix_caching=True, **WARM_ENGINE)
    engine.generate([_prompt(64, 1)], 2)
    for n, tokens in prompts.items():
        cold[n] = _ttft(engine, tokens)
        own[n] = median(_ttft(engine, tokens) for _ in range(REPEATS))
    engine.close()
    warm: dict[int, float] = {}
    engine = Engine(model, kvpipe={"pool_bytes_max": "3GiB"}, enable_prefix_caching=False, **WARM_ENGINE)
    engine.generate([_prompt(64, 1)], 2)
    for n, tokens in prompts.items():
        _ttft(engine, tokens)
        engine.settle()
        warm[n] = median(_ttft(engine, tokens) for _ in range(REPEATS))
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
