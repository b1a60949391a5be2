"""Measures a catalog's cost per chunk with each policy, and the longest call and probes with a million chunks."""

from __future__ import annotations

import gc
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from statistics import median

import numpy as np

from benchmarks.replay import workload as w
from benchmarks.replay.replay import replay
from benchmarks.report import Figure
from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.cache.policy import make_policy
from kvpipe.cache.policy.large import PLAIN_MAX, Shards
from kvpipe.trace.log import Counters

CHUNKS = 1_000_000
SAVED = 1_300_000  # more than `CHUNKS`, so that the last saves evict
PROMPT = 16  # chunks
RUNS = 3
SLOTS = 4800
"""The number of slots of a common pool. The catalog uses plain dicts for this size."""
LONG = 24
"""The number of chunks of a prompt, which is the mean of Mooncake's prompts."""
ROUNDS = 5
TICK_S = 0.001
"""Seconds between two readings of a clock that ticks within a request."""
DECISION_US_MAX = 5.0
"""The most microseconds per chunk that a policy may cost beyond the cost of `lru`."""


def run() -> list[Figure]:
    """Return all figures of `lru` and of `sessions`."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    out = []
    for policy in ("lru", "sessions"):
        taken = np.stack([np.fromiter(_calls(policy), float) for _ in range(RUNS)]) * 1e3
        slow = float(np.quantile(taken[0], 0.99999))
        beside = f"of a run 99.999 % take less than {slow:.2g} ms, all {taken[0].mean() * 1e3:.2g} us"
        # the machine interrupts other calls in each run, so the least time of a call over all runs is the call's own
        out.append(Figure(f"longest call, a million chunks, {policy}", float(taken.min(0).max()), 1, "ms", beside))
        reset = float(taken.min(0)[SAVED + 2 * (SAVED // PROMPT)])
        out.append(Figure(f"a reset, a million chunks, {policy}", reset, 1, "ms", "one of those calls"))
    return [*_decisions(), *out, *_probes()]


def _decisions() -> list[Figure]:
    """Measure the cost per chunk of `sessions` beyond the cost of `lru`. Both policies alternate. Least times count."""
    least = dict[tuple[str, str], float]()
    for _ in range(ROUNDS):
        for tick_s, policy in itertools.product((0.0, TICK_S), ("lru", "sessions")):
            for phase, taken_us in (*_phases(policy, tick_s), *_replays(policy, tick_s)):
                name = phase + ", a clock that ticks" * (tick_s > 0)
                least[name, policy] = min(taken_us, least.get((name, policy), taken_us))
    return [
        Figure(
            f"sessions beside lru: {name}",
            us - least[name, "lru"],
            DECISION_US_MAX,
            "us",
            f"{us:.3g} us, with lru {least[name, 'lru']:.3g}",
        )
        for (name, policy), us in least.items()
        if policy == "sessions"
    ]


def _phases(policy: str, tick_s: float) -> Iterator[tuple[str, float]]:
    """Measure three phases, and yield each phase's microseconds per chunk.

    The first phase saves prompts into free slots. The second saves twice as many prompts, which evict earlier chunks.
    The third loads the last prompts again.
    """
    now_s, timer = 0.0, time.thread_time

    def clock() -> float:
        nonlocal now_s
        now_s += tick_s
        return now_s

    catalog = Catalog(SLOTS, 1, make_policy(policy, SLOTS), Counters(), clock=clock)
    prompts = [[f"{prompt}/{at}".encode() for at in range(LONG)] for prompt in range(3 * SLOTS // LONG)]
    fill = SLOTS // LONG
    for name, some in (
        ("a chunk is saved in a free slot", prompts[:fill]),
        ("a chunk is saved and evicts another", prompts[fill:]),
        ("a chunk is loaded", prompts[-fill:]),
    ):
        begin = timer()
        for keys in some:
            now_s += 1.0
            _serve(catalog, keys)
        yield name, (timer() - begin) / len(some) / LONG * 1e6


def _serve(catalog: Catalog, keys: list[bytes]) -> None:
    """Serve one request: load the held chunks of the prompt, save the other chunks, and release all leases."""
    owner, held, before = Owner("r", 0), list[Chunk](), b""
    for key in keys:
        chunk = catalog.find(0, key)
        if chunk is not None:
            held.append(chunk)
    catalog.lease(owner, held)
    for key in keys[len(held) :]:
        chunk = catalog.reserve(0)
        assert chunk is not None
        catalog.landed(catalog.write(chunk, 1, key, keep=True, before=before))
        before = key
        held.append(chunk)
    catalog.release(owner)
    catalog.refresh(reversed(held))


def _replays(policy: str, tick_s: float) -> Iterator[tuple[str, float]]:
    """Yield the microseconds per chunk of two recorded workloads: first one with many misses, then one with few."""
    for workload, share in ((_mooncake(), 0.05), (_agents(), 0.1)):
        chunks = sum(len(prompt.keys) for prompt in workload.prompts)
        taken_s = replay(workload, policy, share, tick_s=tick_s).seconds
        yield f"a chunk of {workload.name}, {share:.0%}", taken_s / chunks * 1e6


@cache
def _mooncake() -> w.Workload:
    return w.mooncake()


@cache
def _agents() -> w.Workload:
    return w.coding_agents(0)


def _calls(policy: str) -> Iterator[float]:
    """Save prompts and load every fourth prompt again. Reset the catalog, and save as many chunks as the reset dropped.

    Yields the processor seconds of each call.
    """
    gc.collect()
    gc.freeze()  # vLLM also freezes all objects when an engine has started
    gc.disable()
    catalog, timer, now_s = Catalog(CHUNKS, 1, make_policy(policy, CHUNKS), Counters()), time.thread_time, 0.0
    rng = random.Random(1)
    catalog._clock = lambda: now_s
    chunks = list[Chunk]()
    for i in range(SAVED + CHUNKS):
        if i == SAVED:
            begin = timer()
            catalog.reset()
            yield timer() - begin
        key, before = rng.randbytes(32), chunks[-1].tail if chunks else b""
        begin = timer()
        chunk = catalog.reserve(0)
        assert chunk is not None
        catalog.landed(catalog.write(chunk, 16, key, keep=False, before=before))
        yield timer() - begin
        chunks.append(chunk)
        if len(chunks) == PROMPT:
            now_s += 1.0
            begin = timer()
            if i // PROMPT % 4 == 0:
                owner = Owner(str(i), 0)
                catalog.lease(owner, chunks)
                catalog.release(owner)
            catalog.refresh(reversed(chunks))
            yield timer() - begin
            chunks.clear()
            begin = timer()
            catalog.sweep()  # each engine step calls this, too
            yield timer() - begin
    gc.enable()
    gc.unfreeze()


def _probes() -> list[Figure]:
    """Compare a lookup's probe with a probe of a single dict, for the same prompt repeatedly and for random prompts."""
    rng, out = random.Random(1), list[Figure]()
    keys = [rng.randbytes(32) for _ in range(CHUNKS)]
    plain, pieces = dict.fromkeys(keys, 0), Shards[int]()
    pieces.update(plain)
    for name, any_prompt in (("again", lambda: keys[:512]), ("any", lambda: list(map(_copy, rng.sample(keys, 512))))):
        mine = _probe_s(pieces.leading, any_prompt)
        theirs = _probe_s(lambda prompt: len(list(takewhile(plain.__contains__, prompt))), any_prompt)
        beside = f"{theirs * 1e9:.3g} ns of one dict, which pools of up to {PLAIN_MAX} chunks have"
        out.append(Figure(f"a probe, a million chunks, {name} prompt", mine * 1e9, 2e9 * theirs, "ns", beside))
    return out


def _copy(key: bytes) -> bytes:
    """Return an equal key that is another object, like the hashes of a new request."""
    return bytes(bytearray(key))


def _probe_s(probe: Callable[[list[bytes]], int], any_prompt: Callable[[], list[bytes]]) -> float:
    samples = []
    for _ in range(200):
        prompt = any_prompt()
        begin = time.thread_time()
        assert probe(prompt) == len(prompt)
        samples.append((time.thread_time() - begin) / len(prompt))
    return median(samples)
