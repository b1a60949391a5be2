"""On a real engine: throughput when nothing is reused, beside the same engine with its connector taken out."""

from __future__ import annotations

import contextlib
import time
from statistics import median

from benchmarks import fresh
from benchmarks.fresh import without_connector
from benchmarks.report import Figure
from benchmarks.warm import bind_cores
from benchmarks.warm import prompt as make_prompt
from kvpipe.connectors.vllm.trial.engine import Engine
from kvpipe.testing.models import make_model

PAIRS = 30
LOADS = {
    # name: (requests, prompt tokens, answer tokens, how much of the throughput must be left)
    "decode-heavy": (16, 32, 32, 0.99),
    "prefill-heavy": (4, 250, 2, 0.96),
}


def run() -> list[Figure]:
    """Median of the ratios of neighbouring runs in one engine: equal engines differ by more than the limit."""
    bind_cores()
    first = fresh.run()  # in a process that has touched little memory yet
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
