"""Tests of the line that an engine logs when it starts, and of the engine's name for operators."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe import __version__
from kvpipe.connectors.vllm import started
from kvpipe.connectors.vllm.started import lasting_name
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.inputs.values import size_text

RANDOM = "4fa8270b-6c4e-4ab0-9d7e-0f9f0d8f6f3a"


def test_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the scheduler side logs the line. Ranks do not log it."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(started, "info", lambda event, **fields: lines.append({"event": event, **fields}))
    trial = Trial(SHAPES["two-tiers"], 2)
    try:
        (line,) = lines
        assert line["event"] == "kvpipe_started"
        assert trial.kvpipe is not None
        settings = trial.kvpipe.settings
        assert line["name"].endswith(socket.gethostname().partition(".")[0][-10:])
        assert line["engine"]
        assert (line["kvpipe"], line["device"], line["policy"]) == (__version__, "cpu", settings.policy)
        assert line["pool"] == f"{size_text(settings.pool_bytes_max)} x {len(trial.ranks)}"
        assert (line["chunk_tokens"], line["manage"]) == (trial.kvpipe.geometry.chunk_tokens, "off")
        assert line["tiers"].split(",")[0] == "memory"
        assert len(line["tiers"].split(",")) == 3
    finally:
        trial.close()


@pytest.mark.parametrize(
    ("configured", "engine_id", "name"),
    [
        ("", RANDOM, ("Llama-8B-pod-0", True)),
        ("", f"{RANDOM}_dp1", ("Llama-8B-pod-0_dp1", True)),
        ("", "mine_dp1", ("mine_dp1", False)),
        ("front", f"{RANDOM}_dp1", ("front_dp1", False)),
        ("front", "mine", ("front", False)),
    ],
)
def test_operators_name_does_not_change_with_a_restart(
    configured: str, engine_id: str, name: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name contains no random id of vLLM."""
    monkeypatch.setenv("POD_NAME", "pod-0")
    config: Any = SimpleNamespace(model_config=SimpleNamespace(served_model_name="org/Llama-8B"))
    assert lasting_name(configured, config, engine_id) == name
