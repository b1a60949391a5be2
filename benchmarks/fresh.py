"""On a real engine: the first minutes. A new engine and pool, no warm-up, beside that engine without a connector."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer import kv_transfer_state

from benchmarks.report import Figure
from benchmarks.warm import WARM_ENGINE
from benchmarks.warm import prompt as make_prompt
from kvpipe.connectors.vllm.trial.engine import Engine
from kvpipe.testing.models import make_model
from kvpipe.worker.side import WorkerSide

ENGINES = 3
USERS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 2048, 2
POOL = "4GiB"
LEAST = 0.97


class First(NamedTuple):
    """One new engine: seconds of the users' cold prompts, without and with kvpipe, and what became of them."""

    plain_s: float
    piped_s: float
    ready: int
    slots: int
    found_tokens: int


@contextlib.contextmanager
def without_connector(engine: Engine) -> Iterator[None]:
    """Take the connector out of the idle engine, on both sides, as if it had been started without one."""
    connector, group = engine.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
    engine.scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        engine.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = connector, group


def first_minutes(seed: int, **kvpipe: Any) -> First:
    """Start an engine and let the users come at once; then others, to the engine without its connector."""
    options = WARM_ENGINE | {"enable_prefix_caching": False}
    engine = Engine(str(make_model("big-kv")), kvpipe={"pool_bytes_max": POOL} | kvpipe, **options)

    def users(turn: int) -> list[list[int]]:
        return [make_prompt(PROMPT_TOKENS, 1000 * seed + 100 * turn + user) for user in range(USERS)]

    def seconds(turn: int) -> float:
        begin = time.perf_counter()
        engine.generate(users(turn), ANSWER_TOKENS)
        return time.perf_counter() - begin

    with without_connector(engine):  # what is slow at first in vLLM itself is not measured
        engine.generate([make_prompt(PROMPT_TOKENS, 1)], ANSWER_TOKENS)
    piped_s = seconds(0)
    engine.settle()
    worker = engine.worker_connector.worker
    assert isinstance(worker, WorkerSide)
    ready, slots = worker.ready, worker.geometry.slots
    worker._readier.stop()
    with without_connector(engine):
        plain_s = median(seconds(turn) for turn in (1, 2))
    before = engine.connector.stats().get("tokens_loaded", 0)
    for one in users(0):
        engine.generate([one], 1)
    found = engine.connector.stats().get("tokens_loaded", 0) - before
    engine.close()  # frees its memory too
    return First(plain_s, piped_s, ready, slots, found)


def run() -> list[Figure]:
    """The median of the ratios of new engines."""
    seen = [first_minutes(seed) for seed in range(ENGINES)]
    ratio = median(one.plain_s / one.piped_s for one in seen)
    tokens, mid = USERS * (PROMPT_TOKENS + ANSWER_TOKENS), sorted(seen, key=lambda one: one.plain_s / one.piped_s)[1]
    beside = (
        f"{tokens / mid.piped_s:.0f} of {tokens / mid.plain_s:.0f} tokens/s without a connector; then {mid.ready} of "
        f"{mid.slots} chunks ready, {mid.found_tokens} of {USERS * PROMPT_TOKENS} tokens found again"
    )
    return [Figure(f"throughput, new engine and pool, {USERS} users", ratio, LEAST, "of plain", beside, at_least=True)]
