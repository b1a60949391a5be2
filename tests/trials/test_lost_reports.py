"""If one part of a call raises, the other parts still run.

So no report is lost, which matters because ranks send each report only once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.connectors.vllm.metadata import ReportMetadata
from kvpipe.connectors.vllm.scheduler_role import SchedulerRole
from kvpipe.protocol.messages import Report, Tally
from kvpipe.trace.log import Counters
from tests.rigs.scheduler_world import SAVE, SYNC, SchedulerWorld


def _boom(*_: object, **__: object) -> None:
    raise RuntimeError("boom")


def _connector(world: SchedulerWorld) -> Any:
    """Return a connector that has only the scheduler side of `world`, and no configuration of an engine."""
    made: Any = object.__new__(KVPipeConnector)
    role: Any = object.__new__(SchedulerRole)
    role.scheduler, role.counters, role.recorder, role.writer = world.side, Counters(), None, None
    role._remedies = SimpleNamespace(encoded=SimpleNamespace(began=_boom))
    made._take_scheduler_role(role)
    return made


def test_reports_of_a_step_are_processed_when_a_request_with_a_failed_load_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the policy `fail`, vLLM ends the request before it passes the invalid blocks to the connector."""
    world = SchedulerWorld(load="sync")
    reader, other = world.request("reader", 2), world.request("other", 3)
    world.admit(reader)
    world.admit(other)
    monkeypatch.setattr(world.remedies, "begin_step", lambda *_, **__: {"reader": [1]})
    planned, *saves = world.step(reader, other)
    assert (planned.kind, {job.kind for job in saves}) == (SYNC, {SAVE})
    world.side.finished(reader)
    connector, report = _connector(world), Report({planned.id: Tally(0, 1)} | {job.id: Tally(1, 0) for job in saves})
    connector.update_connector_output(
        SimpleNamespace(invalid_block_ids=planned.blocks(), kv_connector_worker_meta=ReportMetadata(report))
    )
    assert connector.counters["contained_error"] == world.side.counters["contained_error"] == 0
    assert not world.side.jobs.in_flight
    assert not world.side.catalog.leased
    assert world.side.counters["load_failed"] == 1


def test_reports_are_processed_when_invalid_blocks_cannot_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank reports a job once. If the scheduler side lost the report, the job would count as running for ever."""
    world = SchedulerWorld()
    request = world.request("one", 2)
    world.admit(request)
    (save,) = world.step(request)
    monkeypatch.setattr(world.side.jobs, "taint_saves", _boom)
    report = ReportMetadata(Report({save.id: Tally(1, 0)}))
    connector = _connector(world)
    connector.update_connector_output(SimpleNamespace(invalid_block_ids={1}, kv_connector_worker_meta=report))
    assert connector.counters["contained_error"] == 1
    assert not world.side.jobs.in_flight


def test_each_failed_load_is_failed_when_another_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handling each of two failed loads raises an exception. Both requests still compute their tokens."""
    world = SchedulerWorld(load="sync")
    world.publish(world.request("old", 4, shared=4))
    first, other = world.request("first", 6, shared=4), world.request("other", 6, shared=4)
    world.admit(first)
    world.admit(other)
    loads = [job for job in world.step(first, other) if job.kind == SYNC]
    monkeypatch.setattr(world.side.events, "load_failed", _boom)
    world.side.invalidated({block for load in loads for block in load.blocks()})
    assert world.side.counters["contained_error"] == len(loads) == 2
    assert {one.state.row for one in world.side.requests.tracked.values()} == {"RECOMPUTING"}


