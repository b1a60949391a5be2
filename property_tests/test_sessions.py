"""In the policy of sessions a prefix is evicted from its end, and the policy's memory is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.cache.policy import Sessions
from kvpipe.trace.log import Counters
from property_tests.profiles import examples

SLOTS = 12
TURNS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 6), st.floats(0, 1000)), min_size=1, max_size=60
)
"""A turn: session, the chunks kept of the session's last prompt, the new chunks, and the seconds before the turn."""


class World:
    """A catalog of one cache group. Each prompt's request has ended when the next prompt comes."""

    def __init__(self) -> None:
        """Start with an empty catalog."""
        self.now_s, self.requests, self.gone = 0.0, 0, list[bytes]()
        self.policy = Sessions(SLOTS)
        self.catalog = Catalog(SLOTS, 1, self.policy, Counters(), clock=lambda: self.now_s)
        self.catalog.on_drop = self._dropped

    def _dropped(self, chunk: Chunk) -> None:
        self.gone.append(chunk.identity)
        assert chunk.identity not in {one.before for one in self.catalog.index(0).values()}, "a head before its tail"

    def serve(self, keys: list[bytes]) -> int:
        """Serve a prompt: return the number of held chunks, and save the prompt's other chunks."""
        self.requests += 1
        owner, held = Owner("r", self.requests), list[Chunk]()
        for key in keys:
            chunk = self.catalog.find(0, key)
            if chunk is None:
                break
            held.append(chunk)
        self.catalog.lease(owner, held)
        for base in range(len(held), len(keys)):
            if self.catalog.known(0, keys[base]):
                continue
            chunk = self.catalog.reserve(0)
            if chunk is not None:
                before = keys[base - 1] if base else b""
                self.catalog.landed(self.catalog.write(chunk, 1, keys[base], keep=True, base=base, before=before))
        self.catalog.release(owner)
        self.catalog.refresh(chunk for key in reversed(keys) if (chunk := self.catalog.find(0, key)) is not None)
        return len(held)


def _serve(turns: list[tuple[int, int, int, float]]) -> World:
    world, prompts, made = World(), dict[int, list[bytes]](), 0
    for session, shared, new, pause_s in turns:
        world.now_s += pause_s
        keys = prompts.get(session, [])[:shared]
        for _ in range(new):
            made += 1
            keys = [*keys, str(made).encode()]
        prompts[session] = keys
        world.serve(keys)
    return world


@given(TURNS)
@examples(200)
def test_prefix_is_evicted_from_its_end(turns: list[tuple[int, int, int, float]]) -> None:
    """No chunk is evicted while the next chunk of its prefix is held. The policy's memory is bounded by its slots."""
    policy = _serve(turns).policy
    assert len(policy._known) <= 2 * SLOTS
    assert max(len(policy) + policy._held, len(policy._gone), len(policy._branches)) <= SLOTS
    chains = {chain for chain in policy._chains if chain is not None}
    assert len(policy._chains) <= 1 + SLOTS
    assert {chain for queue in (*policy._queues.by_kind, policy._orphans) for chain in queue} == chains
    assert sum(chain.free for chain in chains) == len(policy)


@given(TURNS)
@examples(50)
def test_the_same_requests_evict_the_same(turns: list[tuple[int, int, int, float]]) -> None:
    """Time comes from the catalog, and nothing is random."""
    assert _serve(turns).gone == _serve(turns).gone
