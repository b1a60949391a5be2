"""The holders of the pool are listed, and whole tenants and chunks that were unused for long can be evicted."""

from __future__ import annotations

import gc
import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cache.tenants import Tenant
from kvpipe.cli import main as cli
from kvpipe.features.pins import PART_CHUNKS, PART_SLOTS
from kvpipe.manage import reads
from kvpipe.manage.salts import salt_digest
from kvpipe.testing.catalog_integrity import check_integrity
from tests.manage.conftest import TOKEN, Managed
from tests.manage.test_api import prompt
from tests.rigs.scheduler_world import UNIT, SchedulerWorld

ALICE, BOB = (salt_digest(TOKEN.encode(), name) for name in ("alice", "bob"))


def evict(managed: Managed, **wanted: Any) -> Any:
    """Carry out an eviction while the engine is idle, and check the catalog."""
    managed.side.turns.give()
    answered = managed.good("POST", "/v1/evict/matching", wanted)
    managed.world.check()
    return answered


def save(managed: Managed, name: str, units: int, salt: str = "") -> Any:
    """Save and finish a request."""
    request = managed.save(name, units, salt)
    managed.side.finished(request)
    return request


def tenant(managed: Managed, salt: str, adapter: str = "", digest: bytes = b"") -> Tenant:
    """Return the tenant of requests with this salt and adapter."""
    lora = SimpleNamespace(lora_name=adapter, lora_path="/x") if adapter else None
    asked: Any = SimpleNamespace(cache_salt=salt, lora_request=lora)
    return managed.side.catalog.tenants.of(asked, digest)


def keep(managed: Managed, key: bytes, whose: Tenant) -> None:
    """Put a chunk of `tenant` into the pool."""
    catalog = managed.side.catalog
    chunk = catalog.reserve(0, whose)
    assert chunk is not None
    catalog.landed(catalog.write(chunk, 1, key, keep=False))


@pytest.fixture
def clock(managed: Managed) -> list[float]:
    """Replace the catalog's clock by a clock that does not advance."""
    now = [1000.5]
    managed.side.catalog._clock = lambda: now[0]
    managed.side.catalog.refresh([])
    return now


def left(managed: Managed) -> dict[str, int]:
    """Return the number of chunks per salt."""
    return {row["salt_digest"]: row["chunks"] for row in managed.good("GET", "/v1/holders")["tenants_shown"]}


def test_tenants_and_leases_are_listed_largest_first(managed: Managed, clock: list[float]) -> None:
    """Tenants are listed by their salt's digest and by adapter, the largest first.

    Holders of leases are listed, too.
    """
    save(managed, "a", 40, "alice")
    clock[0] += 7
    save(managed, "b", 20, "bob")
    save(managed, "c", 1)
    keep(managed, b"x", tenant(managed, "bob", "poet", b"\1\2"))
    clock[0] += 10
    reading = managed.world.request("b", 21)
    reading.request_id, reading.cache_salt = "reader", "bob"
    managed.world.admit(reading)
    managed.world.step(reading)
    answered = managed.good("GET", "/v1/holders")
    size = managed.side.geometry.slot_bytes
    assert [list(row.values()) for row in answered["tenants_shown"]] == [
        [ALICE, "", "", 3, 3 * size, 0, 17.5],
        [BOB, "", "", 2, 2 * size, 2, 0.0],
        ["", "", "", 1, size, 0, 10.5],
        [BOB, "poet", "0102", 1, size, 0, 10.5],
    ]
    assert (answered["chunks"], answered["tenants"], answered["chunks_unnamed"]) == (7, 4, 0)
    assert answered["holders_shown"] == [{"holder": "reader", "kind": "request", "chunks": 2}]
    assert "alice" not in str(answered)
    some = managed.good("GET", "/v1/holders?rows_max=1")
    assert (len(some["tenants_shown"]), some["tenants"], some["chunks"]) == (1, 4, 7)
    assert managed.ask("GET", "/v1/holders?rows_max=1001")[0] == 422


