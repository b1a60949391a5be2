"""Measures a hybrid model's hits when many requests wait for few blocks, and the steps of one asynchronous load."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from benchmarks.report import Figure
from benchmarks.warm import bind_cores, prompt
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.scheduler.gauges import totals

USERS, ANSWER_TOKENS = 48, 60
CROWDED: dict[str, Any] = {"num_gpu_blocks_override": 120, "max_num_batched_tokens": 512, "max_num_seqs": 64}
HITS, HIT_TOKENS = 8, 4096
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 1200, "max_model_len": 8256, "max_num_batched_tokens": 8256}


def run() -> list[Figure]:
    """Return the figures of both measurements, each on its own engine.

    The model has a sliding window and full attention, so every load is asynchronous.
    """
    bind_cores()
    return [*_crowd(), *_alone()]


def _engine(**options: Any) -> Engine:
    engine = Engine(
        str(make_model("gemma2-hybrid")), kvpipe={"pool_bytes_max": "1GiB"}, enable_prefix_caching=False, **options
    )
    engine.generate([prompt(64, 1)], 2)
    return engine


def _crowd() -> list[Figure]:
    """Send the documents of all users at once, twice. The second time all documents hit, but blocks are few."""
    engine, draw = _engine(**CROWDED), random.Random(1)
    documents = [prompt(draw.randrange(200, 900), 100 + user) for user in range(USERS)]
    steps = []
    for turn in range(2):
        engine.settle()
        before = engine.connector.stats()
        for user, document in enumerate(documents):
            engine.add(document + prompt(20, 1000 * (turn + 1) + user), ANSWER_TOKENS)
        steps.append(0)
        while engine.busy:
            engine.step()
            steps[-1] += 1
    now, why = engine.connector.stats(), totals(engine.connector.scheduler)["misses"]  # type: ignore[arg-type]
    gained = {name: now.get(name, 0) - before.get(name, 0) for name in now}
    engine.close()
    put_off = (
        f"{gained['lookup_later']} put off, {gained['tokens_loaded']} tokens loaded, {gained['preempted']} preempted"
    )
    return [
        Figure(
            "lookups that gave a hit up, crowded",
            gained.get("lookup_gave_up", 0),
            0,
            "lookups",
            f"81 if steps count in which nobody asks; {put_off}",
        ),
        Figure("prompts computed for lack of room", why.get("no_room", 0), 0, f"of {USERS}"),
        Figure("steps, all hits / all cold", steps[1] / steps[0], 1, "x", f"{steps[1]} / {steps[0]} steps"),
    ]


def _alone() -> list[Figure]:
    """Serve one user at a time, so that no request runs while a hit is loaded, and count empty steps.

    The users are served twice: with idle steps that return at once, and with idle steps that wait for the load.
    """
    engine = _engine(**ROOMY)
    side, step_of, empty = engine.connector.scheduler, engine.scheduler.schedule, [0]
    assert side is not None

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = step_of(*args, **kwargs)
        empty[0] += not output.num_scheduled_tokens
        return output

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    documents = [prompt(HIT_TOKENS, 2000 + user) for user in range(HITS)]
    engine.generate(documents, 1)
    waits, counts = side._idle, dict[str, list[int]]()
    for name, side._idle in (("spinning", None), ("waiting", waits)):
        counts[name] = []
        for user, document in enumerate(documents):
            engine.settle()
            empty[0] = 0
            engine.generate([document + prompt(20, 3000 + user)], 1)
            counts[name].append(empty[0])
    engine.close()
    beside = f"{median(counts['spinning']):.3g} if they do not wait, of {HIT_TOKENS} tokens"
    return [Figure("empty steps per lone asynchronous hit", median(counts["waiting"]), 3, "steps", beside)]
