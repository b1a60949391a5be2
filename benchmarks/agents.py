"""On a real engine: how many coding agents it serves before their first tokens come late.

Sessions of the recorded trace, `SCALE` times shorter. Their pauses are shorter by what this machine takes to compute a
prompt, against what the trace's took on four H100 (`benchmarks/replay/model.py`): computing, pausing and the room for
KV keep their proportions. Users are added until the 95th percentile of the time to the first token passes a limit.

Of kvpipe there are two: with a pool alone, and with a disk behind it. Everything is measured with two sizes of the
device (`ROOMS`). `python -m benchmarks.agents ENGINE=USERS,USERS …` tries these numbers of users with these engines.

Time is this process's, but for the time in which nobody waits for anything, which is skipped.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "8")

from benchmarks import agents_picture
from benchmarks.replay.model import Model
from benchmarks.replay.workload import lines
from benchmarks.report import Figure, show
from benchmarks.warm import bind_cores, prompt, ttft
from kvpipe.connectors.vllm.trial.engine import Engine
from kvpipe.testing.models import VOCAB, make_model

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results" / "agents.json"
SCALE: Final = 32
TOKENS_MAX: Final = 131_072 // SCALE
BLOCK: Final = 32
ROOMS: Final = {"": Model().device_tokens // SCALE, ", large device": 2_000_000 // SCALE}
"""Tokens that the device holds: 105 GB of the model's KV, or the 262 GB that four H100 have for it beside 16 GB of
weights where vLLM takes 0.9 of their memory, less a tenth of a GPU's for activations each. Of typical prompts that is
room for 7, and for 18."""
POOL_TOKENS: Final = 8 * ROOMS[""]
"""What kvpipe has: 840 GB of a node's memory."""
ALL_TOKENS: Final = 24 * ROOMS[""]
"""More than any run needs. Far more would be slower: what was never written is not in memory yet."""
TYPICAL: Final = 110_000
TTFT_S_MAX: Final = 5.0
"""Of the trace's own time: a typical prompt, of so many tokens, is computed in 3.1."""
USERS_FIRST, MANY, USERS_MAX = 4, 64, 1024
FINER: Final = 10
"""Numbers of users are tried until this share, one tenth, is between what is in time and what is late."""
APART = 2
"""Users begin so many times a typical prompt's computing apart: nothing of their sessions is held yet."""
SETTLED, MEASURED, MEASURED_S = 8, 1200, 120
"""Requests per user that are not counted, from when each user's first one is over; requests that are counted then, and
how long that may take. Nor is counted what waits for the cold beginning: until no request waits to be admitted, or,
where that never comes, as many requests again."""


class Turn(NamedTuple):
    """One request of a session: `pause_s` after the one before came; `shared` tokens of turn `parent` begin it."""

    pause_s: float
    tokens: int
    answer: int
    parent: int
    shared: int


