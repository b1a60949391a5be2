"""The most that any policy could hit, had it known what comes: Belady's MIN, of the same requests and slots.

What is used again last goes first, and of what is used again by the same request its end. A chunk is never used again
before those that it follows, so what is held is always whole prefixes: MIN, which has the most hits of all policies,
loses none of them to a gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from benchmarks.replay.workload import Workload

NEVER: Final = 1 << 60


def hits(workload: Workload, slots: int) -> Iterator[int]:
    """Yield, for each prompt, how many of its chunks, from the first on, are held when it arrives."""
    prompts = workload.prompts
    uses, next_use = list[list[int]](), dict[bytes, int]()
    for number in range(len(prompts) - 1, -1, -1):
        keys = prompts[number].keys
        uses.append([next_use.get(key, NEVER) for key in keys])
        next_use.update(dict.fromkeys(keys, number))
    held, order = dict[bytes, int](), list[tuple[int, int, bytes]]()
    for prompt in prompts:
        yield next((at for at, key in enumerate(prompt.keys) if key not in held), len(prompt.keys))
        for place, (key, use) in enumerate(zip(prompt.keys, uses.pop(), strict=True)):
            held[key] = use
            heapq.heappush(order, (-use, -place, key))
        while len(held) > slots:
            use, _, key = heapq.heappop(order)
            if held.get(key) == -use:  # else it was used meanwhile, and has a later entry
                del held[key]
