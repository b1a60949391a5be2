"""Measures conversations on a real engine from its first second. Each engine runs in a process of its own.

Eight users have four turns each. kvpipe's pool has room for the KV of all users, and vLLM's cache for three users.
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
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model

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
"""The kinds of engines. In the kind `own`, vLLM's own cache has room for all users."""
HITS_LEAST, SECONDS_MOST, COLD_LEAST = 0.98, 1.05, 0.97


def measure(kind: str, seed: int) -> dict[str, float]:
    """Return a new engine's seconds for the first turns and for all turns, the share of hits, and evictions."""
    users = KINDS[kind].get("users", USERS_ON_DEVICE)
    engine = Engine(
        str(make_model("big-kv")),
        kvpipe=KINDS[kind].get("kvpipe"),
        enable_prefix_caching=True,
        block_size=BLOCK,
        max_model_len=TOKENS_MAX + BLOCK,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=users * (TOKENS_MAX // BLOCK + 2) + 1,  # vLLM reserves one block
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
    """Return the medians of `ROUNDS` new engines of each kind. The engines run one after another."""
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
