"""Computes the hits of Belady's MIN, the optimal policy, which knows all later requests.

MIN first evicts the chunk whose next use is the latest. Among chunks that the same request uses next, MIN evicts the
last chunk of the prompt first. Each use of a chunk also uses all chunks before it in the prompt. So the held chunks are
always whole prefixes, and MIN loses no hit to a gap in a prefix. No policy has more hits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from benchmarks.replay.workload import Workload

NEVER: Final = 1 << 60


def hits(workload: Workload, slots: int) -> Iterator[int]:
    """Yield, for each prompt, how many of the prompt's first chunks are held without a gap when the prompt arrives."""
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
            if held.get(key) == -use:  # skip an old entry, whose chunk was used again later
                del held[key]
