"""Measures the decode throughput of the smallest model, whose steps take a few ms, with and without kvpipe.

The forward has a core of its own, and kvpipe's threads share the other cores. Runs with and without the connector
alternate in one engine.
"""

from __future__ import annotations

import contextlib
import time
from statistics import median
from typing import Any, Final

from benchmarks.fresh import without_connector
from benchmarks.report import Figure
from benchmarks.warm import bind_cores
from benchmarks.warm import prompt as make_prompt
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model

PAIRS: Final = 12
RUNNING, PROMPT_TOKENS, ANSWER_TOKENS = 64, 24, 96
LEAST: Final = 0.97


def run() -> list[Figure]:
    """Return the median ratio of a run with the connector to the next run without it, with the default settings."""
    bind_cores()
    return [measure()]


def measure(**kvpipe: Any) -> Figure:
    """Measure with the settings `kvpipe`."""
    config = {"pool_bytes_max": "1GiB"} | kvpipe
    engine = Engine(str(make_model("soak")), kvpipe=config, num_gpu_blocks_override=600, enable_prefix_caching=False)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(-1, PAIRS):  # the first pair warms up
        for on in (False, True) if pair % 2 else (True, False):
            prompts = [make_prompt(PROMPT_TOKENS, (2 * pair + on) * RUNNING + number) for number in range(RUNNING)]
            with contextlib.nullcontext() if on else without_connector(engine):
                began = time.perf_counter()
                engine.generate(prompts, ANSWER_TOKENS)
                if pair >= 0:
                    seconds[on].append(time.perf_counter() - began)
    saved = engine.connector.stats()["slots_used"]
    engine.close()
    assert saved, "kvpipe saved what it was measured with"
    ratio = median(plain / piped for plain, piped in zip(seconds[False], seconds[True], strict=True))
    step_ms = 1e3 * median(seconds[False]) / ANSWER_TOKENS
    title = f"decode throughput of the smallest model, {RUNNING} running"
    return Figure(title, ratio, LEAST, "of plain", f"a step takes {step_ms:.1f} ms without kvpipe", at_least=True)
