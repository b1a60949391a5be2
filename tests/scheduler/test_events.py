"""Tests of the events of requests: which parts are called, in which order, and what happens when a part raises."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvpipe.scheduler.events import EVENTS, Events, Subscriber, nobody
from kvpipe.scheduler.notified import NotifiedRouters
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.tiers.guard import FIND, guarded
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF
from tests.rigs.scheduler_world import SchedulerWorld

PAGE = Path(__file__).resolve().parents[2] / "docs/architecture.md"


class _Noting(Subscriber):
    """A subscriber that records every event."""

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted


def _noting(event: str) -> Any:
    def note(self: Any, *news: object) -> None:
        del news
        self._noted.append(event)

    return note


for _name in EVENTS:
    setattr(_Noting, _name, _noting(_name))


class _Raising(Subscriber):
    """A subscriber that raises at the end of a request."""

    def finished(self, tracked: object, chunks: object) -> None:
        """See `Subscriber.finished`."""
        raise RuntimeError(tracked, chunks)


def test_events_follow_the_life_of_a_request() -> None:
    """A request is saved, another request loads from it, and the cache is reset."""
    world, noted = SchedulerWorld(load="sync"), list[str]()
    world.side.events.subscribe([_Noting(noted)])
    world.publish(world.request("first", 2, shared=2))
    assert noted == ["arrived", "looked_up", "admitted", "landed", "finished"]
    noted.clear()
    request = world.request("second", 4, shared=2)
    world.admit(request)
    load = world.step(request)[0]
    world.report((load, 0, 1))
    world.side.reset()
    assert noted == ["arrived", "looked_up", "admitted", "leased", "load_failed", "reset"]


def test_subscriber_is_called_when_an_earlier_one_raises() -> None:
    """Subscribers are called in the order of the list.

    The fault is recorded with the name of the method that has raised.
    """
    counters, noted = Counters(), list[str]()
    events = Events(counters)
    counters.watcher = lambda name, fields: noted.append(f"{name} in {fields['where']}")
    events.subscribe([_Raising(), _Noting(noted)])
    tracked: Any = SimpleNamespace()
    events.finished(tracked, {})
    assert noted == ["contained_error in _Raising.finished", "finished"]


def test_event_costs_nothing_when_no_part_overrides_its_method() -> None:
    """An event without subscribers costs one comparison.

    Without tiers, no part of the scheduler side subscribes to the event `looked_up`.
    """
    assert SchedulerWorld().side.events.looked_up is nobody


def test_architecture_lists_the_subscribers_in_their_order() -> None:
    """The page has every event, and every subscriber with the events that it overrides."""
    page = PAGE.read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| `(\w+)` \| `\w+\.py` \|", page, re.MULTILINE)) == EVENTS
    rows = re.findall(r"^\d\. `(\w+)`[^:]*: (.*?)\.", page, re.MULTILINE)
    kinds = {one.__name__: one for one in Subscriber.__subclasses__()}
    for name, events in rows:
        overridden = [event for event in EVENTS if getattr(kinds[name], event) is not getattr(Subscriber, event)]
        assert overridden == re.findall(r"`(\w+)`", events), name
    side = SchedulerWorld(tiers=guarded([("a", DictSpec.model_validate({}), HeldTier("a"))], (FIND,), OFF)).side
    side._routers = NotifiedRouters(SimpleNamespace())  # type: ignore[arg-type]
    try:
        assert [type(one).__name__ for one in side._subscribers()] == [name for name, _ in rows]
    finally:
        side.shutdown()
