"""Chunks, the marks under which they are found, the pieces in which they are written, and owners of leases."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvpipe.cache.policy.large import untracked
from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.statemachine.core import Compiled, Cursor, Watch


class Owner(NamedTuple):
    """The owner of a lease: one admission of one request."""

    request: str
    epoch: int


class EvictedError(LookupError):
    """A chunk was evicted before it could be leased."""


class Mark(msgspec.Struct, frozen=True, gc=False):
    """The first `units` units of the chunk can be found under `key`. A mark with `keep` stays when the chunk grows."""

    units: int
    key: bytes
    keep: bool


class Chunk(Cursor):
    """The content of one slot, as a cursor of the chunk machine.

    The garbage collector ignores chunks (`large.untracked`). Therefore no object that a chunk refers to may refer to
    the chunk or to the catalog.
    """

    __slots__ = (
        "before", "era", "group", "identity", "keeps", "leases", "marks", "place", "ready", "slot", "tail", "tenant",
        "used_s", "writers", "written",
    )  # fmt: skip

    stamp: bytes = b""
    """The chunk's stamp in a node's memory (see `Job.stamps`). In a private pool it is b""."""

    def __init__(
        self, machine: Compiled, group: int, slot: int, watch: Watch | None = None, tenant: Tenant = ANYBODY
    ) -> None:
        """Create the chunk of `slot` in cache group `group`. Its other attributes are as follows.

        `written` is the number of units that writers have claimed. `ready` is the number of units that have landed on
        every rank. `tail` is the prefix hash at `written`. Only a request with that prefix may add units. `keeps` is
        the key of the mark that another request used last. `before` is the key of the previous chunk of the prefix, or
        b"" for the first chunk. `used_s` is the time of the last use in whole seconds of the catalog's clock, and is
        not updated while the chunk is held. `era` is the catalog's era at the chunk's creation. A reset begins a new
        era, which held chunks get, too. All chunks of an era refer to one object. `identity` is the key of the longest
        mark, followed by the era. Chunks with equal content have equal identities if they are of one era. `place`
        belongs to the policy (`Evictable.place`).
        """
        # the same attributes as `Cursor.__init__` sets
        self.machine, self.key, self.state, self.watch = machine, slot, machine.initial, watch
        self.group, self.slot, self.tenant = group, slot, tenant
        self.written = self.ready = self.writers = self.leases = self.used_s = self.place = 0
        self.marks: tuple[Mark, ...] = ()
        self.tail = self.keeps = self.before = self.era = self.identity = b""
        untracked(self)

    @property
    def held(self) -> bool:
        """Whether any job or tier order reads or writes the chunk, or any lease holds it."""
        return self.writers > 0 or self.leases > 0

    @property
    def is_published(self) -> bool:
        """Whether the landed units can be found. In a node's memory, another process publishes the chunk later."""
        return True

    def seal(self) -> None:
        """Record that the request that fills the chunk adds no more units. Other requests may still add units."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Units [start, stop) of a chunk, which one job writes. The units can be found under `key` once they have landed.

    `keep` is explained in `Mark`. `base` is the number of units of the prefix before the chunk.
    """

    chunk: Chunk
    start: int
    stop: int
    key: bytes
    keep: bool
    base: int = 0
