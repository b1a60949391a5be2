"""Facts and functions that an engine passes to its scheduler side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvpipe.protocol.engine import Recovery, Request, SpansOf

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Chunk


class Published(Protocol):
    """An object that is notified of which chunks can be found, on behalf of routers."""

    def published(self, request: Request, chunk: Chunk, base: int) -> None:
        """A piece of `chunk` can be found from now on. The chunk begins at unit `base` of the prefix of `request`."""

    def noted(self, chunk: Chunk, note: bytes) -> None:
        """`chunk` of a node's memory can be found from now on.

        `note` was written by the engine that saved the chunk.
        """

    def announce(self) -> None:
        """Notify routers of the chunks of earlier `noted` calls, because all chunks before these are known now."""

    def dropped(self, chunk: Chunk) -> None:
        """`chunk` can no longer be found."""

    def kept(self, request: Request) -> Request | None:
        """Return the data of `request` that `published` needs after the request's end, or None if too large."""

    def block(self, chunk: Chunk, key: bytes) -> Any | None:  # noqa: ANN401  (only the engine looks into it)
        """Return the engine's description of `chunk` up to the mark `key`, or None if routers do not know this mark."""

    def stored(self, tier: int, group: int, block: Any) -> None:  # noqa: ANN401  (as above)
        """All ranks have stored `block` in the tier with the index `tier`. `block` came from the method `block`."""

    def gone(self, tier: int, group: int, blocks: Sequence[Any]) -> None:
        """The tier with the index `tier` has lost `blocks`. Each of `blocks` was passed to `stored` before."""


NoteOf = Callable[[Request, "Chunk", int], bytes]
"""Returns the note of a chunk in a node's memory, or b"" if the chunk has no note.

The arguments are a request with the chunk's prefix, the chunk, and the number of units of the prefix before the chunk.
"""


@dataclass(frozen=True)
class EngineFacts:
    """The facts of an engine that its scheduler side needs.

    `hash_tokens` is the number of tokens per block hash. `ranks` is the number of ranks. `saves` and `loads` say
    whether this engine saves and loads. `pipeline_stages` is the number of pipeline stages. Each pipeline stage has its
    own layers, and a pool of its own size. `waits_idle` says that a rank may wait for loads in a step that computes
    nothing, because no other rank waits for that rank.
    """

    hash_tokens: int
    ranks: int
    saves: bool
    loads: bool
    pipeline_stages: int = 1
    waits_idle: bool = False


def no_other_space(weights: str) -> str:
    """Return "", which means that there is no second namespace with the same bytes."""
    del weights
    return ""


@dataclass(frozen=True)
class EngineHooks:
    """The functions of an engine that its scheduler side calls.

    `recovery` does what the engine needs after failures. `published` is notified of chunks that can be found, on behalf
    of routers. `space_of` returns the namespace in tiers for a digest of the weights, or "". `also_of` returns a second
    namespace with the same bytes, or "". `priority_of` returns a request's priority; the lowest is admitted first.
    `spans_of` returns the spans of a request that no step and no hit may cut. `note_of` is None without a node's
    memory.
    """

    recovery: Recovery = field(default_factory=Recovery)
    published: Published | None = None
    space_of: Callable[[str], str] = str
    also_of: Callable[[str], str] = no_other_space
    priority_of: Callable[[Request], float] | None = None
    spans_of: SpansOf | None = None
    note_of: NoteOf | None = None
