"""vLLM replays whole CUDA graphs exactly when no layer hook is needed, however the mode was configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.errors import ConfigError

ASKS = KVPipeConnector.requires_piecewise_for_cudagraph


@pytest.mark.parametrize(("extra", "piecewise"), [({}, True), ({"mode": "layerwise"}, True), ({"mode": "step"}, False)])
def test_the_flag_says_so(extra: dict[str, Any], piecewise: bool) -> None:
    """By vLLM's own flag, or by default."""
    assert ASKS(extra) is piecewise


@pytest.mark.parametrize(("mode", "piecewise"), [("layerwise", True), ("step", False)])
def test_the_environment_says_so(mode: str, piecewise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a variable; the flag goes before it."""
    monkeypatch.setenv("KVPIPE_MODE", mode)
    assert ASKS({}) is piecewise
    assert ASKS({"mode": "layerwise"}) is True
    assert ASKS({"mode": "step"}) is False


@pytest.mark.parametrize("by", ["flag", "environment"])
@pytest.mark.parametrize(("mode", "piecewise"), [("layerwise", True), ("step", False)])
def test_a_file_says_so(by: str, mode: str, piecewise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a YAML file that the flag or the environment names."""
    path = tmp_path / "kvpipe.yaml"
    path.write_text(f"mode: {mode}\n")
    if by == "environment":
        monkeypatch.setenv("KVPIPE_CONFIG_FILE", str(path))
    assert ASKS({"config_file": str(path)} if by == "flag" else {}) is piecewise


@pytest.mark.parametrize(("mode", "piecewise"), [("layerwise", True), ("step", False)])
def test_a_connector_of_connectors_says_so(mode: str, piecewise: bool) -> None:
    """As one of several in vLLM's MultiConnector."""
    child = {
        "kv_connector": "KVPipeConnector",
        "kv_connector_module_path": "kvpipe.connectors.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": mode},
    }
    assert MultiConnector.requires_piecewise_for_cudagraph({"connectors": [child]}) is piecewise


def test_a_wrong_mode_stops_the_engine_there() -> None:
    """Never a guess: vLLM asks before anything has started."""
    with pytest.raises(ConfigError, match="mode='layer'"):
        ASKS({"mode": "layer"})