def sessions(seed: int, faster: float) -> Iterator[list[Turn]]:
    """Yield the trace's sessions, in random order, over and over. `faster`: what pauses are divided by."""
    draw, known = random.Random(seed), [one["requests"] for one in lines("coding-agent")]
    while True:
        for requests in draw.sample(known, len(known)):
            before_ms, turns = requests[0][0], list[Turn]()
            for at_ms, tokens, answer, parent, blocks, _ in requests:
                shared = blocks * 64 // SCALE
                pause_s = (at_ms - before_ms) / 1000 / faster
                turns.append(Turn(pause_s, max(1, tokens // SCALE), max(1, answer // SCALE), parent, shared))
                before_ms = at_ms
            yield turns


class User:
    """Goes through sessions, from somewhere in the first one on."""

    def __init__(self, number: int, faster: float) -> None:
        """`number` is its seed: every engine gets the same users."""
        self._draw, self._sessions = random.Random(number), sessions(number, faster)
        self._begin()
        self._at = self._draw.randrange(len(self._turns))

    def _begin(self) -> None:
        self._turns, self._at = next(self._sessions), 0
        self._prompts: dict[int, list[int]] = {}

    def next(self) -> tuple[Turn, list[int]]:
        """Return the next request, and its prompt: tokens of an earlier one, and new ones."""
        while self._at == len(self._turns) or self._turns[self._at].tokens > TOKENS_MAX:
            self._at += 1
            if self._at >= len(self._turns):
                self._begin()
        turn = self._turns[self._at]
        return turn, self._prompt(self._at)

    def done(self) -> None:
        """The request is over."""
        self._at += 1

    def _prompt(self, at: int) -> list[int]:
        if at not in self._prompts:
            turn = self._turns[at]
            tokens = self._prompt(turn.parent)[: turn.shared] if turn.parent >= 0 else []
            tokens = tokens[: turn.tokens]
            tokens += [self._draw.randrange(3, VOCAB) for _ in range(turn.tokens - len(tokens))]
            self._prompts[at] = tokens
        return self._prompts[at]


class Clock:
    """This process's clock, with what is skipped."""

    def __init__(self) -> None:
        """At 0."""
        self._skipped_s = -time.perf_counter()

    def now_s(self) -> float:
        """Return the time."""
        return time.perf_counter() + self._skipped_s

    def skip_to(self, at_s: float) -> None:
        """Let nobody wait until `at_s`."""
        self._skipped_s += max(0.0, at_s - self.now_s())


class Tried(NamedTuple):
    """What so many users got: requests per second, and at the median and the 95th percentile the first token."""

    users: int
    per_s: float
    ttft_s: float
    late_s: float


class Found(NamedTuple):
    """What was tried in each engine, and the limit on `late_s`."""

    limit_s: float
    tried: dict[str, list[Tried]]

    def most(self, name: str) -> Tried:
        """Return what the most users got of whom few were late."""
        in_time = [one for one in self.tried[name] if one.late_s <= self.limit_s]
        return max(in_time, default=Tried(0, 0.0, 0.0, 0.0))


@dataclass
class Served:
    """What users got."""

    ttft_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def late_s(self) -> float:
        """The 95th percentile of the time to the first token."""
        return quantiles(self.ttft_s, n=20)[-1]

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return len(self.ttft_s) / self.seconds


def serve(engine: Engine, users: int, faster: float) -> Served:
    """Serve users, who come one after the other, until enough is counted."""
    clock, served = Clock(), Served()
    all_users = [User(number, faster) for number in range(users)]
    due = [(number * APART * Model().prefill_s(0, TYPICAL) / faster, number) for number in range(users)]
    came_s: dict[str, tuple[float, int]] = {}
    begun_s, end_s, waited_for, over = 0.0, float("inf"), set(range(users)), 0
    while len(served.ttft_s) < MEASURED and time.perf_counter() < end_s:
        waits = engine.scheduler.get_request_counts()[1] > 0
        if not begun_s and over >= SETTLED * users * (1 + waits):
            begun_s, end_s = clock.now_s(), time.perf_counter() + MEASURED_S
        while due and due[0][0] <= clock.now_s():
            at_s, number = heapq.heappop(due)
            turn, tokens = all_users[number].next()
            came_s[engine.add(tokens, turn.answer)] = at_s, number
        if not engine.busy:
            clock.skip_to(due[0][0])
            continue
        for output in engine.step():
            at_s, number = came_s.pop(output.request_id)
            now_s, user = clock.now_s(), all_users[number]
            if begun_s:
                served.ttft_s.append(now_s - at_s - _decoding_s(output))
            over += not waited_for
            waited_for.discard(number)
            user.done()
            heapq.heappush(due, (max(now_s, at_s + user.next()[0].pause_s), number))
    served.seconds = clock.now_s() - begun_s
    for request_id in came_s:
        engine.abort(request_id)
    engine.drain()
    return served


def _decoding_s(output: Any) -> float:
    """Return how long ago its first token came."""
    times = output.metrics
    return float(times.last_token_ts - times.first_token_ts)


def _engine(tokens: int, *, own: bool, kvpipe: dict[str, str] | None) -> Engine:
    engine = Engine(
        str(make_model("agents")), kvpipe=kvpipe, enable_prefix_caching=own, block_size=BLOCK, disable_log_stats=False,
        max_model_len=TOKENS_MAX + 4096, max_num_batched_tokens=1024, num_gpu_blocks_override=tokens // BLOCK,
    )  # fmt: skip
    engine.generate([prompt(64, 1)], 2)
    return engine


TOKEN_BYTES: Final = 4096
"""Of KV: K and V of 4 layers, of 2 heads of 64 elements of 4 bytes each."""
POOL: Final = {"pool_bytes_max": str(POOL_TOKENS * TOKEN_BYTES)}
VLLM, OURS, DISK, ALL = "vLLM's prefix cache", "kvpipe", "kvpipe with a disk", "a cache that holds all"
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "no cache": {"own": False, "kvpipe": None},
    VLLM: {"own": True, "kvpipe": None},
    OURS: {"own": True, "kvpipe": POOL},
    DISK: {"own": True, "kvpipe": POOL},
}
ENGINES: Final[dict[str, dict[str, Any]]] = {
    name + room: {"tokens": tokens, **kind} for room, tokens in ROOMS.items() for name, kind in _KINDS.items()
} | {ALL: {"tokens": ALL_TOKENS, "own": True, "kvpipe": None}}


def main(arguments: Sequence[str] = ()) -> int:
    """Measure engines; print the table, write `docs/results/agents.json`, and a picture of it. `arguments`: `--help`.

    Raises:
        SystemExit: an argument is no engine, or its users are no numbers; standard error says which.

    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "engines", nargs="*", metavar="ENGINE[=USERS,…]",
        help=f"measure only these, and with so many users: {'; '.join(ENGINES)}",
    )  # fmt: skip
    chosen = dict[str, list[int]]()
    for one in parser.parse_args(arguments).engines:
        name, given, users = one.partition("=")
        if name not in ENGINES:
            parser.error(f"{name!r}: no such engine; there are {'; '.join(ENGINES)}")
        if given and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", users, re.ASCII):
            parser.error(f"{one!r}: users are whole numbers from 1 on, with commas between them")
        chosen[name] = [int(some) for some in users.split(",")] if given else []
    found = run(chosen)
    figures = [
        _figure(name + room, beside, least, found)
        for room in ROOMS
        for name in (OURS, DISK)
        for other, least in _GOALS.items()
        for beside in [other + room * (other != ALL)]
        if {name + room, beside} <= found.tried.keys()
    ]
    shown = {name: [one._asdict() for one in tried] for name, tried in found.tried.items()}
    show("agents benchmarks", figures, RESULTS, limit_s=found.limit_s, tried=shown)
    agents_picture.write(json.loads(RESULTS.read_text(encoding="utf-8")), RESULTS)
    return 0


def run(chosen: Mapping[str, Sequence[int]]) -> Found:
    """Return how late first tokens came in each engine, for numbers of users around the most that are in time.

    `chosen`: those of `ENGINES` that are to be measured, none: all; with these numbers, none: they are searched.
    """
    bind_cores()
    engine = _engine(**ENGINES["no cache"])
    took_s = median(ttft(engine, prompt(TYPICAL // SCALE, seed)) for seed in range(3))
    engine.close()
    faster = Model().prefill_s(0, TYPICAL) / took_s
    limit_s, first = TTFT_S_MAX / faster, USERS_FIRST
    print(f"a typical prompt takes {took_s:.3f} s: the limit is {limit_s:.3f} s", flush=True)
    tried = dict[str, list[Tried]]()
    for name in chosen or ENGINES:
        search = Search(limit_s, first, list(chosen.get(name, ())))
        with TemporaryDirectory(prefix="kvpipe-agents-") as folder:
            disk = {"kvpipe": POOL | {"tiers": folder}} if name.startswith(DISK) else {}
            _try(name, ENGINES[name] | disk, faster, search)
        tried[name] = search.tried
        first = max((one.users for one in search.tried if one.late_s <= limit_s), default=first)
    return Found(limit_s, tried)


@dataclass
class Search:
    """Which numbers of users to try: `first`, more until some are late, then numbers between; or those `given`."""

    limit_s: float
    first: int
    given: list[int]
    tried: list[Tried] = field(default_factory=list)

    def next(self) -> int:
        """Return how many users are to be tried, or 0: it is over."""
        if self.given:
            return self.given[len(self.tried)] if len(self.tried) < len(self.given) else 0
        low = max((one.users for one in self.tried if one.late_s <= self.limit_s), default=0)
        high = min((one.users for one in self.tried if one.late_s > self.limit_s), default=0)
        if not high:
            more = min(USERS_MAX, (2 * low if low < MANY else low * 5 // 4) or self.first)
            return more if more > low else 0
        return (low + high) // 2 if high - low > max(1, low // FINER) else 0


def _try(name: str, options: dict[str, Any], faster: float, search: Search) -> None:
    """Let an engine serve the numbers of users that are searched for."""
    engine = _engine(**options)
    while users := search.next():
        engine.llm.reset_prefix_cache(reset_connector=bool(options["kvpipe"]))
        served = serve(engine, users, faster)
        print(f"{name}, {users} users: {served.per_s:.2f} requests/s, {served.late_s:.3f} s", flush=True)
        search.tried.append(Tried(users, served.per_s, median(served.ttft_s), served.late_s))
    engine.close()


_GOALS: Final = {"no cache": 2.0, VLLM: 2.0, ALL: 0.9}


def _figure(name: str, other: str, least: float, found: Found) -> Figure:
    rows, best = [], [found.most(one) for one in (name, other)]
    for one, most in zip((name, other), best, strict=True):
        rows.append(f"{one}: {most.users} users" + (f", {most.per_s:.2f}/s, {most.late_s:.1f} s" if most.users else ""))
    ratio = best[0].per_s / best[1].per_s if best[1].users else float("inf")
    return Figure(
        f"coding agents, requests/s in time, {name} / {other}", ratio, least, "x", "; ".join(rows), at_least=True
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
