"""The holder's objects for the chunks and the engines of a node's memory, and the refusal of an engine."""

from __future__ import annotations

from kvpipe.node.layout import ClientRow, Process
from kvpipe.statemachine.cursors import Compiled, Cursor, Watch


class NodeChunk:
    """A published chunk, as the policy sees it."""

    __slots__ = ("before", "identity", "place", "slot")

    def __init__(self, slot: int, identity: tuple[int, int, bytes]) -> None:
        """Create a chunk. `identity` is (namespace, cache group, key)."""
        self.slot, self.identity, self.before, self.place = slot, identity, b"", 0


class NodeClient(Cursor):
    """An engine: a cursor of the node_client machine.

    `granted` has the generation of each slot that the engine may write.

    `helpers` are the `processes` whose exit does not end the engine, such as a tier's client.
    """

    __slots__ = ("dead", "granted", "helpers", "name", "namespace", "processes", "published", "row", "stock", "token")

    def __init__(self, machine: Compiled, row: int, record: ClientRow, watch: Watch | None) -> None:
        """Create a client. `processes` has the engine's processes, and `dead` has the exited processes among them."""
        super().__init__(machine, row, watch)
        self.row, self.token, self.namespace = row, record.token, record.namespace
        self.processes, self.dead, self.helpers = set(record.processes), set[Process](), set(record.helpers)
        self.granted: dict[int, int] = {}
        self.name, self.stock, self.published = "", 0, 0  # for operators


class RefusedError(ValueError):
    """The holder refuses the greeting of a process. `again` says that a later try may succeed."""

    def __init__(self, why: str, *, again: bool = False) -> None:
        """Keep the reason `why`."""
        super().__init__(why)
        self.again = again