def test_a_pin_is_a_holder(managed: Managed) -> None:
    """A pin is listed with its number, beside requests."""
    save(managed, "a", 32)
    assert not managed.side.pending
    pin = managed.good("POST", "/v1/pins", prompt("a", 32 * UNIT) | {"seconds": 60})["pin"]
    answered = managed.good("GET", "/v1/holders")
    assert answered["holders_shown"] == [{"holder": f"pin:{pin}", "kind": "pin", "chunks": 2}]
    assert (answered["tenants_shown"][0]["held"], answered["tenants_shown"][0]["idle_s"]) == (2, 0.0)


def test_many_tenants_are_counted_together(managed: Managed, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are too many tenants, the others are counted together.

    All slots are counted, for any size of a slice.
    """
    monkeypatch.setattr(reads, "TENANTS_MAX", 3)
    monkeypatch.setattr(reads, "SLOTS_PER_PART", 4)
    for number in range(10):
        save(managed, f"r{number}", 1, f"s{number}")
    answered = managed.good("GET", "/v1/holders")
    assert (answered["tenants"], answered["chunks_unnamed"], answered["chunks"]) == (3, 7, 10)


def test_chunks_are_evicted_by_salt(managed: Managed) -> None:
    """All chunks of a salt are evicted. The salt is given as text or as a digest.

    Chunks without a salt are not evicted.
    """
    for salt in ("alice", "bob", ""):
        save(managed, f"of {salt}", 20, salt)
    assert evict(managed, cache_salt="alice") == {"chunks": 2, "held": 0, "pins_ended": 0}
    assert left(managed) == {BOB: 2, "": 2}
    assert evict(managed, cache_salt="alice")["chunks"] == 0
    assert evict(managed, no_salt=True)["chunks"] == 2
    assert left(managed) == {BOB: 2}
    assert evict(managed, salt_digest=ALICE)["chunks"] == 0
    assert evict(managed, salt_digest=BOB)["chunks"] == 2
    assert left(managed) == {}
    assert managed.side.counters["evicted"] == 6
    gc.collect()
    assert len(managed.side.catalog.tenants) == 0  # no thread refers to a tenant any more


def test_chunks_are_evicted_by_adapter(managed: Managed) -> None:
    """Chunks are evicted by the adapter's name, by its bytes, or without adapter. A salt can be given in addition."""
    for number, (salt, name, digest) in enumerate(
        [("", "poet", b"\1"), ("", "poet", b"\2"), ("alice", "poet", b"\2"), ("alice", "", b""), ("", "clerk", b"\3")]
    ):
        keep(managed, bytes([number]), tenant(managed, salt, name, digest))
    catalog = managed.side.catalog

    def there() -> list[int]:
        return [number for number in range(5) if catalog.find(0, bytes([number])) is not None]

    def dropped(**wanted: Any) -> list[int]:
        assert not managed.side.pending
        managed.good("POST", "/v1/evict/matching", wanted)
        check_integrity(catalog)
        return there()

    assert dropped(adapter="poet", cache_salt="bob") == [0, 1, 2, 3, 4]
    assert dropped(adapter="poet", cache_salt="alice") == [0, 1, 3, 4]
    assert dropped(adapter="poet", adapter_digest="02") == [0, 3, 4]
    assert dropped(no_adapter=True) == [0, 4]
    assert dropped(adapter_digest="03") == [0]
    assert dropped(all=True) == []


def test_chunks_are_evicted_by_age(managed: Managed, clock: list[float]) -> None:
    """A chunk is old if no request has saved, loaded or hit it for the given time.

    A leased chunk is in use now, so it is not old.
    """
    for name in ("saved", "loaded", "local", "pinned", "reading"):
        save(managed, name, 16, name)
    clock[0] += 100
    assert evict(managed, idle_s=101)["chunks"] == 0
    save(managed, "late", 16)
    again = managed.world.request("loaded", 17)
    again.request_id = "again"
    managed.world.admit(again)
    managed.world.succeed(*managed.world.step(again))
    managed.side.finished(again)
    local = managed.world.request("local", 17)
    local.request_id = "at home"
    managed.world.admit_local(local, 16 * UNIT)
    managed.side.turns.give()
    managed.good("POST", "/v1/pins", prompt("pinned", 16 * UNIT) | {"seconds": 60})
    reading = managed.world.request("reading", 17)
    reading.request_id = "reader"
    managed.world.admit(reading)
    jobs = managed.world.step(reading)
    clock[0] += 50
    held = evict(managed, idle_s=100)
    assert held == {"chunks": 1, "held": 0, "pins_ended": 0}
    names = {salt_digest(TOKEN.encode(), name) for name in ("loaded", "local", "pinned", "reading")}
    assert names <= set(left(managed))
    assert salt_digest(TOKEN.encode(), "saved") not in left(managed)
    managed.world.step()
    managed.world.succeed(*jobs)
    clock[0] += 99
    assert evict(managed, idle_s=100, cache_salt="reading")["chunks"] == 0
    clock[0] += 1
    assert evict(managed, idle_s=100, cache_salt="reading")["chunks"] == 1
    assert evict(managed, idle_s=100, cache_salt="pinned")["chunks"] == 0


def test_chunk_saved_after_an_idle_time_is_new(managed: Managed, clock: list[float]) -> None:
    """The first call after an idle time reads the clock, so a chunk that is saved then is new."""
    save(managed, "a", 16, "alice")
    clock[0] += 1000
    local = managed.world.request("a", 17)
    local.request_id = "at home"
    managed.world.admit_local(local, 16 * UNIT)
    assert evict(managed, idle_s=100)["chunks"] == 0


def test_held_chunks_are_evicted_when_they_are_released(managed: Managed) -> None:
    """As with an eviction by prompt, leased chunks cannot be found any more, and their pins end.

    The slots of these chunks become free when the leases are released.
    """
    save(managed, "a", 32, "alice")
    save(managed, "b", 32, "bob")
    writing = managed.world.request("w", 16)
    writing.cache_salt = "alice"
    managed.world.admit(writing)
    saves = managed.world.step(writing)
    reading = managed.world.request("a", 33)
    reading.request_id = "reader"
    managed.world.admit(reading)
    loads = managed.world.step(reading)
    for name in "ab":
        managed.side.turns.give()
        managed.good("POST", "/v1/pins", prompt(name, 32 * UNIT) | {"seconds": 60})
    managed.side.turns.give()
    answered = managed.good("POST", "/v1/evict/matching", {"cache_salt": "alice"})
    assert answered == {"chunks": 3, "held": 3, "pins_ended": 1}
    managed.world.succeed(*loads, *saves)
    managed.world.step()
    managed.world.check()
    assert [pin["pin"] for pin in managed.good("GET", "/v1/pins")["pins"]] == [2]
    assert left(managed) == {BOB: 2} | {"": 1}  # only the chunks that the request itself reads are left
    assert managed.side.catalog.used == 3


def test_eviction_in_a_large_pool_is_sliced(tmp_path: Path) -> None:
    """Any thread that has the turn reads slots in slices, and evicts chunks in smaller slices."""
    managed = Managed(tmp_path, SchedulerWorld(slots=4 * PART_SLOTS, chunk_units=1))
    try:
        request = save(managed, "a", 3 * PART_SLOTS, "alice")
        save(managed, "b", 10, "bob")
        parts = list(managed.side.pins.evict_those(lambda whose: whose.salt == "alice"))
        assert len(parts) == 3 * PART_SLOTS // PART_CHUNKS + 4
        assert managed.world.found(request) == 0
        assert left(managed) == {BOB: 10}
        managed.world.check()
    finally:
        managed.server.stop()


def test_serving_continues_during_evictions(managed: Managed) -> None:
    """One thread serves requests, another thread evicts and counts. No chunk is lost and no call fails."""
    over, answered = threading.Event(), set[int]()

    def order() -> None:
        turn = 0
        while not over.is_set():
            answered.add(managed.ask("POST", "/v1/evict/matching", {"cache_salt": f"s{turn % 3}"})[0])
            answered.add(managed.ask("GET", "/v1/holders")[0])
            turn += 1

    managed.engine.wait_s_max = 25
    thread = threading.Thread(target=order)
    thread.start()
    for turn in range(300):
        save(managed, f"r{turn}", 1 + turn % 40, f"s{turn % 5}")
        if turn % 2:
            assert not managed.side.pending
    over.set()
    assert not managed.side.pending
    thread.join()
    assert answered == {200}
    managed.world.step()
    managed.world.check()
    assert managed.side.counters["contained_error"] == 0


@pytest.mark.parametrize(
    ("body", "wording"),
    [
        ({}, 'nothing is selected: set "all": true'),
        ({"cache_salt": None, "no_salt": False, "all": False}, "nothing is selected"),
        ({"all": True, "cache_salt": "a"}, "all contradicts cache_salt"),
        ({"all": True, "idle_s": 60}, "all contradicts idle_s"),
        ({"cache_salt": "a", "no_salt": True}, "cache_salt, salt_digest and no_salt contradict each other"),
        ({"cache_salt": "a", "salt_digest": ALICE}, "cache_salt, salt_digest and no_salt contradict each other"),
        ({"adapter": "a", "no_adapter": True}, "no_adapter contradicts adapter"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 4097}, "cache_salt"),
        ({"salt_digest": "alice"}, "salt_digest"),
        ({"adapter_digest": "0" * 129}, "adapter_digest"),
        ({"idle_s": 0}, "idle_s"),
        ({"idle_s": "60"}, "idle_s"),
        ({"idle_s": 1e10}, "idle_s"),
        ({"all": 1}, "all"),
        ({"salt": "a"}, "unknown field `salt`"),
        ({"tokens": [1]}, "unknown field `tokens`"),
        ([], "Expected `object`"),
    ],
)
def test_refused_eviction_has_a_reason_and_evicts_nothing(managed: Managed, body: Any, wording: str) -> None:
    """The refusal has the reason, and no chunk is evicted."""
    save(managed, "a", 16)
    assert not managed.side.pending
    status, answered = managed.ask("POST", "/v1/evict/matching", body)
    assert (status, managed.refused("request"), managed.side.counters["evicted"]) == (422, 1, 0)
    assert wording in answered["error"]


