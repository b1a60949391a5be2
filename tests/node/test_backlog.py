"""Slots whose journal records the engine has not read yet, and slots of chunks that grow for a long time."""

from __future__ import annotations

from hashlib import sha256
from operator import attrgetter
from types import SimpleNamespace

import pytest

from kvpipe.cache.chunks import Piece
from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.prefixes import NodePrefixes
from kvpipe.node.replica import RECORDS_MAX
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.testing.direct_node import DirectNode, DirectPool
from kvpipe.testing.node_integrity import check_node_integrity
from kvpipe.trace.log import Counters
from tests.rigs.node_replica import evict_all

SLOTS, UNITS, UNIT = 64, 4, 16


def _engine(node: DirectNode, stock: int) -> NodeCatalog:
    catalog = NodeCatalog(DirectPool(node, stock), 1, Counters(), UNITS)
    catalog.name_space("same")
    for _ in range(3):
        catalog.end_step()
    return catalog


def _save(catalog: NodeCatalog, name: str, units: int = UNITS) -> Piece | None:
    """Plan the save of a new chunk. Returns None if no slot is free."""
    chunk = catalog.reserve(0)
    return None if chunk is None else catalog.write(chunk, units, sha256(name.encode()).digest(), keep=False)


def _behind(node: DirectNode) -> tuple[NodeCatalog, list[Piece]]:
    """Return an engine that is far behind in the journal, and its planned saves into slots that it got meanwhile."""
    busy, idle = _engine(node, 4), _engine(node, 2)
    _save_many(busy)
    pieces = list[Piece]()
    for _ in range(12):
        while (piece := _save(idle, f"idle {len(pieces)}")) is not None:
            pieces.append(piece)
        idle.end_step()
    return idle, pieces


def _save_many(busy: NodeCatalog) -> None:
    """Publish and evict so many chunks that other engines fall far behind in the journal."""
    saved = 0
    while saved < 2 * RECORDS_MAX:
        if (piece := _save(busy, f"busy {saved}")) is not None:
            busy.landed(piece)
            saved += 1
        busy.end_step()


def test_published_chunk_is_kept_until_its_journal_record_is_read() -> None:
    """The holder answers the report many steps before the engine reads the chunk's record in the journal."""
    node = DirectNode(SLOTS, 4096)
    busy, idle = _engine(node, 4), _engine(node, 2)
    piece, again = _save(idle, "idle"), _save(idle, "busy 511")
    assert piece is not None
    assert again is not None
    _save_many(busy)
    idle.landed(piece)
    idle.landed(again)
    steps = 0
    while not piece.chunk.is_published:
        assert idle.holds(piece.chunk)
        assert steps < 10
        idle.end_step()
        steps += 1
    assert steps > 3, "the engine was not far behind"
    assert idle.index(0)[piece.key] is piece.chunk
    assert not idle.holds(again.chunk), "another slot has the key, so this copy was dropped with the answer"
    assert idle.index(0)[again.key] is not again.chunk
    check_node_integrity(idle)
    node.close()


def test_lookup_ends_if_a_chunk_of_a_slot_with_unread_history_is_evicted() -> None:
    """The engine finds its own chunk. When the holder has evicted this chunk, the engine forgets it."""
    node = DirectNode(SLOTS, 4096)
    idle, pieces = _behind(node)
    for piece in pieces:
        idle.landed(piece)
    for _ in range(40):
        idle.end_step()
    check_node_integrity(idle)
    found = next(piece for piece in pieces if idle.index(0).get(piece.key) is piece.chunk)
    geometry = Geometry((Group((Layer("l", 64),), UNIT),), UNITS * UNIT, SLOTS * 4096)
    request = SimpleNamespace(
        block_hashes=[*(b"%d" % n for n in range(UNITS - 1)), found.key], num_tokens=UNITS * UNIT + 1
    )
    prefixes = NodePrefixes(idle, geometry, UNIT, attrgetter("block_hashes"))
    evict_all(node.keeper)
    assert prefixes.longest(request) == 0
    assert found.key not in idle.index(0)
    node.close()


@pytest.mark.parametrize("part", ["_follow", "_settle"])
def test_slot_of_a_late_chunk_is_taken_once_when_a_poll_raises(part: str) -> None:
    """The holder has another copy of the chunk, so the slot is in the stock again."""
    node = DirectNode(SLOTS, 4096)
    first, second = _engine(node, 4), _engine(node, 4)
    pieces = [_save(engine, "same") for engine in (first, second)]
    for engine, piece in zip((first, second), pieces, strict=True):
        assert piece is not None
        assert engine.landed(piece)
        engine.end_step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second, part, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            second.end_step()
    assert not second._stock.reports
    taken = [chunk.slot for chunk in iter(lambda: second.reserve(0), None)]
    assert len(set(taken)) == len(taken) == 5
    second.end_step()
    assert not set(taken).intersection(second._stock._free)
    node.close()


def test_chunks_that_grow_do_not_keep_all_slots() -> None:
    """If no slot is left for a save, the oldest growing chunk is published with the units that it has.

    Then the holder may evict this chunk.
    """
    node = DirectNode(SLOTS, 4096)
    catalog = _engine(node, 4)
    dropped = 0
    for n in range(4 * SLOTS):
        piece = _save(catalog, str(n), units=1)
        dropped += piece is None
        if piece is not None:
            catalog.landed(piece)
        catalog.end_step()
        catalog.end_step()
    assert dropped < SLOTS
    check_node_integrity(catalog)
    node.close()
