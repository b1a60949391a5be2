"""`SHARED` names each attribute that the management thread shares with the scheduler's thread."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.connectors.vllm.scheduler_role import SchedulerRole
from kvpipe.features.orders import Turns
from kvpipe.manage import SHARED
from kvpipe.manage.api import make_app
from kvpipe.protocol.engine import LATER
from kvpipe.protocol.messages import Report, Tally
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.tiers.guard import FIND, guarded
from kvpipe.trace.recorder import Recorder
from tests.manage.conftest import Managed
from tests.manage.test_api import prompt
from tests.manage.test_tiers import SPACE, hold
from tests.rigs.scheduler_world import UNIT, SchedulerWorld
from tests.rigs.touched_attributes import AttributeWatch, classes_of

CHUNK = 16
SCHEDULER, MANAGEMENT = "scheduler", "management"
WATCHED = (
    "kvpipe.manage", "kvpipe.features", "kvpipe.scheduler", "kvpipe.cache", "kvpipe.cache.policy",
    "kvpipe.statemachine", "kvpipe.tiers",
    "kvpipe.trace.log", "kvpipe.trace.recorder",
)  # fmt: skip
ORDER_S = 0.05
"""The time for which operators wait for an order while the engine has the turn."""
ADAPTER = {"name": "x", "number": 1, "path": "/x"}


class WatchedSide:
    """A scheduler side with watched attributes, and its operators. The test's thread makes the engine's calls."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """Serve from now on. Accesses to attributes are recorded while `began` is True."""
        self.began, self._borrowed, self._engine = False, False, threading.current_thread()
        self.idles = False  # whether the engine is idle while operators send requests
        self.watch = AttributeWatch(self._role)
        self._note_turns(patch)
        self.watch.watch(classes_of(*WATCHED), patch)
        self.tier = HeldTier("far")
        tiers = guarded([("far", DictSpec.model_validate({"timeout_ms_max": 60_000}), self.tier)], (FIND,))
        quotas = [{"name": "some", "salt": "a", "limit": 0.5}]
        world = SchedulerWorld(
            slots=12, touch="ahead", tiers=tiers, quotas=quotas, policy="sessions", trace=Recorder(lifecycle=True)
        )
        self.managed, self.side, self.asked = Managed(folder, world), world.side, set[tuple[str, str]]()
        assert self.side.staging is not None
        self.side.ranks_ready({0: 10}, ["weights"])
        self.side.staging.space.base = SPACE
        connector: Any = SimpleNamespace(scheduler=self.side, counters=self.side.counters, recorder=self.side.trace)
        self.managed.engine._set_freeze = functools.partial(SchedulerRole.set_freeze, connector)
        self.managed.engine._set_bypass = functools.partial(SchedulerRole.set_bypass, connector)
        self._wait_at_most(ORDER_S)

    def _role(self) -> str | None:
        """Return the thread's role. A management thread that has the turn counts as the engine's thread."""
        thread = threading.current_thread()
        if thread is self._engine:
            return SCHEDULER if self.began else None
        return MANAGEMENT if thread.name == "kvpipe-manage" and not self._borrowed else None

    def _note_turns(self, patch: pytest.MonkeyPatch) -> None:
        borrow, give_back = Turns.borrow, Turns.give_back

        def borrowing(turns: Turns) -> bool:
            self._borrowed = borrow(turns)
            return self._borrowed

        def giving_back(turns: Turns) -> None:
            self._borrowed = False
            give_back(turns)

        patch.setattr(Turns, "borrow", borrowing)
        patch.setattr(Turns, "give_back", giving_back)

    def rest(self) -> None:
        """Make steps until the engine is idle. Then another thread may have the turn."""
        while self.side.pending:
            self.step()

    def ask(self, method: str, path: str, body: object = None, expected: int = 200) -> Any:
        """Return the answer to a request, even if the answer needs one of the engine's next steps.

        A busy engine makes steps while a read waits for steps.
        """
        self.asked.add((method, re.sub(r"/\d+$", "/N", path).partition("?")[0]))
        if self.idles:
            self.rest()
        answered = list[tuple[int, Any]]()
        asks = threading.Thread(target=lambda: answered.append(self.managed.ask(method, path, body)))
        asks.start()
        while asks.is_alive():
            if not self.idles and self.side.orders.reads:
                self.step()
            asks.join(0.001)
        ((status, answer),) = answered
        while status == 202:
            self.step()
            self.asked.add(("GET", "/v1/orders/N"))
            status, answer = self.managed.ask("GET", f"/v1/orders/{answer['order']}")
        assert status == expected, answer
        return answer

    def look(self) -> None:
        """Send all requests that only read."""
        for path in ("state", "holders", "counters", "switches", "pins", "openapi.json"):
            self.ask("GET", f"/v1/{path}" if "." not in path else f"/{path}")
        for name in ("a", "nobody"):
            self.ask("POST", "/v1/lookup", prompt(name, 4 * CHUNK * UNIT) | {"tiers": True})
        self.ask("POST", "/v1/lookup", prompt("a", CHUNK * UNIT) | {"adapter": ADAPTER})

    def change(self) -> None:
        """Send all requests that change data."""
        for name in ("freeze", "bypass"):
            for on in (True, False):
                self.ask("PUT", "/v1/switches", {name: on})
                self.step()
        wanted = prompt("a", 2 * CHUNK * UNIT)
        pin = self.ask("POST", "/v1/pins", wanted | {"seconds": 60})["pin"]
        self.look()
        self.ask("DELETE", f"/v1/pins/{pin}")
        self.ask("DELETE", f"/v1/pins/{pin}", expected=422)
        self.ask("POST", "/v1/warm", prompt("w", 2 * CHUNK * UNIT) | {"seconds": 60})
        self.ask("POST", "/v1/evict", wanted | {"from_token": CHUNK * UNIT})
        self.ask("POST", "/v1/evict/matching", {"cache_salt": "w"})

    def step(self) -> None:
        """Run a step of the engine that computes nothing. Its orders for ranks succeed."""
        step: Any = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, kv_connector_block_state=None)
        plan = self.side.plan_step(step)
        numbers = [job.id for job in plan.jobs] + [order.id for order in plan.orders]
        self.side.reported(Report(dict.fromkeys(numbers, Tally(1, 0))))

    def compute(self, request: Any) -> None:
        """Add a request, load the hit, compute the rest and save it."""
        world, until_s = self.managed.world, time.monotonic() + WAIT_S
        while (answer := self.side.lookup(request, 0)) is LATER:
            assert time.monotonic() < until_s
            time.sleep(0.001)
            self.step()
        self.side.admitted(request, world.allocate(request), answer.tokens)
        request.num_computed_tokens = answer.tokens
        jobs = world.step(request)
        self.look()
        self.side.reported(Report(dict.fromkeys([job.id for job in jobs], Tally(1, 0))))

    def live(self, name: str) -> None:
        """Save, preempt, load and finish requests, while other requests need the room."""
        world, side = self.managed.world, self.side
        first, again = world.request(name, 2 * CHUNK + 3), world.request(name, 3 * CHUNK)
        again.request_id = f"{name} again"
        first.cache_salt = again.cache_salt = "a"
        self.compute(first)
        world.preempt(first)
        self.compute(again)
        other = world.request(f"{name} other", 4 * CHUNK)
        self.compute(other)
        side.reported(Report(adapters={0: {1: name.encode()}}, step=1))
        self.look()
        for one in (first, again, other):
            side.finished(one)
        self.look()

    def wait_for_a_step(self) -> None:
        """Make operators wait until a step carries out their orders."""
        engine = self.managed.engine
        self._wait_at_most(WAIT_S)
        asks = threading.Thread(target=self.managed.ask, args=("DELETE", "/v1/pins/1"))
        asks.start()
        assert eventually(lambda: engine._bell._waiting and self.side.orders.due)
        self.step()
        asks.join()
        self._wait_at_most(ORDER_S)

    def give_up_a_read(self) -> None:
        """Make an operator's read time out, because the engine makes no step. Then make a step."""
        engine, answered = self.managed.engine, list[int]()
        self.began, engine.read_s_max = False, ORDER_S
        self.began = True
        asks = threading.Thread(target=lambda: answered.append(self.managed.ask("GET", "/v1/pins")[0]))
        asks.start()
        asks.join()
        assert answered == [503]
        self.step()
        self.began, engine.read_s_max = False, WAIT_S
        self.began = True

    def _wait_at_most(self, seconds: float) -> None:
        """Set the time for which operators wait for an order. This access is the test's own, so it is not recorded."""
        self.began = False
        self.managed.engine.wait_s_max = seconds
        self.began = True

    def replace(self) -> None:
        """Replace attributes that seldom change: ready slots, weights, tiers that are read, and all chunks."""
        side = self.side
        side.slots_ready({0: 12})
        side.weights.suspect("test")
        self.look()
        self.step()
        side.reported(Report(weights={0: (1, "others")}))
        for left in ({0}, set[int]()):
            side.reported(Report(unreadable={0: frozenset(left)}))
            self.look()
        self.live("before")
        side.reset()
        self.look()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedSide]:
    """Yield a served and watched side."""
    made = WatchedSide(tmp_path, monkeypatch)
    yield made
    made.began = False
    made.managed.server.stop()
    made.side.shutdown()


