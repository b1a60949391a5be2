"""Compares the first minutes of a real engine, with a new pool and no warm-up, to the engine without a connector."""

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
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.worker.side import WorkerSide

ENGINES = 3
USERS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 2048, 2
POOL = "4GiB"
LEAST = 0.97


class First(NamedTuple):
    """The result of one new engine: the seconds of the users' cold prompts without and with kvpipe.

    `ready` of the pool's `slots` slots were ready after the prompts. `found_tokens` is the number of tokens that hit
    when the prompts were repeated.
    """

    plain_s: float
    piped_s: float
    ready: int
    slots: int
    found_tokens: int


@contextlib.contextmanager
def without_connector(engine: Engine) -> Iterator[None]:
    """Remove the connector from scheduler and worker of the idle engine, as if the engine never had a connector."""
    connector, group = engine.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
    engine.scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        engine.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = connector, group


def first_minutes(seed: int, **kvpipe: Any) -> First:
    """Start an engine, and measure the prompts of all users at once. Then measure other prompts without connector."""
    options = WARM_ENGINE | {"enable_prefix_caching": False}
    engine = Engine(str(make_model("big-kv")), kvpipe={"pool_bytes_max": POOL} | kvpipe, **options)

    def users(turn: int) -> list[list[int]]:
        return [make_prompt(PROMPT_TOKENS, 1000 * seed + 100 * turn + user) for user in range(USERS)]

    def seconds(turn: int) -> float:
        begin = time.perf_counter()
        engine.generate(users(turn), ANSWER_TOKENS)
        return time.perf_counter() - begin

    with without_connector(engine):  # runs vLLM's slow first steps, which are not measured
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
    engine.close()  # also frees the engine's memory
    return First(plain_s, piped_s, ready, slots, found)


def run() -> list[Figure]:
    """Return the median, over `ENGINES` new engines, of the ratio of times without and with kvpipe."""
    seen = [first_minutes(seed) for seed in range(ENGINES)]
    ratio = median(one.plain_s / one.piped_s for one in seen)
    tokens, mid = USERS * (PROMPT_TOKENS + ANSWER_TOKENS), sorted(seen, key=lambda one: one.plain_s / one.piped_s)[1]
    beside = (
        f"{tokens / mid.piped_s:.0f} of {tokens / mid.plain_s:.0f} tokens/s without a connector; then {mid.ready} of "
        f"{mid.slots} chunks ready, {mid.found_tokens} of {USERS * PROMPT_TOKENS} tokens found again"
    )
    return [Figure(f"throughput, new engine and pool, {USERS} users", ratio, LEAST, "of plain", beside, at_least=True)]
