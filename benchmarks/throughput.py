"""On a real engine: throughput when nothing is reused, beside the same engine with its connector taken out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from statistics import median

from vllm.distributed.kv_transfer import kv_transfer_state

from benchmarks.report import Figure
from benchmarks.warm import bind_cores
from benchmarks.warm import prompt as make_prompt
from kvpipe.testing.engine import Engine
from kvpipe.testing.models import make_model

PAIRS = 15
LOADS = {
    # name: (requests, prompt tokens, answer tokens, how much of the throughput must be left)
    "decode-heavy": (16, 32, 32, 0.99),
    "prefill-heavy": (4, 250, 2, 0.96),
}


@contextlib.contextmanager
def without_connector(engine: Engine) -> Iterator[None]:
    """Take the connector out of the idle engine, on both sides, as if it had been started without one."""
    connector, group = engine.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
    engine.scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        engine.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = connector, group


def run() -> list[Figure]:
    """Median of the ratios of neighbouring runs in one engine: equal engines differ by more than the limit."""
    bind_cores()
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
    out = []
    for load, (requests, prompt, answer, least) in LOADS.items():
        plain, piped = seconds[load, False], seconds[load, True]
        ratio = median(a / b for a, b in zip(plain, piped, strict=True))
        tokens = requests * (prompt + answer)
        beside = f"{tokens / median(piped):.0f} of {tokens / median(plain):.0f} tokens/s without a connector"
        out.append(Figure(f"throughput, no reuse, {load}", ratio, least, "of plain", beside, at_least=True))
    return out
