"""Operators pin and evict while the engine serves, while it is idle, and when it ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvpipe.cli import main as cli
from kvpipe.features.orders import ORDERS_MAX
from kvpipe.manage.engine import ManagedEngine
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.testing.waiting import WAIT_S, eventually
from tests.manage.conftest import Managed
from tests.manage.test_api import prompt
from tests.rigs.scheduler_world import UNIT

CHUNK = 16


def test_prompt_is_pinned_while_the_engine_is_idle(managed: Managed) -> None:
    """The order is carried out without a step, and the pin is listed until it ends."""
    managed.side.finished(managed.save("a", 2 * CHUNK + 3))
    assert not managed.side.pending
    answered = managed.good("POST", "/v1/pins", prompt("a", 40 * UNIT) | {"seconds": 60})
    assert answered.pop("left_s") > 0
    assert answered == {"pin": 1, "tokens": (2 * CHUNK + 3) * UNIT, "chunks": 3}
    listed = managed.good("GET", "/v1/pins")
    assert [one["pin"] for one in listed["pins"]] == [1]
    assert (listed["chunks"], listed["chunks_max"]) == (3, managed.side.catalog.slots // 2)
    state = managed.good("GET", "/v1/state")
    assert (state["pool"]["leases"], state["pool"]["chunks_pinned"]) == (3, 3)
    assert managed.good("DELETE", "/v1/pins/1")["chunks"] == 3
    assert managed.good("GET", "/v1/pins")["pins"] == []
    check_integrity(managed.side.catalog)


def test_chunks_are_evicted_while_the_engine_is_idle(managed: Managed) -> None:
    """Only chunks of the given salt are evicted, beginning at the given token."""
    for name in ("a", "b"):
        managed.side.finished(managed.save(name, 3 * CHUNK))
    assert not managed.side.pending
    wanted = prompt("a", 3 * CHUNK * UNIT)
    gone = managed.good("POST", "/v1/evict", wanted | {"from_token": CHUNK * UNIT})
    assert gone == {"chunks": 2, "held": 0, "pins_ended": 0}
    assert managed.good("POST", "/v1/lookup", wanted)["held_tokens"] == CHUNK * UNIT
    assert managed.good("POST", "/v1/evict", wanted)["chunks"] == 1
    answered = managed.good("POST", "/v1/lookup", wanted)
    assert (answered["held_tokens"], answered["why"]) == (0, "evicted")
    assert managed.good("POST", "/v1/lookup", prompt("b", 3 * CHUNK * UNIT))["held_tokens"] == 3 * CHUNK * UNIT
    check_integrity(managed.side.catalog)


def test_pin_of_an_evicted_chunk_ends_while_the_engine_is_idle(managed: Managed) -> None:
    """Evicting a pinned chunk ends its pin. The pin's other slots become free at once, without a step."""
    managed.side.orders.slice_s_max = 0  # the shortest slices
    managed.side.finished(managed.save("a", 2 * CHUNK))
    assert not managed.side.pending
    managed.good("POST", "/v1/pins", prompt("a", 2 * CHUNK * UNIT) | {"seconds": 60})
    assert managed.good("POST", "/v1/evict", prompt("a", 2 * CHUNK * UNIT))["pins_ended"] == 1
    assert not managed.side.orders.due
    assert (managed.side.catalog.leases, managed.side.catalog.used) == (0, 0)


def test_an_engine_that_became_idle_with_many_orders(managed: Managed) -> None:
    """When an engine becomes idle, it first carries out the orders that wait.

    So the next order is not refused because of them.
    """
    managed.side.finished(managed.save("a", 2 * CHUNK))
    waiting = [managed.side.orders.queue_change(lambda: managed.side.pins.unpin(99)) for _ in range(ORDERS_MAX)]
    assert managed.ask("DELETE", "/v1/pins/1")[0] == 503, "a busy engine has no room for more"
    assert not managed.side.pending
    assert managed.good("POST", "/v1/evict", prompt("a", 2 * CHUNK * UNIT))["chunks"] == 2
    assert all(order.over for order in waiting)


def test_busy_engine_carries_out_an_order_in_its_next_step(managed: Managed) -> None:
    """The first answer says that the order is pending. After the step, the result can be read."""
    managed.engine.wait_s_max = 0.01
    request = managed.save("a", CHUNK)
    managed.busy()
    wanted = prompt("a", CHUNK * UNIT) | {"seconds": 60}
    status, answered = managed.ask("POST", "/v1/pins", wanted)
    assert (status, answered["pending"]) == (202, True)
    assert answered["waits_for"].startswith("the engine's next step")
    assert managed.ask("GET", f"/v1/orders/{answered['order']}")[0] == 202
    assert managed.side.catalog.leases == 0
    for _ in range(3):  # a slice may end early, so one step may not suffice
        managed.world.step()
    assert managed.good("GET", f"/v1/orders/{answered['order']}")["chunks"] == 1
    managed.side.finished(request)
    status, answered = managed.ask("DELETE", "/v1/pins/9")
    assert status == 202
    for _ in range(3):
        managed.world.step()
    assert managed.ask("GET", f"/v1/orders/{answered['order']}") == (422, {"error": "pin: there is no pin 9"})
    assert managed.ask("GET", "/v1/orders/77") == (422, {"error": "order: no order 77 is remembered"})


