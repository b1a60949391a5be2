"""The fetches from tiers for one prompt, and the orders with which ranks carry out these fetches."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.cache.chunks import Owner, Piece
from kvpipe.cache.prefixes import Prefixes
from kvpipe.protocol.messages import TierOrder
from kvpipe.scheduler.reported import Reported
from kvpipe.statemachine import stage as m
from kvpipe.statemachine.core import Compiled, Cursor, Watch
from kvpipe.tiers.finder import Place, TierLookup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpipe.protocol.engine import Precedence, Request

AHEAD_S_MAX: Final = 30.0
"""The longest time in which the chunks of one prompt are fetched ahead of requests, in seconds."""
_NEVER: Final = float("inf")
FIRST: Final[Precedence] = -_NEVER, 0
"""A precedence that is lower than every request's precedence."""
_HOLDS_UP: Final = frozenset({m.ASKING, m.FOUND, m.FETCHING})


class WantedPrompt(NamedTuple):
    """A prompt that may have more chunks in tiers than in memory.

    `asked` has the block hashes under which `prefixes` finds the prompt's chunks. Routers are notified about fetched
    chunks in the name of `request`. If `request` is None, no router is notified. A hit covers at most `units_max`
    units, or any number if `units_max` is None. Only the tiers with the indices `tiers` are asked. None means all.
    """

    asked: Request
    prefixes: Prefixes
    request: Request | None
    units_max: int | None = None
    tiers: frozenset[int] | None = None

    @property
    def stop(self) -> int:
        """The number of units that a hit may cover."""
        units = self.prefixes.final_units(self.asked, self.asked.num_tokens)
        return units if self.units_max is None else min(units, self.units_max)


class Stage(Cursor):
    """The fetches of one prompt: a `RequestStage` or an `AheadStage`.

    `taken` has the number of fetched tokens by tier. `waits` has the ids of tier orders that have not landed. `leased`
    is the number of chunks that the stage holds. `slow` says that the tier of some fetched chunks is slower than
    computing these chunks. `tenant` is the owner of fetched chunks. `local` is the number of units of the prefix that
    the engine's own cache holds. The stage with the lowest `precedence` is served first. `waited_s` is the time in
    seconds for which the request has waited although the engine had room for it.
    """

    __slots__ = (
        "asked",
        "leased",
        "local",
        "lookup",
        "owner",
        "precedence",
        "prefixes",
        "request",
        "slow",
        "taken",
        "tenant",
        "todo",
        "waited_s",
        "waits",
        "wanted",
        "why",
    )  # fmt: skip

    def __init__(
        self, machine: Compiled, number: int, watch: Watch | None, wanted: WantedPrompt, lookup: TierLookup,
        precedence: Precedence,
    ) -> None:  # fmt: skip
        """Start in the state ASKING, in which the tiers process `lookup`."""
        super().__init__(machine, number, watch)
        self.wanted, self.asked, self.prefixes, self.request = wanted, wanted.asked, wanted.prefixes, wanted.request
        self.lookup, self.precedence, self.local, self.waited_s = lookup, precedence, 0, 0.0
        self.owner = Owner(self.asked.request_id, -number)  # admissions have positive epochs
        self.tenant, self.leased = self.prefixes.tenant(self.asked), 0
        self.waits: set[int] = set()
        self.todo: deque[Place] = deque()  # places whose chunks are not ordered yet, in the order of the prefix
        self.taken: dict[int, int] = {}
        self.slow = False
        self.why = ""  # why the stage has fetched nothing, or less than was found

    @property
    def holds_up(self) -> bool:
        """Whether the stage is still asking or fetching. A request waits until its stage has ended."""
        return self.state.row in _HOLDS_UP

    def brought(self, names: Sequence[str], tokens: int) -> tuple[tuple[str, int], ...]:
        """Return pairs (tier's name, number of tokens): how many of a hit's `tokens` tokens came from each tier.

        `names` are the names of the tiers.
        """
        out: list[tuple[str, int]] = []
        for tier, some in sorted(self.taken.items()):
            out.append((names[tier], min(some, tokens)))
            tokens -= out[-1][1]
        return tuple(one for one in out if one[1])

    @property
    def ahead(self) -> bool:
        """Whether this stage fetches ahead of requests, so that no request waits for the stage."""
        return isinstance(self, AheadStage)


class RequestStage(Stage):
    """The fetches for one waiting request.

    `begun_at_s` is the time at which the stage was made. `again_at_s` is the time at which tiers are asked again for
    chunks that a producer may be storing. `short_at_s` is the time at which the stage ended with fewer chunks than
    tiers hold. `asked_step` is the step in which the engine has last asked for the request.
    """

    __slots__ = ("again_at_s", "asked_step", "begun_at_s", "short_at_s")

    def __init__(
        self, machine: Compiled, number: int, watch: Watch | None, wanted: WantedPrompt, lookup: TierLookup,
        *, precedence: Precedence, step: int, now_s: float,
    ) -> None:  # fmt: skip
        """Start the stage in step `step`. All lookups of the engine within one step get the same answer."""
        super().__init__(machine, number, watch, wanted, lookup, precedence)
        self.begun_at_s = self.again_at_s = now_s
        self.asked_step, self.short_at_s = step, _NEVER


class AheadStage(Stage):
    """The fetches of a prompt for which no request waits yet. The stage may hold `room` chunks, until `deadline_at_s`.

    `announced` says that a hint has announced a request with this prompt. Otherwise an operator warms the prompt.
    """

    __slots__ = ("announced", "deadline_at_s", "room")

    def __init__(
        self, machine: Compiled, number: int, watch: Watch | None, wanted: WantedPrompt, lookup: TierLookup,
        *, room: int, announced: bool, now_s: float,
    ) -> None:  # fmt: skip
        """Create the stage. Every stage for which a request waits is served before an `AheadStage`."""
        super().__init__(machine, number, watch, wanted, lookup, FIRST)
        self.room, self.announced, self.deadline_at_s = room, announced, now_s + AHEAD_S_MAX


class TierTransfer(Reported):
    """A tier order that not all ranks have reported yet. `space` is the namespace of the order's chunk."""

    __slots__ = ("order", "space")

    def __init__(self, machine: Compiled, order: TierOrder, space: str, watch: Watch | None) -> None:
        """Register an order that is sent with the step that is being planned."""
        super().__init__(machine, order.id, watch)
        self.order, self.space = order, space


class TierStore(TierTransfer):
    """A store of a chunk in a tier."""

    __slots__ = ()


class TierFetch(TierTransfer):
    """A fetch of `piece` from a tier. `stages` are the stages that wait for the fetch."""

    __slots__ = ("piece", "stages")

    def __init__(self, machine: Compiled, order: TierOrder, space: str, watch: Watch | None, piece: Piece) -> None:
        """Start without stages."""
        super().__init__(machine, order, space, watch)
        self.piece = piece
        self.stages: list[Stage] = []

    @property
    def request(self) -> Request | None:
        """A request with the chunk's prefix, or None if only prefetches without a request wait."""
        return next((stage.request for stage in self.stages if stage.request is not None), None)
