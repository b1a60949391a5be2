"""Engines on a node's memory announce chunks that any engine has saved. The slots have notes for these events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from vllm.lora.request import LoRARequest

from kvpipe.cache.chunks import Chunk
from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm import block_notes
from kvpipe.connectors.vllm.block_notes import AnnouncedBlock, BlockMaker, NotedBlocks, read_note
from kvpipe.connectors.vllm.kv_events import KvEvents
from kvpipe.connectors.vllm.support import make_geometry
from kvpipe.connectors.vllm.trial.router import Router
from kvpipe.connectors.vllm.trial.shapes import BLOCK, SHAPES, make_configs
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.node.attach import node_note_bytes
from kvpipe.node.catalog import NodeCatalog
from kvpipe.statemachine.chunk import CHUNK
from kvpipe.testing.direct_node import DirectNode, DirectPool
from kvpipe.trace.log import Counters
from tests.contract.test_kv_events import KINDS, PATH, Noted, request_of, vllms_own, wired

if TYPE_CHECKING:
    from vllm.v1.request import Request

IN_CHUNK, SLOTS = 4, 16
CACHE = make_configs(SHAPES["hybrid"])[1]
GEOMETRY = make_geometry(CACHE, load_settings())


class NotedEngine:
    """An engine's catalog of a node's memory, the catalog's events, and a router that receives these events."""

    def __init__(self, node: DirectNode) -> None:
        """Attach to `node`."""
        self.catalog = NodeCatalog(DirectPool(node, stock=4), 2, Counters(), IN_CHUNK)
        self.events = KvEvents(CACHE, GEOMETRY, BLOCK)
        self.catalog.notes.routers, self.catalog.on_drop = self.events, self.events.dropped
        self.router = Router({"french": PATH}, BLOCK)
        self.catalog.name_space("space")

    def save(self, request: Request) -> None:
        """Save the request's prompt in chunks."""
        blocks = BlockMaker(GEOMETRY, BLOCK)
        for base in range(0, len(request.block_hashes), IN_CHUNK):
            chunk = self.catalog.reserve(0)
            assert chunk is not None
            stop = base + IN_CHUNK
            piece = self.catalog.write(chunk, IN_CHUNK, request.block_hashes[stop - 1], keep=False, base=base)
            assert self.catalog.landed(piece)
            self.catalog.notes.write(chunk.slot, piece.key, blocks.note(request, chunk, base))

    def receive(self) -> list[Any]:
        """Take steps, and let the router receive the new events.

        Check that the router then expects the chunks that lookups find.
        """
        for _ in range(3):
            self.catalog.end_step()
        received = wired(self.events.take())
        self.router.apply(received)
        assert self.router.problems == []
        found = {key[:32] for key in self.catalog.index(0)}
        assert self.router.index.get(("CPU", 0), set()) == found
        return received


@pytest.fixture
def node() -> Iterator[DirectNode]:
    """Return a memory without engines."""
    size = node_note_bytes(GEOMETRY, 1)
    made = DirectNode(SLOTS, size + 64, size)
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_another_engine_announces_a_saved_prompt_with_the_same_events(node: DirectNode, kind: str) -> None:
    """The events equal those of a private pool. The engine that has saved the prompt announces the same events.

    An event has the adapter's number in the announcing engine, or None if no request of this engine has named the
    adapter.
    """
    request = request_of(**KINDS[kind]())
    private = Noted()
    private.save(request, iter([(0, 4), (4, 8)]))
    expected = wired(private.events.take())
    writer, reader = NotedEngine(node), NotedEngine(node)
    for one in (writer, reader):
        one.router.apply(wired(vllms_own(request, BLOCK)))
    writer.events.arrived(request)
    if request.lora_request is not None:
        reader.events.arrived(request_of(lora_request=LoRARequest("french", 7, PATH)))
        reader.events.arrived(request_of(lora_request=LoRARequest("french", 8, "/adapters/french-2")))
    writer.save(request)
    assert writer.receive() == expected
    for event in expected:
        event.lora_id = event.lora_id and 7
    assert reader.receive() == expected
    for event in expected:
        event.lora_id = None
    late = NotedEngine(node)
    late.router.apply(wired(vllms_own(request, BLOCK)))
    assert late.receive() == expected, "an engine that starts later finds the chunks in the slot table"


def test_blocks_are_removed_by_a_reset_and_an_eviction(node: DirectNode) -> None:
    """Only the engine that resets announces the removed blocks. All engines announce the holder's evictions."""
    writer, reader = NotedEngine(node), NotedEngine(node)
    writer.save(request_of(cache_salt="first"))
    writer.receive()
    assert len(reader.receive()) == 2
    reader.catalog.reset()
    reader.catalog.renew()
    (removed,) = {type(one).__name__ for one in reader.receive()}
    assert removed == "BlockRemoved"
    assert writer.receive() == []
    for salt in range(SLOTS):
        writer.save(request_of(cache_salt=str(salt)))
        writer.receive()
    assert len(writer.router.index["CPU", 0]) <= SLOTS