def test_waiting_for_a_busy_engine_takes_no_time(managed: Managed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that wait do not poll. Each operator reads its order only when it is notified."""
    looked, real = list[int](), ManagedEngine._slice

    def counted(engine: ManagedEngine) -> bool:
        looked.append(1)
        return real(engine)

    monkeypatch.setattr(ManagedEngine, "_slice", counted)
    managed.engine.wait_s_max = 0.5
    managed.busy()
    statuses = list[int]()
    threads = [
        threading.Thread(target=lambda: statuses.append(managed.ask("DELETE", "/v1/pins/9")[0])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [202] * 8, "nobody has made a step"
    assert len(looked) <= 8 * 3


def test_waiting_operator_is_answered_as_soon_as_the_order_is_carried_out(managed: Managed) -> None:
    """The answer is sent after the step, or as soon as the engine is idle."""
    side, answered = managed.side, list[int]()
    managed.busy()
    for how in (managed.world.step, lambda: side.pending):
        thread = threading.Thread(target=lambda: answered.append(managed.ask("DELETE", "/v1/pins/9")[0]))
        thread.start()
        assert eventually(lambda: side.orders.due)
        how()
        thread.join(WAIT_S)
    assert answered == [422, 422]


def test_orders_are_refused_when_the_engine_ends(managed: Managed) -> None:
    """Orders that wait, and later orders, are refused."""
    waiting, answered = threading.Event(), list[Any]()
    managed.busy()

    def order() -> None:
        waiting.set()
        answered.append(managed.ask("DELETE", "/v1/pins/1"))

    thread = threading.Thread(target=order)
    thread.start()
    waiting.wait()
    managed.side.shutdown()
    thread.join()
    answered.append(managed.ask("DELETE", "/v1/pins/1"))
    assert answered == [(503, {"error": "the engine is shutting down"})] * 2


@pytest.mark.parametrize(
    ("method", "path", "body", "wording"),
    [
        ("POST", "/v1/pins", {"tokens": [1]}, "missing required field `seconds`"),
        ("POST", "/v1/pins", {"tokens": [1], "seconds": 0}, "seconds"),
        ("POST", "/v1/pins", {"tokens": [1], "seconds": "1"}, "seconds"),
        ("POST", "/v1/pins", {"tokens": [1], "seconds": 1e8}, "seconds: 1e+08 are more than manage_pin_s_max"),
        ("POST", "/v1/pins", {"tokens": [1], "seconds": 1}, "nothing of this prompt is in memory"),
        ("POST", "/v1/pins", {"tokens": [1], "seconds": 1, "share": 1}, "unknown field `share`"),
        ("POST", "/v1/evict", {"tokens": [1], "from_token": -1}, "from_token"),
        ("POST", "/v1/evict", {"tokens": []}, "tokens"),
        (
            "POST",
            "/v1/evict",
            {"tokens": [1], "adapter": {"name": "x", "number": 1, "path": "/x"}},
            "adapter: some rank",
        ),
        ("POST", "/v1/warm", {"tokens": [1]}, "this engine has no tiers"),
        ("POST", "/v1/warm", {"tokens": [1], "seconds": -1}, "seconds"),
        ("DELETE", "/v1/pins/0", None, "pin"),
        ("DELETE", "/v1/pins/x", None, "pin"),
        ("DELETE", "/v1/pins/5", None, "pin: there is no pin 5"),
    ],
)
def test_refused_order_names_the_field_and_is_counted(
    managed: Managed, method: str, path: str, body: Any, wording: str
) -> None:
    """The refusal names the field and is counted."""
    assert not managed.side.pending
    status, answered = managed.ask(method, path, body)
    assert (status, managed.refused("request")) == (422, 1)
    assert wording in answered["error"]


def test_serving_continues_during_pins_and_evictions(managed: Managed) -> None:
    """One thread serves requests, another thread pins and evicts. No chunk is lost and no call fails."""
    over, answered = threading.Event(), list[int]()
    managed.engine.wait_s_max = 25

    def order() -> None:
        turn = 0
        while not over.is_set():
            wanted = prompt(f"r{turn % 40}", 20 * UNIT)
            answered.append(managed.ask("POST", "/v1/pins", wanted | {"seconds": 60})[0])
            answered.append(managed.ask("POST", "/v1/evict", wanted)[0])
            turn += 1

    thread = threading.Thread(target=order)
    thread.start()
    for turn in range(400):
        managed.side.finished(managed.save(f"r{turn}", 1 + turn % 40))
        if turn % 2:
            assert not managed.side.pending
    over.set()
    assert not managed.side.pending
    thread.join()
    assert set(answered) <= {200, 422}
    managed.world.step()
    check_integrity(managed.side.catalog)
    assert managed.side.counters["contained_error"] == 0


def test_cache_commands_pin_evict_and_warm(
    managed: Managed, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The commands `kvpipe cache pin`, `pins`, `unpin`, `evict`, `warm` and `order` work."""
    managed.side.finished(managed.save("a", 20))
    assert not managed.side.pending
    at = ["--json", "--at", str(managed.address), "--token-file", str(tmp_path / "token")]
    (tmp_path / "ids").write_text(str(list(range(20 * UNIT))), encoding="utf-8")
    asked = [f"@{tmp_path}/ids", "--salt", "a", *at]

    def stated(*words: str) -> str:
        assert cli.main(["cache", *words]) == 0
        return capsys.readouterr().out

    assert '"pin": 1' in stated("pin", *asked, "--seconds", "60")
    assert f'"tokens": {20 * UNIT}' in stated("pins", *at)
    assert '"chunks": 2' in stated("unpin", "1", *at)
    assert '"chunks": 1' in stated("evict", *asked, "--from-token", str(17 * UNIT))
    assert cli.main(["cache", "warm", *asked, "--seconds", "60"]) == 2
    assert "this engine has no tiers" in capsys.readouterr().err
    assert cli.main(["cache", "order", "3", *at]) == 2
    assert "order: no order 3 is remembered" in capsys.readouterr().err
