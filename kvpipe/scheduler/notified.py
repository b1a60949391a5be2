"""Notifies routers, through the engine's `Published`, of chunks that can be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe.scheduler.events import Subscriber

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Piece
    from kvpipe.protocol.engine import Request
    from kvpipe.scheduler.hooks import Published
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
