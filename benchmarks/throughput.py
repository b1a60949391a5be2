"""Measures a real engine's throughput when no prompt hits, against the same engine without its connector."""

from __future__ import annotations

import contextlib
import time
from statistics import median

from benchmarks import fresh
from benchmarks.fresh import without_connector
from benchmarks.report import Figure
from benchmarks.warm import bind_cores
from benchmarks.warm import prompt as make_prompt
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model

PAIRS = 30
LOADS = {
    # name: (requests, prompt tokens, answer tokens, least ratio of throughputs with and without kvpipe)
    "decode-heavy": (16, 32, 32, 0.99),
    "prefill-heavy": (4, 250, 2, 0.96),
}


def run() -> list[Figure]:
    """Return medians of ratios of consecutive runs in one engine: two equal engines differ by more than the limit."""
    bind_cores()
    first = fresh.run()  # runs first, while this process has touched little memory
    engine = Engine(str(make_model("serving")), kvpipe={"pool_bytes_max": "2GiB"}, num_gpu_blocks_override=600)
    seconds: dict[tuple[str, bool], list[float]] = {(load, on): [] for load in LOADS for on in (False, True)}
    seed = 0
    for pair in range(-1, PAIRS):  # the first pair warms up
        for load, (requests, prompt, answer, _) in LOADS.items():
            for on in (False, True) if pair % 2 else (True, False):
                prompts = [make_prompt(prompt, seed + i) for i in range(requests)]
                seed += requests
                with contextlib.nullcontext() if on else without_connector(engine):
                    begin = time.perf_counter()
                    engine.generate(prompts, answer)
                    took = time.perf_counter() - begin
                if pair >= 0:
                    seconds[load, on].append(took)
    saved = engine.connector.stats()["slots_used"]
    engine.close()
    assert saved > PAIRS * sum(n for n, *_ in LOADS.values()), "kvpipe saved what it was measured with"
    out = first
    for load, (requests, prompt, answer, least) in LOADS.items():
        plain, piped = seconds[load, False], seconds[load, True]
        ratio = median(a / b for a, b in zip(plain, piped, strict=True))
        tokens = requests * (prompt + answer)
        beside = f"{tokens / median(piped):.0f} of {tokens / median(plain):.0f} tokens/s without a connector"
        out.append(Figure(f"throughput, no reuse, {load}", ratio, least, "of plain", beside, at_least=True))
    return out
