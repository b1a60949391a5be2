"""What a waiting request asks of tiers, and an order that ranks carry out for it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kvpipe.cache.catalog import Owner, Piece
from kvpipe.cache.prefixes import Prefixes
from kvpipe.messages import TierOrder
from kvpipe.scheduler.jobs import Reported
from kvpipe.statemachine import stage as m
from kvpipe.statemachine.core import Compiled, Cursor, Watch
from kvpipe.tiers.finder import Place, TierLookup

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Request, Turn

AHEAD_S_MAX: Final = 30.0
"""For so long at most chunks of one prompt are brought ahead of requests."""
_NEVER: Final = float("inf")
FIRST: Final[Turn] = -_NEVER, 0
"""No request comes before it."""
_HOLDS_UP: Final = frozenset({m.ASKING, m.FOUND, m.FETCHING})


class Stage(Cursor):
    """The fetches for one waiting request, or for a prompt that no request waits for yet (`ahead`).

    `taken`: tokens fetched, by tier. `waits`: ids of orders that have not landed. `leased`: number of chunks held.
    `local`: units of the prefix that the engine holds itself. `turn`: of the request: the lowest comes first.
    `begun_at_s`: when it was made. `again_at_s`: when tiers are asked once more for what a producer may be storing.
    `short_at_s`: when it came to less than tiers have. `waited_s`: how long the engine would have had room for it.
    `slow`: some of what is fetched is in a tier that is slower than the engine computes.
    `request`: named in what routers are notified of; None: nobody is notified. `tenant`: of the fetched chunks.
    """

    __slots__ = (
        "again_at_s", "announced", "asked", "asked_step", "begun_at_s", "deadline_at_s", "leased", "local", "lookup",
        "owner", "prefixes", "request", "room", "short_at_s", "slow", "taken", "tenant", "todo", "turn", "waited_s",
        "waits", "why",
    )  # fmt: skip

    def __init__(
        self, machine: Compiled, number: int, asked: Request, lookup: TierLookup, watch: Watch | None,
        *, prefixes: Prefixes, request: Request | None, now_s: float, room: int | None = None, announced: bool = False,
    ) -> None:  # fmt: skip
        """The tiers are asked. `asked`: the prompt, by whose hashes `prefixes` finds it.

        `room`: how many chunks it may hold, where no request waits for them. `announced`: a hint has announced one.
        """
        super().__init__(machine, number, watch)
        self.asked, self.prefixes, self.request, self.lookup, self.room = asked, prefixes, request, lookup, room
        self.announced, self.local, self.turn, self.short_at_s = announced, 0, FIRST, _NEVER
        self.owner = Owner(asked.request_id, -number)  # admissions have positive epochs
        self.begun_at_s = self.again_at_s = now_s
        self.waited_s, self.deadline_at_s = 0.0, _NEVER if room is None else now_s + AHEAD_S_MAX
        self.tenant, self.leased = prefixes.tenant(asked), 0
        self.waits: set[int] = set()
        self.todo: deque[Place] = deque()  # what is still to be ordered, in the order of the prefix
        self.taken: dict[int, int] = {}
        self.asked_step, self.slow = -1, False
        self.why = ""  # it came to nothing, or to less

    @property
    def holds_up(self) -> bool:
        """Whether the request waits for it; of one that comes before: whether it goes on."""
        return self.state.row in _HOLDS_UP

    @property
    def ahead(self) -> bool:
        """Whether no request waits."""
        return self.room is not None


class TierTransfer(Reported):
    """An order that the ranks have not all reported yet."""

    __slots__ = ("order", "piece", "space", "stages")

    def __init__(
        self, machine: Compiled, order: TierOrder, space: str, watch: Watch | None, piece: Piece | None = None
    ) -> None:
        """`space`: the chunk's namespace. `piece`: of a fetch; a store has none."""
        super().__init__(machine, order.id, watch)
        self.order, self.space, self.piece = order, space, piece
        self.stages: list[Stage] = []
