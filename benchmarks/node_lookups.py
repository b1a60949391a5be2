"""Measures lookups of a long prompt in a node's memory and in a private pool, which alternate in one process."""

from __future__ import annotations

import time
from collections import defaultdict
from hashlib import sha256
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.policy import make_policy
from kvpipe.cache.prefixes import Prefixes
from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.prefixes import NodePrefixes
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.trace.log import Counters

UNIT: Final = 16
CHUNKS: Final = 500
"""The number of chunks of a prompt of 128k tokens."""
SLOT_BYTES: Final = 4096
GEOMETRY: Final = Geometry((Group((Layer("l", 64),), UNIT),), 16 * UNIT, 2 * CHUNKS * SLOT_BYTES)

Times = dict[tuple[str, str], list[float]]
"""The times in us, by pool ("shared", "private") and by kind of lookup ("hit", "miss")."""


def hashes(name: str, chunks: int = CHUNKS) -> list[bytes]:
    """Return the block hashes of a prompt of this name."""
    return [sha256(f"{name} {n}".encode()).digest() for n in range(16 * chunks)]


class Lookups:
    """Lookups of a held prompt, and of a prompt that is not held. The time of a hit includes the pins.

    Times are the thread's CPU time, because a lookup waits for nothing: other programs take the rest of its wall time.
    """

    def __init__(self, shared: NodeCatalog) -> None:
        """Fill a private pool with the prompt. `shared` has the prompt already, or gets the prompt by `fill`."""
        self.shared = shared
        self.private = Catalog(2 * CHUNKS, 1, make_policy("lru", 2 * CHUNKS), Counters())
        self._held = hashes("hit")
        self.fill(self.private)
        self.requests = {"hit": _request(self._held), "miss": _request(hashes("miss"))}
        self.finders: dict[str, Prefixes] = {
            "private": Prefixes(self.private, GEOMETRY, UNIT, attrgetter("block_hashes")),
            "shared": NodePrefixes(shared, GEOMETRY, UNIT, attrgetter("block_hashes")),
        }

    def fill(self, catalog: Catalog) -> None:
        """Save the prompt under keys that equal the keys of later lookups, but are other objects."""
        save(catalog, [bytes(bytearray(key)) for key in self._held])

    def found(self) -> bool:
        """Whether the node's memory has the whole prompt. Polls the holder."""
        units = self.finders["shared"].longest(self.requests["hit"])
        self.shared.end_step()
        return units == 16 * CHUNKS

    def round(self, taken: Times) -> None:
        """Look up both prompts in both pools, and add the times. A shared lookup's time includes the poll of a step."""
        for name, finder in self.finders.items():
            for kind, request in self.requests.items():
                began = time.thread_time()
                units = finder.longest(request)
                if name == "shared":
                    self.shared.end_step()
                taken[name, kind].append((time.thread_time() - began) * 1e6)
                assert units == (16 * CHUNKS if kind == "hit" else 0), (name, kind, units)


def new_times() -> Times:
    """Return an empty list of times for each kind of lookup."""
    return defaultdict(list)


def save(catalog: Catalog, keys: list[bytes]) -> None:
    """Save the chunks of a prompt with the block hashes `keys`."""
    for stop in range(16, len(keys) + 1, 16):
        chunk = catalog.reserve(0)
        while chunk is None:
            assert isinstance(catalog, NodeCatalog)
            catalog.end_step()
            chunk = catalog.reserve(0)
        catalog.landed(catalog.write(chunk, 16, keys[stop - 1], keep=True))
    if isinstance(catalog, NodeCatalog):
        for _ in range(5):
            catalog.end_step()


def _request(keys: list[bytes]) -> Any:
    return SimpleNamespace(block_hashes=keys, num_tokens=len(keys) * UNIT + 1)
