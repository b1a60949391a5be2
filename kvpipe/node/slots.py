"""The slots of one region of a node's memory: which of them may be granted, and when their chunks were used.

The holder imports numpy only when it searches memory for a second slot size, because a new holder has to start quickly.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from kvpipe.node.layout import OWNED, READY
from kvpipe.node.ledger import Ledger
from kvpipe.statemachine import node_slot as m
from kvpipe.statemachine.cursors import Cursor

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    Ages: TypeAlias = NDArray[np.float64]

NEVER: Final = -2.0
"""The last use of a slot without a chunk. This value is less than every use."""


class RegionSlots:
    """The slots of one region. A slot is usable if it has memory, and if no other region owns bytes of it."""

    def __init__(self, ledger: Ledger, owns: Callable[[int], bool], tick: Callable[[], float]) -> None:
        """Restore the slots. `owns` returns whether this region owns all bytes of a slot. `tick` numbers the uses.

        Raises:
            ValueError: the tables contradict each other.
        """
        self._ledger, self._owns, self._tick = ledger, owns, tick
        self._free: list[int] = []
        self._slots: list[Cursor] = []
        self._records = ledger.recover()
        for record in ledger.beating(self._records):
            if record.state != m.FREE and not owns(record.slot):
                # A holder's crash cannot cause this: a client has written to the tables.
                raise ValueError(f"slot {record.slot} of the node's memory is used, but slots of another size own it")
        self._ready = int(ledger.segment.words[READY])
        self._usable = {slot for slot in ledger.beating(range(self._ready)) if owns(slot)}
        self.used = array("d", [NEVER]) * ledger.layout.slots
        """The last use of each slot's chunk. The value is infinite if the region cannot give the slot away."""
        self._show_usable()

    def use_more(self, ready: int) -> None:
        """Allow grants of the slots below `ready`, because these slots have memory now."""
        self._ledger.segment.words[READY] = ready
        first, self._ready = self._ready, max(self._ready, ready)
        self.use(range(first, self._ready))

    def use(self, slots: Sequence[int]) -> None:
        """Allow grants of each of `slots` that has memory and of which no other region owns bytes."""
        beating = self._ledger.beating(slots)
        new = [slot for slot in beating if slot < self._ready and slot not in self._usable and self._owns(slot)]
        self._usable.update(new)
        self._free[:0] = reversed(new)
        self._show_usable()

    def _use_no_more(self, slots: set[int]) -> None:
        self._usable -= slots
        self._free = [slot for slot in self._free if slot not in slots]
        self._show_usable()

    def _use_now(self, slots: Iterable[int]) -> None:
        """Record one use of the chunks in `slots`."""
        tick = self._tick()
        for slot in slots:
            self.used[slot] = tick

    def _show_usable(self) -> None:
        self._ledger.segment.words[OWNED] = len(self._usable)
