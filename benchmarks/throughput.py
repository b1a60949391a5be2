"""On a real engine: throughput when nothing is reused, beside an engine without kvpipe."""

from __future__ import annotations

import time
from statistics import median

from benchmarks.report import Figure
from benchmarks.warm import bind_cores
from benchmarks.warm import prompt as make_prompt
from kvpipe.testing.engine import Engine
from kvpipe.testing.models import make_model

ROUNDS, REPEATS_PER_ROUND = 4, 3
LOADS = {
    # name: (requests, prompt tokens, answer tokens, how much of the throughput must be left)
    "decode-heavy": (16, 32, 32, 0.99),
    "prefill-heavy": (4, 250, 2, 0.96),
}


def run() -> list[Figure]:
    """Wall clock, and the CPU time of the engine's own thread: the steadier of the two on a shared machine."""
    bind_cores()
    model = str(make_model("serving"))
    seconds: dict[tuple[str, bool], list[float]] = {(load, on): [] for load in LOADS for on in (False, True)}
    thread_s: dict[tuple[str, bool], list[float]] = {(load, on): [] for load in LOADS for on in (False, True)}
    seed = 0
    for on in (False, True) * ROUNDS:  # interleaved, so that a drifting machine shows in both
        engine = Engine(model, kvpipe={"pool_bytes_max": "2GiB"} if on else None, num_gpu_blocks_override=600)
        for load, (requests, prompt, answer, _) in LOADS.items():
            for repeat in range(REPEATS_PER_ROUND + 1):
                prompts = [make_prompt(prompt, seed + i) for i in range(requests)]
                seed += requests
                begin, cpu = time.perf_counter(), time.thread_time()
                engine.generate(prompts, answer)
                if repeat:  # the first warms up
                    seconds[load, on].append(time.perf_counter() - begin)
                    thread_s[load, on].append(time.thread_time() - cpu)
        engine.close()
    out = []
    for load, (requests, prompt, answer, least) in LOADS.items():
        plain, piped = median(seconds[load, False]), median(seconds[load, True])
        tokens = requests * (prompt + answer)
        beside = f"{tokens / piped:.0f} of {tokens / plain:.0f} tokens/s without kvpipe"
        out.append(Figure(f"throughput, no reuse, {load}", plain / piped, least, "of plain", beside, at_least=True))
        plain, piped = median(thread_s[load, False]), median(thread_s[load, True])
        beside = f"{piped:.2f} s with, {plain:.2f} s without kvpipe"
        out.append(Figure(f"engine thread's CPU time, {load}", plain / piped, least, "of plain", beside, at_least=True))
    return out
