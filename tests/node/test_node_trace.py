"""A trace is replayed on two engines alternately. Prompts hit in a shared memory, and miss in private pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.node_trace import SharedPool, _by_turns, hit_rate
from benchmarks.replay.replay import Pool
from benchmarks.replay.workload import Prompt, Workload
from kvpipe.cache.policy import make_policy
from kvpipe.testing.direct_node import DirectNode

CHUNKS = 100


@pytest.fixture
def workload() -> Workload:
    """Return two prompts of 100 chunks. Each is asked twice in a row, so that each engine gets each prompt once."""
    prompts = [[b"%d/%d" % (number, n) for n in range(CHUNKS)] for number in (0, 0, 1, 1)]
    return Workload("two prompts", 16, [Prompt(at, 16 * CHUNKS, 1, keys) for at, keys in enumerate(prompts)])


@pytest.fixture
def node() -> Iterator[DirectNode]:
    """Return a memory with room for both prompts and for the stocks of two engines."""
    made = DirectNode(4 * CHUNKS, 4096)
    yield made
    made.close()


def test_engines_hit_in_a_shared_memory(workload: Workload, node: DirectNode) -> None:
    """The second engine finds all chunks that the first engine has saved for the preceding request."""
    assert hit_rate(workload, [SharedPool(16, node) for _ in range(2)], _by_turns) == 0.5


def test_engines_miss_in_private_pools(workload: Workload) -> None:
    """Each engine gets each prompt only once, so no engine has saved a prompt before."""
    pools = [Pool(16, 2 * CHUNKS, make_policy("lru", 2 * CHUNKS)) for _ in range(2)]
    assert hit_rate(workload, pools, _by_turns) == 0
