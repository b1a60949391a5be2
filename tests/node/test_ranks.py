"""A chunk in a node's memory has the parts of all ranks."""

from __future__ import annotations

from kvpipe.protocol.messages import Report, Tally
from kvpipe.testing.direct_node import DirectNode, DirectPool
from tests.rigs.scheduler_world import SchedulerWorld

SLOTS, SLOT_BYTES = 16, 4096


def test_chunk_is_published_when_the_last_rank_has_landed() -> None:
    """Until the copies of all ranks have landed, no engine finds the chunk, and its slot stays the writer's."""
    node = DirectNode(SLOTS, SLOT_BYTES)
    world = SchedulerWorld(
        chunk_units=4, slots=SLOTS, ranks=2, node=DirectPool(node, stock=4), also_of="layout {}".format
    )
    world.side.ranks_ready({}, ["weights"] * world.ranks)
    world.side.node.poll()  # type: ignore[union-attr]
    request = world.request("one", 8)
    world.admit(request)
    (save,) = world.step(request)
    for published in (0, 2):
        world.side.reported(Report({save.id: Tally(1, 0)}))
        for _ in range(3):
            world.step()
        assert node.keeper.usage().published == published
        assert world.found(request) == 4 * published
    node.close()
