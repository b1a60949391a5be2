"""What goes wrong inside stays inside: vLLM never sees it, and one end that fails keeps no other from ending."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpipe.config import load_settings
from kvpipe.connectors.vllm import connector as border
from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.connectors.vllm.metadata import PlanMetadata
from kvpipe.connectors.vllm.metrics import Meter
from kvpipe.connectors.vllm.no_caches import NoCaches
from kvpipe.errors import ConfigError
from kvpipe.messages import Job, Kind
from kvpipe.testing.pipeline_rig import Rig, SideRig, job, plan
from kvpipe.trace.log import Counters


@pytest.fixture
def connector() -> Any:
    """Return a connector without an engine's configuration."""
    made: Any = object.__new__(KVPipeConnector)
    made.scheduler, made.counters = None, Counters()
    made.worker = NoCaches(made.counters)
    made._step, made._meter, made._role = made.worker.step, Meter(made.worker.totals), KVConnectorRole.WORKER
    made._introduction, made._introduced = None, True
    return made


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Return a pipeline in whose step there is something to do."""
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
    """In the midst of a forward there is nobody to catch it."""
    calls = ("start_loads", "wait_layer", "save_layer", "end_step")
    connector.worker, connector._step = SimpleNamespace(**dict.fromkeys(calls, _boom)), rig.pipeline.step
    getattr(connector, hook)(*["layer"] * arguments)
    assert connector.counters["contained_error"] == 1


@pytest.mark.parametrize("jobs", [(), (job(1),)], ids=["none", "one"])
def test_a_rank_without_caches_has_nothing_to_do(connector: Any, jobs: tuple[Job, ...]) -> None:
    """Whatever vLLM calls before it has registered them; jobs for such a rank are a fault, of whoever has sent them."""
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
    """What the pool holds is of caches that may be gone: the rank lets go of them, and its pool is reported as lost."""
    rig = SideRig()
    connector.worker = rig.side
    connector.register_kv_caches({})
    assert rig.engine.shutdowns
    assert connector.build_connector_worker_meta().report.lost
    assert connector.counters["caches_registered_again"] == 1


@pytest.mark.parametrize("bad", ["worker", "scheduler", "manage", "control", "claim", "writer", "all"])
def test_all_ends_though_one_raises(connector: Any, bad: str) -> None:
    """A thread, the cache's name, the trace's last lines: each is given up, whatever happened before."""
    ended = []

    def end(name: str) -> None:
        ended.append(name)
        if bad in {name, "all"}:
            _boom()

    ends = {"worker": "shutdown", "scheduler": "shutdown", "manage": "stop", "control": "stop", "claim": "release"}
    for name, method in ends.items():
        part = SimpleNamespace(**{method: lambda name=name: end(name)})
        setattr(connector, name if method == "shutdown" else f"_{name}", part)
    connector.writer = SimpleNamespace(close=lambda: end("writer"))
    connector.shutdown()
    assert ended == ["worker", "scheduler", "manage", "control", "claim", "writer"]
    assert connector.counters["contained_error"] == 1


def test_a_bad_token_is_refused_before_anything_is_made(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No trace, no thread and no tier is left behind by it."""
    tracing, side = MagicMock(return_value=(None, None)), MagicMock()
    monkeypatch.setattr(border, "tracing", tracing)
    monkeypatch.setattr(border, "SchedulerSide", side)
    for name in ("support", "drafters", "Spaces", "Remedies", "make_room", "Watch", "Meter", "ManagedEngine"):
        monkeypatch.setattr(border, name, MagicMock())
    connector.settings = load_settings({"manage": "127.0.0.1:1"})
    connector.geometry, connector._kv_transfer_config = MagicMock(), MagicMock()
    config = MagicMock()
    config.parallel_config.decode_context_parallel_size = 1
    with pytest.raises(ConfigError, match="without a token"):
        connector._make_scheduler(config, MagicMock(), "e1")
    assert (tracing.call_count, side.call_count) == (0, 0)
