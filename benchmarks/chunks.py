"""Which chunk size is best: time to first token and catalog size for prompts that share prefixes, by chunk size."""

from __future__ import annotations

import os
import random
from statistics import mean
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

import kvpipe.connectors.vllm.worker  # noqa: F401  (notes the cores before this thread is bound to one)
from benchmarks.engine import _prompt, _ttft
from benchmarks.report import Figure
from kvpipe.testing.engine import Engine
from kvpipe.testing.models import make_model

SIZES = (32, 64, 128, 256, 512, 1024)
ENGINE: dict[str, Any] = {
    "max_model_len": 2304, "max_num_batched_tokens": 2304, "num_gpu_blocks_override": 200,
    "enable_prefix_caching": False,
}  # fmt: skip


def run() -> list[Figure]:
    """Mean warm time to first token of prompts that diverge anywhere from four documents, per chunk size."""
    os.sched_setaffinity(0, {0})
    model = str(make_model("big-kv"))
    rng = random.Random(5)
    documents = [_prompt(2048, 70 + i) for i in range(3)]
    branches = [d[: rng.randrange(200, 2040)] + _prompt(64, 80 + i) for i in range(4) for d in documents]
    out, best = [], 0.0
    for size in SIZES:
        engine = Engine(model, kvpipe={"pool_bytes_max": "3GiB", "chunk_tokens": size}, **ENGINE)
        engine.generate([_prompt(64, 1)], 2)
        cold = mean(_ttft(engine, d) for d in documents)
        again = mean(_ttft(engine, d) for d in documents for _ in range(3))
        diverging = mean(_ttft(engine, b) for b in branches)
        stats = engine.connector.stats()
        engine.close()
        best = best or again
        beside = f"cold {cold * 1e3:.0f} ms, diverging {diverging * 1e3:.0f} ms, {stats['slots_used']} slots"
        out.append(Figure(f"warm first token, chunks of {size}", again * 1e3, 1.3 * best * 1e3, "ms", beside))
    return out