def test_cache_commands_list_and_evict_holders(
    managed: Managed, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands `kvpipe cache holders`, `salt` and `evict-matching` work."""
    save(managed, "a", 20, "alice")
    save(managed, "b", 20, "bob")
    assert not managed.side.pending
    token = ["--token-file", str(tmp_path / "token")]
    at = ["--json", "--at", str(managed.address), *token]

    def stated(*words: str) -> str:
        assert cli.main(["cache", *words]) == 0
        return capsys.readouterr().out

    assert stated("salt", "alice", *token) == ALICE + "\n"
    assert salt_digest(b"another token", "alice") != ALICE
    monkeypatch.setattr("sys.stdin", io.StringIO("alice\n"))
    assert stated("salt", "-", *token) == ALICE + "\n"
    assert ALICE in stated("holders", *at)
    assert '"chunks": 2' in stated("evict-matching", "--salt-digest", ALICE, *at)
    assert '"chunks": 0' in stated("evict-matching", "--idle-s", "3600", "--no-adapter", *at)
    assert cli.main(["cache", "evict-matching", *at]) == 2
    assert "nothing is selected" in capsys.readouterr().err
    assert cli.main(["cache", "evict-matching", "--idle-s", "0", *at]) == 2
    assert cli.main(["cache", "evict-matching", "--salt", "", *at]) == 2
    assert '"chunks": 2' in stated("evict-matching", "--all", *at)