@pytest.mark.parametrize("part", ["weighed", "ranks_read", "slots_ready", "adapters"])
def test_report_is_processed_when_one_part_raises(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other parts of the report are processed: tallies, rates, slots, adapters. Ranks do not repeat a report."""
    world = SchedulerWorld()
    request, side, taken = world.request("one", 2), world.side, list[str]()
    world.admit(request)
    (save,) = world.step(request)
    side.staging = SimpleNamespace(stores=SimpleNamespace(landed=lambda *_: None), tier_blocks=None)  # type: ignore[assignment]
    owners = {"weighed": side, "ranks_read": side.staging, "slots_ready": side, "adapters": side.adapters}
    for name, owner in owners.items():
        method = "reported" if name == "adapters" else name
        call = _boom if name == part else lambda *_, name=name: taken.append(name)
        monkeypatch.setattr(owner, method, call, raising=False)
    side.reported(
        Report(
            {save.id: Tally(1, 0)}, tier_rates={0: 1.0}, ready={0: 1}, weights={0: (1, "a")}, adapters={0: {1: b"a"}}
        )
    )
    assert taken == [name for name in owners if name != part]
    assert not side.jobs.in_flight
    assert side.counters["contained_error"] == 1


@pytest.mark.parametrize("part", ["saves", "sweep", "pins", "orders", "pace", "prefetch", "fetches"])
def test_the_loads_of_a_step_are_sent_when_another_part_of_its_plan_raises(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM relies on the loads of a step. Without these loads, attention would read the old content of the blocks."""
    world = SchedulerWorld(load="sync")
    world.publish(world.request("old", 4, shared=4))
    request, side = world.request("new", 6, shared=4), world.side
    world.admit(request)
    if part in {"pace", "prefetch", "fetches"}:
        good, pace = SimpleNamespace(step=lambda *_: None), SimpleNamespace(step=_boom)
        used = {"pace": pace} if part == "pace" else {"pace": good}
        plan = _boom if part == "fetches" else lambda **_: ()
        side.staging = SimpleNamespace(  # type: ignore[assignment]
            patience=SimpleNamespace(**used), plan=plan, space=SimpleNamespace(name="space"), tier_blocks=None
        )
        if part == "prefetch":
            monkeypatch.setattr(side.prefetching, "plan_step", _boom)
    else:
        side.catalog.stale = 1
        monkeypatch.setattr(side.catalog, "sweep", _boom if part == "sweep" else lambda: None)
        side.pins.pins = {"pin": object()}  # type: ignore[assignment, dict-item]
        monkeypatch.setattr(side.pins, "expire", _boom if part == "pins" else lambda: None)
        side.orders.due = [object()]  # type: ignore[assignment, list-item]
        monkeypatch.setattr(side.orders, "carry_out", _boom if part == "orders" else lambda: None)
    if part == "saves":
        monkeypatch.setattr(side._saving, "_try_save", _boom)
    jobs = world.step(request)
    assert SYNC in {job.kind for job in jobs}
    assert side.counters["contained_error"] == 1


@pytest.mark.parametrize("part", ["ends", "keys", "drop", "event", "stage", "remedies", "adapters"])
def test_a_request_ends_when_a_part_of_its_end_raises(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a part raises, the request is not tracked after its end, and its cursor is in a final state."""
    world = SchedulerWorld()
    request, side = world.request("one", 2), world.side
    request.lora_request = SimpleNamespace(lora_int_id=1, lora_path="a", lora_name="a") if part == "adapters" else None
    monkeypatch.setattr(side.adapters, "begin_use", lambda *_: None)
    tracked = side.requests.add(request)
    if part == "stage":
        tracked.stage = object()  # type: ignore[assignment]
    owner, method = {
        "ends": (side._saving, "ended"),
        "keys": (side.prefixes, "chunks_from_the_end"),
        "drop": (side.loading, "drop"),
        "event": (side.events, "finished"),
        "stage": (side.requests, "end_stage"),
        "remedies": (world.remedies, "finished"),
        "adapters": (side.adapters, "end_use"),
    }[part]
    monkeypatch.setattr(owner, method, _boom)
    with pytest.raises(RuntimeError, match="boom"):
        side.finished(request)
    assert not side.requests.tracked
    assert tracked.state.row == "FINISHED"


@pytest.mark.parametrize("part", ["media", "preemption"])
def test_a_load_is_planned_when_another_part_of_the_admission_raises(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an admission vLLM expects the load, so the load is planned even if another part raises."""
    world = SchedulerWorld(load="sync")
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    request.mm_features = [object()] if part == "media" else []
    tokens = world.ask(request)
    if part == "preemption":
        request.num_preemptions += 1
        monkeypatch.setattr(world.side.requests, "notice_preemption", _boom)
    connector = _connector(world)
    connector.update_state_after_alloc(request, SimpleNamespace(blocks=world.allocate(request)), tokens)
    assert connector.counters["contained_error"] == 1
    assert SYNC in {job.kind for job in world.step(request)}
