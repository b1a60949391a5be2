"""The yardstick: a pool of a given size with kvpipe's own catalog and one policy, without an engine.

A request loads the longest prefix of whole chunks that the pool holds, and saves all its other whole chunks. The
request ends at once, or at the end of its answer if answers take time.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.replay import belady, hints
from benchmarks.replay.workload import Prompt, Workload
from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.cache.policy import Policy, make_policy
from kvpipe.cache.policy.hints import Hint
from kvpipe.cache.prefixes import Prefixes
from kvpipe.inputs import plugins
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.trace.log import Counters

BELADY: Final = "belady"
SHARES: Final = (0.01, 0.02, 0.05, 0.10)
"""The sizes of the pool, as shares of the workload's number of different chunks."""


def policies() -> list[str]:
    """Return the names of the registered policies: kvpipe's own, and policies of installed packages."""
    return plugins.names(plugins.POLICIES)


@dataclass
class Outcome:
    """The result of a replay. `hits` has, for each prompt, the number of its chunks that the pool held."""

    workload: Workload
    policy: str
    slots: int
    hits: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """The processor time of kvpipe's code, or for `BELADY` of the whole computation, in seconds."""

    @property
    def hit_rate(self) -> float:
        """The share of all prompts' tokens that the pool held."""
        return sum(self.hits) * self.workload.chunk_tokens / self.workload.tokens

    @property
    def microseconds(self) -> float:
        """The mean processor time of a request in microseconds."""
        return self.seconds / len(self.hits) * 1e6


def replay(
    workload: Workload, policy: str, share: float, hinted: str = hints.NONE, sigma: float = 0.0, tick_s: float = 0.0
) -> Outcome:
    """Replay `workload` with a pool of `share` of its chunks. `policy` is a registered policy, or `BELADY`.

    `hinted` is the model of the clients' hints (`hints.py`), and `sigma` is the hints' error. `tick_s` is `Pool`'s.
    """
    slots = workload.slots(share)
    if policy == BELADY:
        begin_s = time.thread_time()
        return Outcome(workload, policy, slots, list(belady.hits(workload, slots)), time.thread_time() - begin_s)
    pool, out = Pool(workload.chunk_tokens, slots, make_policy(policy, slots), tick_s), Outcome(workload, policy, slots)
    running = list[tuple[float, int]]()  # (end in seconds, number) of each running request
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
    """A pool for a model with full attention only. The pool serves one request at a time."""

    def __init__(self, chunk_tokens: int, slots: int, policy: Policy, tick_s: float = 0.0) -> None:
        """Make an empty pool. `tick_s` seconds pass each time the catalog reads the clock."""
        geometry = Geometry((Group((Layer("l", 4096),), chunk_tokens),), chunk_tokens, slots * 4096)
        self.catalog = Catalog(slots, 1, policy, Counters(), clock=self._clock)
        self.prefixes = Prefixes(self.catalog, geometry, chunk_tokens, lambda request: request.block_hashes)
        self.now_s, self._served, self._tick_s = 0.0, 0, tick_s

    def serve(self, prompt: Prompt, hint: Hint | None = None) -> int:
        """Begin and end a request at once. Returns the number of the request's chunks that the pool held."""
        held = self.begin(prompt, hint)
        self.end(prompt, hint, prompt.at_s)
        return held

    def begin(self, prompt: Prompt, hint: Hint | None = None) -> int:
        """Look up, load and save the chunks of a request. Returns the number of these chunks that the pool held.

        `hint` is the hint that the client has sent with the request.
        """
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
        """End the request of `prompt`, whose answer ends at `at_s`."""
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