class Kept:
    """A class with a number that changes, a list that changes, and a name that never changes."""

    __slots__ = ("count", "items", "name")

    def __init__(self) -> None:
        """Write all attributes. Writes in a constructor are not recorded."""
        self.count, self.items, self.name = 0, list[int](), "kept"

    @property
    def size(self) -> int:
        """A property, which is not recorded as an attribute."""
        return len(self.items)


def test_watch_reports_attributes_that_two_threads_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch reports exactly the attributes and containers that one thread changes and the other thread reads."""
    now = SCHEDULER
    watch = AttributeWatch(lambda: now)
    watch.watch([Kept], monkeypatch)
    kept, own = Kept(), Kept()
    kept.count += 1
    kept.items.append(1)
    assert (kept.size, kept.name, own.name) == (1, "kept", "kept")
    assert not watch.shared(SCHEDULER, MANAGEMENT)
    now = MANAGEMENT
    assert (kept.name, own.name) == ("kept", "kept")
    assert not watch.shared(SCHEDULER, MANAGEMENT)
    assert (kept.count, kept.size) == (1, 1)
    assert watch.shared(SCHEDULER, MANAGEMENT) == {"Kept.count", "Kept.items"}


def test_every_attribute_that_two_threads_share_is_listed(served: WatchedSide) -> None:
    """`SHARED` names each attribute that one thread writes and the other thread uses while the turn is not lent."""
    hold(served.tier, served.managed, "w", CHUNK, 2 * CHUNK)
    served.live("a")
    served.change()
    served.idles = True
    served.change()  # the engine is idle, so the management thread makes the changes
    served.idles = False
    served.live("b")
    served.live("a")
    served.replace()
    served.wait_for_a_step()
    served.give_up_a_read()
    status, answer = served.managed.ask("DELETE", "/v1/pins/1")
    assert status == 202
    served.side.shutdown()
    assert served.managed.ask("GET", f"/v1/orders/{answer['order']}")[0] == 503
    served.managed.server.stop()
    served.began = False
    paths = make_app(served.managed.engine, served.side.counters).openapi()["paths"]
    every = {(method.upper(), re.sub(r"\{\w+\}$", "N", path)) for path, methods in paths.items() for method in methods}
    assert served.asked - {("GET", "/openapi.json")} == every
    assert served.watch.shared(SCHEDULER, MANAGEMENT) == set(SHARED)
    assert all(len(why) > 20 for why in SHARED.values())
