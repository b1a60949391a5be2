"""On a real engine: conversations from an engine's first second, each kind of engine in a process of its own.

Eight users have four turns each. Memory for all of them is in kvpipe's pool, and for three of them in vLLM's cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

from benchmarks.report import Figure
from benchmarks.warm import prompt as make_prompt
from kvpipe.connectors.vllm.trial.engine import Engine
from kvpipe.testing.models import make_model

ROUNDS = 3
USERS, TURNS, PROMPT_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 8, 4, 2100, 60, 16
BLOCK, USERS_ON_DEVICE = 32, 3
POOL = "4GiB"
TOKENS_MAX = PROMPT_TOKENS + TURNS * (TURN_TOKENS + ANSWER_TOKENS)
KINDS: dict[str, dict[str, Any]] = {
    "ahead": {"kvpipe": {"pool_bytes_max": POOL}},
    "start": {"kvpipe": {"pool_bytes_max": POOL, "prefault": "start"}},
    "plain": {},
    "own": {"users": USERS},
}
"""`own`: vLLM's own cache has room for all users."""
HITS_LEAST, SECONDS_MOST, COLD_LEAST = 0.98, 1.05, 0.97


def measure(kind: str, seed: int) -> dict[str, float]:
    """Return the seconds of a new engine's first turns and of all turns, and the share of tokens it had to hand."""
    users = KINDS[kind].get("users", USERS_ON_DEVICE)
    engine = Engine(
        str(make_model("big-kv")),
        kvpipe=KINDS[kind].get("kvpipe"),
        enable_prefix_caching=True,
        block_size=BLOCK,
        max_model_len=TOKENS_MAX + BLOCK,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=users * (TOKENS_MAX // BLOCK + 2) + 1,  # vLLM keeps one for itself
    )
    computed, schedule = 0, engine.scheduler.schedule

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal computed
        step = schedule(*args, **named)
        computed += step.total_num_scheduled_tokens
        return step

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    talks = [make_prompt(PROMPT_TOKENS, 1000 * seed + user) for user in range(USERS)]
    asked, first, begin = 0, 0.0, time.perf_counter()
    for turn in range(TURNS):
        answers = engine.generate(talks, ANSWER_TOKENS)
        first = first or time.perf_counter() - begin
        asked += sum(map(len, talks)) + USERS * (ANSWER_TOKENS - 1)
        talks = [
            talk + answer + make_prompt(TURN_TOKENS, 1000 * seed + 100 * turn + user + 50)
            for user, (talk, answer) in enumerate(zip(talks, answers, strict=True))
        ]
    took = time.perf_counter() - begin
    stats = engine.connector.stats() if KINDS[kind].get("kvpipe") else {}
    evicted = stats.get("evicted", 0)
    engine.close()
    return {"first": first, "seconds": took, "hits": 1 - computed / asked, "evicted": evicted}


def run() -> list[Figure]:
    """The medians of several new engines of each kind, one after the other."""
    seen: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for seed in range(ROUNDS):
        for kind in KINDS if seed % 2 == 0 else reversed(KINDS):
            command = [sys.executable, "-m", "benchmarks.turns", kind, str(seed)]
            ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
            seen[kind].append(json.loads(ran.stdout.splitlines()[-1]))
    seconds = {kind: median(one["seconds"] for one in runs) for kind, runs in seen.items()}
    cold = median(a["first"] / b["first"] for a, b in zip(seen["plain"], seen["ahead"], strict=True))
    hits = {kind: median(one["hits"] for one in runs) for kind, runs in seen.items()}
    evicted = int(max(one["evicted"] for one in seen["ahead"]))
    name = f"{USERS} users, {TURNS} turns, new engine and pool"
    beside = (
        f"{seconds['ahead']:.1f} s; {seconds['start']:.1f} s with the pool in memory before; {seconds['plain']:.1f} s "
        f"without a connector; {seconds['own']:.1f} s with all of it in vLLM's own cache"
    )
    shares = (
        f"{hits['ahead']:.3f} of the tokens, {evicted} chunks evicted; {hits['start']:.3f} with the pool in memory "
        f"before; {hits['plain']:.3f} without a connector; {hits['own']:.3f} with all of it in vLLM's own cache"
    )
    return [
        Figure(f"{name}: hits", hits["ahead"] / hits["start"], HITS_LEAST, "of start", shares, at_least=True),
        Figure(f"{name}: throughput of the first turns", cold, COLD_LEAST, "of plain", at_least=True),
        Figure(f"{name}: time", seconds["ahead"] / seconds["start"], SECONDS_MOST, "of start", beside),
    ]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
