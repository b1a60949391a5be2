"""No exception inside kvpipe reaches vLLM. If one part fails to shut down, the other parts still shut down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm import scheduler_role as border
from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.connectors.vllm.metadata import PlanMetadata
from kvpipe.connectors.vllm.metrics import Meter
from kvpipe.connectors.vllm.no_caches import NoCaches
from kvpipe.connectors.vllm.roles import WrongRoleError
from kvpipe.connectors.vllm.scheduler_role import SchedulerRole
from kvpipe.connectors.vllm.worker_role import WorkerRole
from kvpipe.errors import ConfigError
from kvpipe.protocol.messages import Job, Kind
from kvpipe.trace.log import Counters
from tests.rigs.pipeline_rig import Rig, SideRig, job, plan


@pytest.fixture
def connector() -> Any:
    """Return a connector without an engine's configuration."""
    made: Any = object.__new__(KVPipeConnector)
    role: Any = object.__new__(WorkerRole)
    role.counters, role.recorder, role.writer, role._ends = Counters(), None, None, ExitStack()
    role.worker = NoCaches(role.counters)
    role.step, role.meter = role.worker.step, Meter(role.worker.totals)
    role._introduction, role._introduced = None, True
    made._take_worker_role(role)
    return made


@pytest.fixture
def scheduler_connector() -> Any:
    """Return the scheduler's connector of an engine without configuration. The fake scheduler side raises nothing."""
    made: Any = object.__new__(KVPipeConnector)
    role: Any = object.__new__(SchedulerRole)
    role.counters, role.recorder, role.writer, role._ends = Counters(), None, None, ExitStack()
    role.scheduler = MagicMock()
    made._take_scheduler_role(role)
    return made


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Return a pipeline with a step that has work to do."""
    made = Rig()
    made.pipeline.begin(plan(job(1, Kind.SAVE)))
    yield made
    made.pipeline.shutdown()


def _boom(*_: object) -> None:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [("start_load_kv", 1), ("wait_for_layer_load", 1), ("save_kv_layer", 3), ("wait_for_save", 0)],
)
def test_a_forwards_hook_that_raises_is_counted(connector: Any, rig: Rig, hook: str, arguments: int) -> None:
    """An exception in a forward would end the engine, because no caller catches it."""
    calls = ("start_loads", "wait_layer", "save_layer", "end_step")
    connector.worker_role.worker = SimpleNamespace(**dict.fromkeys(calls, _boom))
    connector._step = rig.pipeline.step
    getattr(connector, hook)(*["layer"] * arguments)
    assert connector.counters["contained_error"] == 1


@pytest.mark.parametrize("jobs", [(), (job(1),)], ids=["none", "one"])
def test_a_rank_without_caches_has_nothing_to_do(connector: Any, jobs: tuple[Job, ...]) -> None:
    """Before vLLM has registered caches, a rank answers all calls.

    Jobs for such a rank are a fault of the scheduler side.
    """
    metadata, forward = PlanMetadata(plan(*jobs)), SimpleNamespace(attn_metadata=None)
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(forward)
    connector.wait_for_layer_load("a")
    connector.save_kv_layer("a", None, None)
    connector.wait_for_save()
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.build_connector_worker_meta() is None
    assert connector.get_kv_connector_stats() is None
    assert connector.get_handshake_metadata() is None
    connector.clear_connector_metadata()
    assert connector.counters.faults == ({"plan_without_caches": 1} if jobs else {})


def test_caches_that_are_registered_again(connector: Any) -> None:
    """A rank whose caches are registered again shuts its transfer engine down and reports its pool as lost."""
    rig = SideRig()
    connector.worker_role.worker = rig.side
    connector.register_kv_caches({})
    assert rig.engine.shutdowns
    assert connector.build_connector_worker_meta().report.lost
    assert connector.counters["caches_registered_again"] == 1


@pytest.mark.parametrize("bad", ["first", "later", "last", "all"])
@pytest.mark.parametrize("taken", ["connector", "scheduler_connector"])
def test_shutdown_continues_when_one_part_raises(request: pytest.FixtureRequest, taken: str, bad: str) -> None:
    """A shutdown ends every part of a side, even if one part or all parts raise."""
    connector, ended = request.getfixturevalue(taken), []

    def end(name: str) -> None:
        ended.append(name)
        if bad in {name, "all"}:
            _boom()

    for name in ("last", "later"):
        connector._role_taken._ends.callback(end, name)
    side = SimpleNamespace(shutdown=lambda: end("first"))
    setattr(connector._role_taken, "worker" if taken == "connector" else "scheduler", side)
    connector.shutdown()
    assert ended == ["first", "later", "last"]
    assert connector.counters["contained_error"] == 1


def test_a_call_of_the_other_role_is_counted(connector: Any, scheduler_connector: Any) -> None:
    """The caller gets the result of a cache miss, and the log names both roles.

    VLLM itself does not call the other role.
    """
    said = list[str]()
    for one in (connector, scheduler_connector):
        one.counters.watcher = lambda _, fields: said.append(fields["error"])
    assert connector.get_num_new_matched_tokens(MagicMock(), 0) == (0, False)
    assert connector.has_pending_push_work() is False
    assert scheduler_connector.get_block_ids_with_load_errors() == set()
    assert "the connector with the role worker was called; this belongs to the role scheduler" in said[0]
    assert "the connector with the role scheduler was called; this belongs to the role worker" in said[2]
    with pytest.raises(WrongRoleError, match="worker: the connector with the role scheduler was called"):
        _ = scheduler_connector.worker


def test_hooks_of_a_layer_do_not_reach_the_role_while_the_step_is_idle(connector: Any) -> None:
    """vLLM calls these hooks for every layer of every step, so passing each call to the role would cost time."""
    connector.worker_role.worker = None
    connector.wait_for_layer_load("layer")
    connector.save_kv_layer("layer", None, None)
    assert connector.counters.faults == {}


@pytest.mark.parametrize("taken", ["connector", "scheduler_connector"])
def test_vllm_sees_one_class(request: pytest.FixtureRequest, taken: str) -> None:
    """All checks that vLLM makes of a connector's class see `KVPipeConnector`, in both roles."""
    connector = request.getfixturevalue(taken)
    assert isinstance(connector, KVConnectorBase_V1)
    assert supports_hma(connector)
    assert supports_hma(type(connector))


def test_a_bad_token_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad token is refused before a trace, a thread or a tier is made."""
    tracing, side = MagicMock(return_value=(None, None)), MagicMock()
    monkeypatch.setattr(border, "tracing", tracing)
    monkeypatch.setattr(border, "SchedulerSide", side)
    for name in ("support", "drafters", "Spaces", "Remedies", "make_room", "WeightCalls", "Meter"):
        monkeypatch.setattr(border, name, MagicMock())
    facts = MagicMock(settings=load_settings({"manage": "127.0.0.1:1"}))
    facts.config.parallel_config.decode_context_parallel_size = 1
    with pytest.raises(ConfigError, match="without a token"):
        SchedulerRole(MagicMock(), facts)
    assert (tracing.call_count, side.call_count) == (0, 0)
