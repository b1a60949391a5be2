"""Notifies routers, through the engine's `Published`, of chunks that can be found.

With a node's memory, every engine notifies its own routers from the notes of chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe.node.shared import SharedChunk
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
        # a chunk without marks cannot be found, because another copy was published first
        if request is not None and piece.chunk.marks:
            self._published.published(request, piece.chunk, piece.base)


class NotedChunks(Subscriber):
    """Writes the note of each chunk into the chunk's slot of a node's memory, before the chunk's report is sent.

    The note of a chunk that is still growing is written when the chunk is reported, because each note has all tokens of
    the chunk.
    """

    def __init__(self, node: NodeCatalog, note_of: NoteOf) -> None:
        """Write the notes that `note_of` returns."""
        self._notes, self._note_of = node.notes, note_of

    def landed(self, tracked: Tracked, piece: Piece) -> None:
        """Write the note of a chunk that the request has saved."""
        self.fetched(tracked.request, piece)

    def fetched(self, request: Request | None, piece: Piece) -> None:
        """Write the note of a chunk that was fetched from a tier."""
        chunk = piece.chunk
        if request is not None and isinstance(chunk, SharedChunk):
            chunk.saved_for = request, piece.base
            whole = chunk.sealed and not chunk.writers
            if whole or request.resumable:  # a session may shorten its tokens before the report
                self.reported(chunk)

    def reported(self, chunk: SharedChunk) -> None:
        """Write the note of a chunk that is reported now, unless the chunk's last units have their note."""
        if chunk.saved_for is not None and chunk.marks:
            (request, base), chunk.saved_for = chunk.saved_for, None
            self._notes.write(chunk.slot, chunk.marks[-1].key, self._note_of(request, chunk, base))