def test_blocks_are_announced_once_if_the_namespace_is_named_again(node: DirectNode) -> None:
    """If its ranks introduce themselves again, an engine names its namespace again, and drops its earlier dict."""
    writer = NotedEngine(node)
    writer.save(request_of())
    writer.receive()
    writer.catalog.name_space("space")
    kinds = [type(one).__name__ for one in writer.receive()]
    assert kinds == ["BlockRemoved", "BlockRemoved", "BlockStored", "BlockStored"]
    node.take_over()
    assert writer.receive() == []


def chunk_of(number: int) -> Chunk:
    """Return a chunk."""
    return Chunk(CHUNK.compile(), 0, number)


def block_of(number: int, parent: int | None) -> AnnouncedBlock:
    """Return a block without tokens."""
    name = None if parent is None else bytes([parent])
    return AnnouncedBlock(bytes([number]), name, [], None, None, None, None)  # type: ignore[arg-type]


def test_parents_are_announced_first_and_few_blocks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan finds chunks in any order. Only damaged notes can form a circle of parents, and a circle does no harm."""
    monkeypatch.setattr(block_notes, "ANNOUNCED_MAX", 2)
    noted, chunks = NotedBlocks(), [chunk_of(number) for number in range(6)]
    for number, parent in ((3, 2), (1, 0), (2, 1), (0, None), (4, 5), (5, 4)):
        noted.add(chunks[number], block_of(number, parent))
    noted.pop(chunks[3])
    taken = [[chunk.slot for chunk, _ in noted.take()] for _ in range(4)]
    assert taken[:2] == [[0, 1], [2, 5]] or taken[:2] == [[0, 1], [2, 4]]
    assert sorted(slot for some in taken for slot in some) == [0, 1, 2, 4, 5]


def test_engine_announces_few_blocks_per_step_however_often_it_polls(
    node: DirectNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators of an idle engine make it poll. vLLM takes events only in a step."""
    monkeypatch.setattr(block_notes, "ANNOUNCED_MAX", 2)
    writer, reader = NotedEngine(node), NotedEngine(node)
    for salt in range(3):
        writer.save(request_of(cache_salt=str(salt)))
        writer.receive()
    for _ in range(9):
        reader.catalog.end_step()
    assert len(reader.catalog.index(0)) == 6
    taken = []
    for _ in range(4):
        taken.append(len(reader.events.take()))
        reader.catalog.end_step()
    assert taken == [2, 2, 2, 0]


def test_chunks_of_two_versions_of_an_adapter_are_announced_once_each() -> None:
    """Their blocks have equal hashes, because a hash covers only the adapter's name and path."""
    noted, chunks = NotedBlocks(), [chunk_of(number) for number in range(4)]
    for chunk, (number, parent) in zip(chunks, ((1, 0), (0, None), (0, None), (1, 0)), strict=True):
        noted.add(chunk, block_of(number, parent))
    taken = [chunk.slot for chunk, _ in noted.take()]
    assert sorted(taken) == [0, 1, 2, 3]
    assert taken.index(2) < taken.index(0)


def test_block_is_known_before_it_is_announced(node: DirectNode) -> None:
    """A tier stores a chunk as soon as it is published, also while an engine has many chunks to announce."""
    writer, request = NotedEngine(node), request_of()
    writer.save(request)
    for _ in range(3):
        writer.catalog.end_step()
    (chunk, _) = writer.catalog.index(0).values()
    block = writer.events.block(chunk, chunk.tail)
    assert block is not None
    assert block.hash == request.block_hashes[3]
    assert writer.events.block(chunk, request.block_hashes[2]) is None
    assert len(writer.receive()) == 2
    assert writer.events.block(chunk, chunk.tail) == block


def test_damaged_note_is_no_block() -> None:
    """Another program of the same user may write any bytes into a note."""
    request = request_of()
    private = Noted()
    (chunk, _) = private.save(request, iter([(0, 4), (4, 8)]))
    note = BlockMaker(GEOMETRY, BLOCK).note(request, chunk, 0)
    assert read_note(note) is not None
    assert read_note(note[:-1]) is read_note(b"\x00") is None
    _, _, _, keys, *_ = fields = msgspec.msgpack.decode(note)
    for foreign, is_read in (
        ([["lora", "name", "path"]], True),
        ([["lora"]], False),
        ([["lora", 1, []]], False),
        ([[]], False),
    ):
        fields[3] = [*(keys or []), *foreign]
        assert (read_note(msgspec.msgpack.encode(fields)) is not None) == is_read
    private.events.noted(chunk, note.replace(request.block_hashes[3], bytes(32)))
    before = private.events.take()
    private.events.announce()
    assert private.events.take() == []
    assert before


def test_engine_announces_its_own_number_of_an_adapter() -> None:
    """The scheduler's role passes requests to the events when the requests arrive."""
    trial = Trial(SHAPES["node"], 2)
    try:
        trial.documents[0] = list(range(200))
        for move in (("add", 0, 199, 0, 3, 0, 1), ("drain",)):
            trial.do(move)
        events = trial.kvpipe.scheduler_role.events
        assert events is not None
        events.cleared()
        assert {(one.lora_name, one.lora_id) for one in events.take()} == {("lora1", 1)}
    finally:
        trial.close()
