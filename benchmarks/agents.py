"""Measures how many coding agents a real engine can serve at once before first tokens come late.

The agents run the sessions of the recorded trace, with prompts that are `SCALE` times shorter. This machine computes
such a prompt faster than the cost model's four H100 (`benchmarks/replay/model.py`) compute the original prompt. Pauses
are divided by the same speed-up. So the ratios between computing times, pauses and the room for KV stay as on the cost
model's machine. Users are added until the 95th percentile of the time to the first token exceeds a limit.

kvpipe is measured twice: with a pool alone, and with a disk as a tier below the pool. All engines are measured with two
sizes of the device (`ROOMS`). `python -m benchmarks.agents ENGINE=USERS,USERS …` tries the given numbers of users with
the given engines.

Times are measured with this process's clock. The benchmark skips the time in which no request is in the engine.
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
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import VOCAB, make_model

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results" / "agents.json"
SCALE: Final = 32
TOKENS_MAX: Final = 131_072 // SCALE
BLOCK: Final = 32
ROOMS: Final = {"": Model().device_tokens // SCALE, ", large device": 2_000_000 // SCALE}
"""The numbers of tokens that the device holds, by the suffix of an engine's name. The first number is 105 GB of the
model's KV, room for 7 typical prompts. The second is 262 GB, room for 18. The 262 GB are 0.9 of the memory of four
H100, less 16 GB of weights, and less a tenth of each GPU's memory for activations."""
POOL_TOKENS: Final = 8 * ROOMS[""]
"""The size of kvpipe's pool in tokens, which corresponds to 840 GB of a node's memory."""
ALL_TOKENS: Final = 24 * ROOMS[""]
"""The size in tokens of a cache that holds all KV of a run.

A much larger cache would be slower, because the first write to each page of memory is slow.
"""
TYPICAL: Final = 110_000
TTFT_S_MAX: Final = 5.0
"""The limit on the time to the first token, in seconds of the trace's own time. A typical prompt of `TYPICAL` tokens
takes 3.1 s of the trace's time to compute."""
USERS_FIRST, MANY, USERS_MAX = 4, 64, 1024
FINER: Final = 10
"""The search ends when the largest number of users in time and the smallest late number differ by at most a tenth."""
APART = 2
"""The time between the starts of two users, in multiples of the time that a typical prompt takes to compute. Users
start apart, because no KV of their sessions is cached yet."""
SETTLED, MEASURED, MEASURED_S = 8, 1200, 120
"""After the first request of each user has ended, `SETTLED` requests per user are not counted.

If some requests have then not been admitted yet, up to `SETTLED` more requests per user are not counted. `MEASURED`
requests are counted, in
at most `MEASURED_S` seconds."""


class Turn(NamedTuple):
    """One request of a session. The request arrives `pause_s` seconds after the arrival of the previous request.

    The prompt begins with the first `shared` tokens of the prompt of turn `parent`.
    """

    pause_s: float
    tokens: int
    answer: int
    parent: int
    shared: int


def sessions(seed: int, faster: float) -> Iterator[list[Turn]]:
    """Yield the trace's sessions in random order, without end. Pauses are divided by `faster`."""
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
    """A user who runs one session after another. The first session begins at a random turn."""

    def __init__(self, number: int, faster: float) -> None:
        """`number` is the user's seed, so that every engine serves the same users."""
        self._draw, self._sessions = random.Random(number), sessions(number, faster)
        self._begin()
        self._at = self._draw.randrange(len(self._turns))

    def _begin(self) -> None:
        self._turns, self._at = next(self._sessions), 0
        self._prompts: dict[int, list[int]] = {}

    def next(self) -> tuple[Turn, list[int]]:
        """Return the next request and the request's prompt: first tokens of an earlier prompt, then new tokens."""
        while self._at == len(self._turns) or self._turns[self._at].tokens > TOKENS_MAX:
            self._at += 1
            if self._at >= len(self._turns):
                self._begin()
        turn = self._turns[self._at]
        return turn, self._prompt(self._at)

    def done(self) -> None:
        """Continue with the turn after the finished request."""
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
    """This process's clock, plus the skipped time."""

    def __init__(self) -> None:
        """Start the clock at 0 s."""
        self._skipped_s = -time.perf_counter()

    def now_s(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter() + self._skipped_s

    def skip_to(self, at_s: float) -> None:
        """Skip the time until `at_s`."""
        self._skipped_s += max(0.0, at_s - self.now_s())


class Tried(NamedTuple):
    """The result with `users` users. `per_s` is the number of requests per second.

    `ttft_s` and `late_s` are the median and the 95th percentile of the time to the first token, in seconds.
    """

    users: int
    per_s: float
    ttft_s: float
    late_s: float


class Found(NamedTuple):
    """The results of each engine, and the limit on `late_s`."""

    limit_s: float
    tried: dict[str, list[Tried]]

    def most(self, name: str) -> Tried:
        """Return the result with the most users whose `late_s` is within the limit."""
        in_time = [one for one in self.tried[name] if one.late_s <= self.limit_s]
        return max(in_time, default=Tried(0, 0.0, 0.0, 0.0))


@dataclass
class Served:
    """The times to the first token that were measured, in seconds, in a run of `seconds`."""

    ttft_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def late_s(self) -> float:
        """The 95th percentile of the time to the first token."""
        return quantiles(self.ttft_s, n=20)[-1]

    @property
    def per_s(self) -> float:
        """The number of requests per second."""
        return len(self.ttft_s) / self.seconds


def serve(engine: Engine, users: int, faster: float) -> Served:
    """Serve `users` users, who start one after another, until enough requests are counted."""
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
    """Return the seconds from a request's first token to the last token."""
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
"""Bytes of a token's KV. K and V of each of 4 layers have 2 heads of 64 elements of 4 bytes."""
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
    """Measure engines, print the table, and write `docs/results/agents.json` and its picture.

    `arguments` are the arguments of the command line, which `--help` explains.

    Raises:
        SystemExit: an argument names no engine, or has users that are not numbers. Standard error shows the argument.

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
    """Return each engine's times to the first token, for numbers of users around the largest number that is in time.

    `chosen` has numbers of users by names of `ENGINES`. If `chosen` is empty, all engines are measured. For an engine
    without numbers, the benchmark searches for the largest number.
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
    """The search for the most users in time. If `given` is not empty, exactly these numbers of users are tried.

    Otherwise the search begins with `first` users, adds users until tokens are late, and then halves the interval.
    """

    limit_s: float
    first: int
    given: list[int]
    tried: list[Tried] = field(default_factory=list)

    def next(self) -> int:
        """Return the number of users to try next, or 0 if the search is over."""
        if self.given:
            return self.given[len(self.tried)] if len(self.tried) < len(self.given) else 0
        low = max((one.users for one in self.tried if one.late_s <= self.limit_s), default=0)
        high = min((one.users for one in self.tried if one.late_s > self.limit_s), default=0)
        if not high:
            more = min(USERS_MAX, (2 * low if low < MANY else low * 5 // 4) or self.first)
            return more if more > low else 0
        return (low + high) // 2 if high - low > max(1, low // FINER) else 0


def _try(name: str, options: dict[str, Any], faster: float, search: Search) -> None:
    """Serve the numbers of users that `search` yields on one engine, and add the results to `search`."""
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
