"""The yardstick: a pool of a given size, kvpipe's own catalog and one policy, and no engine.

A request takes the longest prefix of whole chunks that is held; all its other whole chunks are saved. Then it is over,
or when its answer is.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.replay import belady, hints
from benchmarks.replay.workload import Prompt, Workload
from kvpipe import plugins
from kvpipe.cache.catalog import Catalog, Chunk, Owner
from kvpipe.cache.hints import Hint
from kvpipe.cache.policy import Policy, make_policy
from kvpipe.cache.prefixes import Prefixes
from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.trace.log import Counters

BELADY: Final = "belady"
SHARES: Final = (0.01, 0.02, 0.05, 0.10)
"""Of all different chunks of a workload: how many the pool holds."""


def policies() -> list[str]:
    """Return the policies that are registered: kvpipe's own, and those of packages that are installed."""
    return plugins.names(plugins.POLICIES)


@dataclass
class Outcome:
    """What a replay came to. `hits`: of each prompt, the chunks that were held."""

    workload: Workload
    policy: str
    slots: int
    hits: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """Of the processor, in kvpipe's code; of Belady's, in all."""

    @property
    def hit_rate(self) -> float:
        """Return which share of all tokens of prompts was held."""
        return sum(self.hits) * self.workload.chunk_tokens / self.workload.tokens

    @property
    def microseconds(self) -> float:
        """Of a request, in the mean."""
        return self.seconds / len(self.hits) * 1e6


def replay(
    workload: Workload, policy: str, share: float, hinted: str = hints.NONE, sigma: float = 0.0, tick_s: float = 0.0
) -> Outcome:
    """Replay `workload` with a pool of `share` of its chunks, and a registered policy, or `BELADY`.

    `hinted`, `sigma`: clients' hints on their sessions, and how wrong they are (`hints.py`). `tick_s`: as of `Pool`.
    """
    slots = workload.slots(share)
    if policy == BELADY:
        begin_s = time.thread_time()
        return Outcome(workload, policy, slots, list(belady.hits(workload, slots)), time.thread_time() - begin_s)
    pool, out = Pool(workload.chunk_tokens, slots, make_policy(policy, slots), tick_s), Outcome(workload, policy, slots)
    running = list[tuple[float, int]]()  # until when, and which request
    clients = hints.hints(workload, hinted, sigma)
    for number, prompt in enumerate(workload.prompts):
        begin_s = time.thread_time()
        while running and running[0][0] <= prompt.at_s:
            over_s, one = heapq.heappop(running)
            pool.end(workload.prompts[one], clients[one], over_s)
        out.hits.append(pool.begin(prompt, clients[number]))
        heapq.heappush(running, (prompt.at_s + prompt.answer * workload.answer_s_per_token, number))
        out.seconds += time.thread_time() - begin_s
    return out


class Pool:
    """The catalog of a model with attention alone, one request at a time."""

    def __init__(self, chunk_tokens: int, slots: int, policy: Policy, tick_s: float = 0.0) -> None:
        """Empty. `tick_s`: seconds that pass each time the catalog reads the clock."""
        geometry = Geometry((Group((Layer("l", 4096),), chunk_tokens),), chunk_tokens, slots * 4096)
        self.catalog = Catalog(slots, 1, policy, Counters(), clock=self._clock)
        self.prefixes = Prefixes(self.catalog, geometry, chunk_tokens, lambda request: request.block_hashes)
        self.now_s, self._served, self._tick_s = 0.0, 0, tick_s

    def serve(self, prompt: Prompt, hint: Hint | None = None) -> int:
        """Begin and end at once. Returns how many chunks were held."""
        held = self.begin(prompt, hint)
        self.end(prompt, hint, prompt.at_s)
        return held

    def begin(self, prompt: Prompt, hint: Hint | None = None) -> int:
        """Look up, load, save. `hint`: its client's, which has come with it. Returns how many chunks were held."""
        catalog, keys = self.catalog, prompt.keys
        held = self.prefixes.longest(self._request(prompt))
        self.now_s, self._served = max(self.now_s, prompt.at_s), self._served + 1
        owner = Owner("r", self._served)
        catalog.lease(owner, [chunk for chunk in map(self._find, keys[:held]) if chunk is not None])
        for place, key in enumerate(keys[held:], held):
            if not catalog.known(0, key):
                chunk = catalog.reserve(0)
                if chunk is not None:
                    before = keys[place - 1] if place else b""
                    catalog.landed(catalog.write(chunk, 1, key, keep=True, base=place, before=before))
                    if hint is not None:
                        catalog.hint([chunk], hint)
        catalog.release(owner)
        return held

    def end(self, prompt: Prompt, hint: Hint | None, at_s: float) -> None:
        """Its answer is over."""
        self.now_s = max(self.now_s, at_s)
        chunks = self.prefixes.chunks_from_the_end(self._request(prompt), len(prompt.keys))
        self.catalog.refresh(chunks, answer=prompt.answer)
        if hint is not None:
            self.catalog.hint(self.prefixes.chunks_from_the_end(self._request(prompt), len(prompt.keys)), hint)

    def _request(self, prompt: Prompt) -> Any:
        return SimpleNamespace(num_tokens=prompt.tokens, block_hashes=prompt.keys)

    def _clock(self) -> float:
        self.now_s += self._tick_s
        return self.now_s

    def _find(self, key: bytes) -> Chunk | None:
        return self.catalog.find(0, key)
