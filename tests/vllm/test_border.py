"""What goes wrong inside stays inside: vLLM never sees it, and one end that fails keeps no other from ending."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvpipe.config import load_settings
from kvpipe.connectors.vllm import connector as border
from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.errors import ConfigError
from kvpipe.messages import Kind
from kvpipe.testing.pipeline_rig import Rig, job, plan
from kvpipe.trace.log import Counters


@pytest.fixture
def connector() -> Any:
    """Return a connector without an engine's configuration."""
    made: Any = object.__new__(KVPipeConnector)
    made.worker, made.scheduler, made.counters = None, None, Counters()
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


@pytest.mark.parametrize("hook", ["wait_for_layer_load", "save_kv_layer"])
def test_a_layers_hook_that_raises_is_counted(connector: Any, rig: Rig, hook: str) -> None:
    """In the midst of a forward there is nobody to catch it."""
    connector.worker, connector._step = SimpleNamespace(wait_layer=_boom, save_layer=_boom), rig.pipeline.step
    getattr(connector, hook)("layer", *[None] * (2 if hook == "save_kv_layer" else 0))
    assert connector.counters["contained_error"] == 1


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
    for name in ("support", "drafters", "Remedies", "make_room", "Watch", "Meter", "ManagedEngine"):
        monkeypatch.setattr(border, name, MagicMock())
    connector.settings = load_settings({"manage": "127.0.0.1:1"})
    connector.geometry, connector._kv_transfer_config = MagicMock(), MagicMock()
    config = MagicMock()
    config.parallel_config.decode_context_parallel_size = 1
    with pytest.raises(ConfigError, match="without a token"):
        connector._make_scheduler(config, MagicMock(), "e1")
    assert (tracing.call_count, side.call_count) == (0, 0)
