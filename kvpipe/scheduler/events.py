"""The events of a request, and the parts that subscribe to these events. `SchedulerSide` orders the subscribers.

A subscriber reacts to an event that has happened. A part that makes a decision, or that the engine needs to continue,
is called by name instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Chunk, Piece
    from kvpipe.protocol.engine import LookupAnswer, Request, Tables
    from kvpipe.scheduler.in_flight import JobInFlight
    from kvpipe.scheduler.records import Tracked
    from kvpipe.scheduler.wishes import RawHints
    from kvpipe.trace.log import Counters


class Subscriber:
    """A part that reacts to events by overriding methods. The methods are in the order of a request's life."""

    __slots__ = ()

    def arrived(self, tracked: Tracked, hints: RawHints | None) -> None:
        """A request is tracked from now on. `hints` are the hints that came with the request, not parsed yet."""

    def looked_up(self, tracked: Tracked, answer: LookupAnswer) -> None:
        """A lookup was answered or postponed.

        If the lookup was postponed, `answer` is `LATER`, and `tracked.asking` has the reason.

        The engine repeats the lookup of a waiting request, perhaps in every step.
        """

    def admitted(self, tracked: Tracked, tables: Tables) -> None:
        """Blocks were allocated, for the first time or again after a preemption or a failed load.

        If the request loads a hit, its state is ALLOCATED. `tracked.asking` still has the answer of the lookup. If the
        row of `tracked.asking` is UNASKED, the engine made no lookup for this admission. The other fields are then
        stale or not set.
        """

    def leased(self, tracked: Tracked, chunks: list[Chunk]) -> None:
        """The chunks that the request's load reads were leased."""

    def landed(self, tracked: Tracked, piece: Piece) -> None:
        """A piece that the request has saved can be found from now on. The request may have ended already."""

    def fetched(self, request: Request | None, piece: Piece) -> None:
        """A piece that was fetched from a tier can be found from now on.

        `request` is a request whose prefix has the piece, or None if no request is known.
        """

    def load_failed(self, tracked: Tracked, load: JobInFlight) -> None:
        """A load of the request has failed on some rank. This method is called once for each failed load."""

    def finished(self, tracked: Tracked, chunks: dict[Chunk, None]) -> None:
        """The request is over, and its keys are still known.

        The request's cursor is FINISHED, or DRAINING until all ranks have reported the request's load. The request may
        never have been admitted. `chunks` is empty if the request's id was used again before the request was over.
        """

    def reset(self) -> None:
        """Every chunk is about to be forgotten."""


def nobody(*_: object) -> None:
    """Do nothing. An event without subscribers calls this function."""


class Events:
    """The events of one scheduler side.

    Each event is a function with the name and arguments of a method of `Subscriber`.

    An event calls its subscribers in their order. If a subscriber raises, the error is counted, and the other
    subscribers are called all the same.
    """

    __slots__ = (
        "_counters", "admitted", "arrived", "fetched", "finished", "landed", "leased", "load_failed", "looked_up",
        "reset",
    )  # fmt: skip

    def __init__(self, counters: Counters) -> None:
        """Start without subscribers."""
        self._counters = counters
        self.arrived: Callable[[Tracked, RawHints | None], object] = nobody
        self.looked_up: Callable[[Tracked, LookupAnswer], object] = nobody
        self.admitted: Callable[[Tracked, Tables], object] = nobody
        self.leased: Callable[[Tracked, list[Chunk]], object] = nobody
        self.landed: Callable[[Tracked, Piece], object] = nobody
        self.fetched: Callable[[Request | None, Piece], object] = nobody
        self.load_failed: Callable[[Tracked, JobInFlight], object] = nobody
        self.finished: Callable[[Tracked, dict[Chunk, None]], object] = nobody
        self.reset: Callable[[], object] = nobody

    def subscribe(self, subscribers: Iterable[Subscriber]) -> None:
        """Call each of `subscribers`, in this order, for the events whose methods that subscriber overrides.

        `subscribers` replace the present subscribers of these events.
        """
        everybody = [*subscribers]
        for name in EVENTS:
            overriding = (one for one in everybody if getattr(type(one), name) is not getattr(Subscriber, name))
            if calls := [getattr(one, name) for one in overriding]:
                setattr(self, name, (self._of_all if name == "reset" else self._of_one)(calls))

    def _of_one(self, calls: Sequence[Callable[[Any, Any], object]]) -> Callable[[Any, Any], object]:
        """Return an event of one request. The event has named arguments, because `*args` would take 0.2 us longer."""

        def event(subject: object, news: object) -> None:
            for call in calls:
                try:
                    call(subject, news)
                except Exception as e:  # noqa: BLE001  (the request continues)
                    self._contain(call, e)

        return event

    def _of_all(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        """Return an event of all requests."""

        def event() -> None:
            for call in calls:
                try:
                    call()
                except Exception as e:  # noqa: BLE001  (the other subscribers must still forget)
                    self._contain(call, e)

        return event

    def _contain(self, call: Callable[..., object], error: Exception) -> None:
        self._counters.fault("contained_error", where=getattr(call, "__qualname__", "subscriber"), error=repr(error))


EVENTS: Final = tuple(name for name in vars(Subscriber) if not name.startswith("_"))
"""The names of all events, in the order of a request's life."""
