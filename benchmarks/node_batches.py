"""Measures the CPU time of the holder per batch, by eviction policy: `python -m benchmarks.node_batches [SLOTS]`.

The memory is full of prompts of `PROMPT` chunks. Each batch publishes `SAVED` chunks, which evicts as many, and reports
a request that has leased, loaded and used a whole prompt.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator

from kvpipe.cache.policy import make_policy
from kvpipe.node.keeper import Keeper
from kvpipe.node.layout import VERSION, Process, link_of
from kvpipe.node.ledger import Ledger
from kvpipe.node.messages import Hello, Publish, SlotBatch, Use
from kvpipe.node.replica import stamp_of
from kvpipe.node.segment import Segment, create

SIZES = (4_096, 262_144)
PROMPT, SAVED, BATCHES = 500, 16, 200


def _prompts(slots: int) -> Iterator[list[bytes]]:
    for number in range(slots):
        yield [b"%032d" % (number * PROMPT + place) for place in range(PROMPT)]


def batch_us(policy: str, slots: int) -> tuple[float, float]:
    """Return the median and the largest CPU time of a batch in microseconds."""
    fd = create(slots, 64, rows=2)
    keeper = Keeper(Ledger(Segment(fd, whole=False)), make_policy(policy, slots))
    keeper.use_more(slots)
    client = keeper.greet(Hello(VERSION, "scheduler", b"1" * 16, b"n" * 32, slots, 64), Process(1, 1))
    prompts, held = _prompts(slots), list[tuple[int, int]]()

    def save(keys: list[bytes], before: bytes) -> bytes:
        nonlocal held
        reports = []
        for key in keys:
            slot, number = held.pop()
            reports.append(Publish(slot, number, 0, key, 1, behind=before and link_of(before)))
            before = key
        answer = keeper.batch(client, SlotBatch(0, tuple(reports), want=len(keys)))
        held = [*answer.granted, *held]
        return b"".join(stamp_of(one.slot, one.generation + 1) for one in reversed(reports))

    held = list(keeper.batch(client, SlotBatch(0, want=2 * SAVED)).granted)
    times = []
    for number in range(slots // PROMPT + BATCHES):
        keys, stamps = next(prompts), b""
        for at in range(0, PROMPT, SAVED):
            stamps = save(keys[at : at + SAVED], keys[at - 1] if at else b"") + stamps
        keeper.batch(client, SlotBatch(0, used=(Use("ended", stamps, 100),)))
        if number >= slots // PROMPT:
            begin_s = time.thread_time()
            more = save([b"%032d" % (-1 - number * SAVED - place) for place in range(SAVED)], keys[-1])
            uses = Use("leased", stamps), Use("loaded", stamps), Use("ended", more + stamps, 100)
            keeper.batch(client, SlotBatch(0, used=uses))
            times.append((time.thread_time() - begin_s) * 1e6)
    os.close(fd)
    return statistics.median(times), max(times)


def main() -> None:
    """Print a line for each policy and number of slots."""
    for slots in map(int, sys.argv[1:] or SIZES):
        for policy in ("lru", "sessions"):
            median, worst = batch_us(policy, slots)
            sys.stdout.write(f"{slots} slots, {policy}: {median:.0f} us per batch, at most {worst:.0f} us\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
