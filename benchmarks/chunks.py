"""Compares chunk sizes by time to first token and size of the catalog, for prompts that share prefixes."""

from __future__ import annotations

import random
from statistics import mean
from typing import Any

from benchmarks.report import Figure
from benchmarks.warm import bind_cores, prompt, ttft
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model

SIZES = (32, 64, 128, 256, 512, 1024)
ENGINE: dict[str, Any] = {
    "max_model_len": 2304, "max_num_batched_tokens": 2304, "num_gpu_blocks_override": 200,
    "enable_prefix_caching": False,
}  # fmt: skip


def run() -> list[Figure]:
    """Return the mean warm time to first token of three documents, for each chunk size.

    The notes also give the mean time of prompts that diverge from a document at a random token.
    """
    bind_cores()
    model = str(make_model("big-kv"))
    rng = random.Random(5)
    documents = [prompt(2048, 70 + i) for i in range(3)]
    branches = [d[: rng.randrange(200, 2040)] + prompt(64, 80 + i) for i in range(4) for d in documents]
    out, best = [], 0.0
    for size in SIZES:
        engine = Engine(model, kvpipe={"pool_bytes_max": "3GiB", "chunk_tokens": size}, **ENGINE)
        engine.generate([prompt(64, 1)], 2)
        cold = mean(ttft(engine, d) for d in documents)
        again = mean(ttft(engine, d) for d in documents for _ in range(3))
        diverging = mean(ttft(engine, b) for b in branches)
        stats = engine.connector.stats()
        engine.close()
        best = best or again
        beside = f"cold {cold * 1e3:.0f} ms, diverging {diverging * 1e3:.0f} ms, {stats['slots_used']} slots"
        out.append(Figure(f"warm first token, chunks of {size}", again * 1e3, 1.3 * best * 1e3, "ms", beside))
    return out
