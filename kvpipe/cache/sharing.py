"""The memory that several engines share, as the catalog of one of these engines sees it."""

from __future__ import annotations

from typing import Protocol


class SharedMemory(Protocol):
    """Memory whose holder grants slots to engines and publishes their chunks."""

    @property
    def answers(self) -> bool:
        """Whether the memory has a holder that answers at present."""

    @property
    def slots_usable(self) -> int:
        """The number of slots that the engines with this size of slots may use now."""

    @property
    def slots_free(self) -> int:
        """The number of slots that were granted to this engine and that no chunk uses."""

    @property
    def engines(self) -> int:
        """The number of engines with this size of slots."""
