"""Notifies routers, through the engine's `Published`, of chunks that can be found.

With a node's memory, every engine notifies its own routers from the notes of chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe.scheduler.events import Subscriber

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Piece
    from kvpipe.node.catalog import NodeCatalog
    from kvpipe.protocol.engine import Request
    from kvpipe.scheduler.hooks import NoteOf, Published
    from kvpipe.scheduler.records import Tracked


class NotifiedRouters(Subscriber):
    """Notifies the routers of one engine of published pieces. The catalog itself reports dropped chunks."""

    def __init__(self, published: Published) -> None:
        """Notify routers by calling `published`."""
        self._published = published

    def landed(self, tracked: Tracked, piece: Piece) -> None:
        """Notify routers of a piece that the request has saved."""
        self.fetched(tracked.request, piece)

    def fetched(self, request: Request | None, piece: Piece) -> None:
        """Notify routers of a piece that was fetched from a tier."""
        if request is not None and piece.chunk.marks:  # without marks, another copy of the chunk was published first
            self._published.published(request, piece.chunk, piece.base)


class NotedChunks(Subscriber):
    """Writes the note of each landed chunk into the chunk's slot of a node's memory, before the chunk is reported."""

    def __init__(self, node: NodeCatalog, note_of: NoteOf) -> None:
        """Write the notes that `note_of` returns."""
        self._notes, self._note_of = node.notes, note_of

    def landed(self, tracked: Tracked, piece: Piece) -> None:
        """Write the note of a chunk that the request has saved."""
        self.fetched(tracked.request, piece)

    def fetched(self, request: Request | None, piece: Piece) -> None:
        """Write the note of a chunk that was fetched from a tier."""
        if request is not None:
            self._notes.write(piece.chunk.slot, piece.key, self._note_of(request, piece.chunk, piece.base))
