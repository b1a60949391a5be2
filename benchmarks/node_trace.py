"""Replays recorded sessions on two engines, with one shared memory or with two private pools of the same total size.

The catalogs are kvpipe's. No engine runs, and no bytes are copied (`benchmarks/replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from benchmarks.replay.replay import Pool
from benchmarks.replay.workload import Prompt, Workload, coding_agents
from benchmarks.report import Figure
from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.cache.policy import make_policy
from kvpipe.cache.policy.hints import Hint
from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.prefixes import NodePrefixes
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.testing.direct_node import DirectNode, DirectPool
from kvpipe.trace.log import Counters

ENGINES: Final = 2
STOCK: Final = 32
SESSIONS: Final = 12

Router = Callable[[int, Prompt], int]
"""Returns the engine of a request, by the request's number."""


class ReplayClock:
    """The time of a replay: that of the last request."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


class _Waiting(NodeCatalog):
    """A catalog that waits for slots instead of dropping saves, because the replay saves a whole prompt in one step.

    As in an engine, the holder learns of a request's leases before its saves, and of its saves before its end.
    """

    def lease(self, owner: Owner, chunks: list[Chunk], *, timed: bool = True) -> None:
        """Lease `chunks` as `NodeCatalog.lease` does, and report this."""
        super().lease(owner, chunks, timed=timed)
        self._send()

    def release(self, owner: Owner, *, hit: bool = True) -> int:
        """Report the saves, and release all chunks of `owner` as `NodeCatalog.release` does."""
        self._send()
        return super().release(owner, hit=hit)

    def _send(self) -> None:
        for _ in range(2):
            self._report_sealed()
            self.poll()

    def reserve(self, group: int, tenant: Tenant = ANYBODY) -> Chunk | None:
        """Take a slot as `NodeCatalog.reserve` does, but poll the holder until the stock has a slot."""
        for _ in range(4):
            if (chunk := super().reserve(group, tenant)) is not None:
                return chunk
            self._send()
        return None


class SharedPool(Pool):
    """One engine's side of a node's memory."""

    def __init__(self, chunk_tokens: int, node: DirectNode, clock: ReplayClock | None = None) -> None:
        """Attach to `node`, whose policy has the time of `clock`."""
        self._of_node = clock
        geometry = Geometry((Group((Layer("l", 4096),), chunk_tokens),), chunk_tokens, node.slots * 4096)
        super().__init__(chunk_tokens, 1, make_policy("lru", 1))
        self.node = _Waiting(DirectPool(node, STOCK), 1, Counters(), 1)
        self.node.name_space("replay")
        self.catalog = self.node
        self.prefixes = NodePrefixes(self.node, geometry, chunk_tokens, attrgetter("block_hashes"))

    def begin(self, prompt: Prompt, hint: Hint | None = None) -> int:
        """Begin a request, as `Pool.begin` does, at the time of the request."""
        if self._of_node is not None:
            self._of_node.now_s = max(self._of_node.now_s, prompt.at_s)
        return super().begin(prompt, hint)

    def end_step(self) -> None:
        """Report the saved chunks, and read the journal to its end."""
        for _ in range(4):
            self.node.end_step()
        while self.node.lag:
            self.node.poll()


def _by_turns(number: int, _: Prompt) -> int:
    return number % ENGINES


def _by_session(_: int, prompt: Prompt) -> int:
    """Return the engine of a session of `coding_agents`, whose keys begin with the session's number."""
    return int(prompt.keys[-1].partition(b"/")[0]) % ENGINES if prompt.keys else 0


def hit_rate(workload: Workload, pools: Sequence[Pool], router: Router) -> float:
    """Return the share of all prompts' tokens that the pools of the requests' engines held."""
    held = 0
    for number, prompt in enumerate(workload.prompts):
        pool = pools[router(number, prompt)]
        held += pool.begin(prompt)
        pool.end(prompt, None, prompt.at_s)
        for one in pools:
            if isinstance(one, SharedPool):
                one.end_step()
    return held * workload.chunk_tokens / workload.tokens


def run() -> list[Figure]:
    """Return the hit rates of a shared memory against the better of the policies of private pools.

    The size of all pools together is given as a share of the workload's number of different chunks.
    """
    workload = coding_agents(0, sessions=SESSIONS, hours=1)
    out = []
    for share, router, how in (
        (0.2, _by_turns, "requests by turns"), (0.2, _by_session, "by session"), (0.1, _by_turns, "requests by turns"),
    ):  # fmt: skip
        slots = workload.slots(share)
        node = DirectNode(slots, 4096)
        shared = hit_rate(workload, [SharedPool(workload.chunk_tokens, node) for _ in range(ENGINES)], router)
        node.close()
        size, rates = slots // ENGINES, dict[str, float]()
        for policy in ("lru", "sessions"):
            pools = [Pool(workload.chunk_tokens, size, make_policy(policy, size)) for _ in range(ENGINES)]
            rates[policy] = hit_rate(workload, pools, router)
        both = f"hit rate {shared:.3f}, private lru {rates['lru']:.3f}, private sessions {rates['sessions']:.3f}"
        name = f"hits of {ENGINES} engines, {workload.name}, {how}, memory for {share:.0%} of the chunks, shared"
        out.append(Figure(name, shared / max(rates.values()), 1.0, "x private", both, at_least=True))
    return out
