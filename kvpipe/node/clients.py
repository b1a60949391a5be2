"""The holder's objects for the chunks and the engines of a node's memory, and the refusal of an engine."""

from __future__ import annotations

import logging

from kvpipe.cache.policy.large import untracked
from kvpipe.node.layout import ClientRow, Process, SlotRecord, link_of
from kvpipe.statemachine.cursors import Compiled, Cursor, Edge, State, Watch

_log = logging.getLogger("kvpipe.node")


class NodeChunk:
    """A published chunk, as the policy sees it. The garbage collector ignores chunks (`large.untracked`)."""

    __slots__ = ("before", "found_by", "identity", "place", "slot")

    def __init__(self, record: SlotRecord) -> None:
        """Create the chunk of a record.

        `found_by` is (namespace, cache group, key). `identity` and `before` are those of `Evictable`. As in a private
        pool, chunks of several cache groups with the same key have the same identity.
        """
        space = record.namespace.to_bytes(4, "little")
        self.slot, self.place, self.found_by = record.slot, 0, (record.namespace, record.group, record.key)
        self.identity, self.before = link_of(record.key) + space, record.behind and record.behind + space
        untracked(self)


class NodeClient(Cursor):
    """An engine: a cursor of the node_client machine.

    `granted` has the generation of each slot that the engine may write.

    `helpers` are the `processes` whose exit does not end the engine, such as a tier's client. `begun` has the stamps of
    a use whose other stamps come in the next batch.
    """

    __slots__ = (
        "begun", "dead", "granted", "helpers", "name", "namespace", "processes", "published", "row", "stock", "token",
    )  # fmt: skip

    def __init__(self, machine: Compiled, row: int, record: ClientRow, watch: Watch | None) -> None:
        """Create a client. `processes` has the engine's processes, and `dead` has the exited processes among them."""
        super().__init__(machine, row, watch)
        self.row, self.token, self.namespace = row, record.token, record.namespace
        self.processes, self.dead, self.helpers = set(record.processes), set[Process](), set(record.helpers)
        self.granted: dict[int, int] = {}
        self.begun = b""
        self.name, self.stock, self.published = "", 0, 0  # for operators


class RefusedError(ValueError):
    """The holder refuses the greeting of a process. `again` says that a later try may succeed."""

    def __init__(self, why: str, *, again: bool = False) -> None:
        """Keep the reason `why`."""
        super().__init__(why)
        self.again = again


def log_client(cursor: Cursor, was: State, edge: Edge, _: str) -> None:
    """Log a move of an engine."""
    if edge.moves and isinstance(cursor, NodeClient):
        states = was.name, edge.to.name
        _log.info("node_client row=%d name=%s on=%s was=%s now=%s", cursor.row, cursor.name, edge.event, *states)
