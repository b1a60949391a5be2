"""The numbers of the namespaces in a node's memory, in the order of their last use."""

from __future__ import annotations

from collections.abc import Container

from kvpipe.node.layout import NAMESPACES_MAX
from kvpipe.node.ledger import Ledger


class NodeNamespaces:
    """The numbers of the namespaces, by digest."""

    def __init__(self, ledger: Ledger) -> None:
        """Read the numbers that earlier holders have assigned."""
        self._ledger = ledger
        self.numbers = ledger.namespaces()
        self._uses: dict[int, None] = dict.fromkeys(self.numbers.values())  # the least recently used first

    def use(self, number: int) -> None:
        """Record a use of the namespace with this number."""
        self._uses.pop(number, None)
        self._uses[number] = None

    def give(self, digest: bytes, number: int) -> None:
        """Assign `number` to a new namespace. The namespace that had `number` before has neither clients nor chunks."""
        self.numbers = {one: known for one, known in self.numbers.items() if known != number} | {digest: number}
        self._ledger.set_namespace(number, digest)

    def unused(self, used: Container[int]) -> int | None:
        """Return a number that is not in `used`, or None."""
        return next((number for number in range(NAMESPACES_MAX) if number not in used), None)

    def oldest(self, kept: Container[int]) -> int:
        """Return the least recently used number that is not in `kept`. `kept` must not contain every number."""
        return next(number for number in self._uses if number not in kept)
