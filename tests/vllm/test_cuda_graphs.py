"""vLLM replays whole CUDA graphs exactly if no layer hook is needed.

The mode, which decides this, can be configured in several ways.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, PassConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.model_executor.layers.attention import Attention

from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.connectors.vllm.hooks import is_replayed, replays, unhooked
from kvpipe.errors import ConfigError, UnsupportedError

ASKS = KVPipeConnector.requires_piecewise_for_cudagraph


@pytest.mark.parametrize(
    ("extra", "piecewise"),
    [({}, False), ({"mode": "auto"}, False), ({"mode": "layerwise"}, True), ({"mode": "step"}, False)],
)
def test_flag_of_the_graphs_is_read(extra: dict[str, Any], piecewise: bool) -> None:
    """The mode in vLLM's flag decides which graphs vLLM replays. If the flag has no mode, the default mode applies."""
    assert ASKS(extra) is piecewise


@pytest.mark.parametrize(("mode", "piecewise"), [("layerwise", True), ("step", False)])
def test_mode_from_the_environment_is_read(mode: str, piecewise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode in an environment variable decides. The flag takes precedence."""
    monkeypatch.setenv("KVPIPE_MODE", mode)
    assert ASKS({}) is piecewise
    assert ASKS({"mode": "layerwise"}) is True
    assert ASKS({"mode": "step"}) is False


@pytest.mark.parametrize("by", ["flag", "environment"])
@pytest.mark.parametrize(("mode", "piecewise"), [("layerwise", True), ("step", False)])
def test_mode_from_a_file_is_read(
    by: str, mode: str, piecewise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the flag or the environment names a YAML file, the mode in this file decides."""
    path = tmp_path / "kvpipe.yaml"
    path.write_text(f"mode: {mode}\n")
    if by == "environment":
        monkeypatch.setenv("KVPIPE_CONFIG_FILE", str(path))
    assert ASKS({"config_file": str(path)} if by == "flag" else {}) is piecewise


@pytest.mark.parametrize(("mode", "piecewise"), [("layerwise", True), ("step", False)])
def test_a_connector_of_connectors_reports_it(mode: str, piecewise: bool) -> None:
    """kvpipe is one of several connectors in vLLM's MultiConnector."""
    child = {
        "kv_connector": "KVPipeConnector",
        "kv_connector_module_path": "kvpipe.connectors.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": mode},
    }
    assert MultiConnector.requires_piecewise_for_cudagraph({"connectors": [child]}) is piecewise


def _engine(graphs: CUDAGraphMode | None, *, splitting: list[str] | None = None) -> Any:
    layers = {"hooked": type("Layer", (), {"forward": Attention.forward})(), "own": object()}
    compilation = SimpleNamespace(cudagraph_mode=graphs, splitting_ops=splitting, static_forward_context=layers)
    return SimpleNamespace(compilation_config=compilation, speculative_config=None)


ATTENTION = ["vllm::unified_attention_with_output", "vllm::unified_mla_attention_with_output"]


@pytest.mark.parametrize("mode", ["auto", "layerwise"])
@pytest.mark.parametrize(
    ("graphs", "splitting", "breakable"),
    [
        (None, None, "0"),
        (CUDAGraphMode.NONE, None, "0"),
        (CUDAGraphMode.PIECEWISE, ATTENTION, "0"),
        (CUDAGraphMode.PIECEWISE, ATTENTION[1:], "0"),
        (CUDAGraphMode.PIECEWISE, [], "1"),
    ],
)
def test_layerwise_is_accepted_when_hooks_are_called(
    mode: str,
    graphs: CUDAGraphMode | None,
    splitting: list[str] | None,
    breakable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks copy layers in engines without CUDA graphs, and in engines with piecewise CUDA graphs.

    Layers without hooks are copied after the forward.
    """
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", breakable)
    engine = _engine(graphs, splitting=splitting)
    assert unhooked(engine, ["hooked", "own"], mode) == {"own"}
    assert not replays(engine)
    assert unhooked(engine, ["hooked", "own"], "step") == {"hooked", "own"}


@pytest.mark.parametrize(
    ("graphs", "splitting", "stated"),
    [
        (CUDAGraphMode.FULL, ATTENTION, r"CUDA graphs of whole steps \(cudagraph_mode=FULL\)"),
        (CUDAGraphMode.FULL_DECODE_ONLY, [], r"whole steps \(cudagraph_mode=FULL_DECODE_ONLY\)"),
        (CUDAGraphMode.FULL_AND_PIECEWISE, ATTENTION, r"whole steps \(cudagraph_mode=FULL_AND_PIECEWISE\)"),
        (CUDAGraphMode.PIECEWISE, ["vllm::other"], r"inside CUDA graphs \(splitting_ops=\['vllm::other'\]\)"),
        (CUDAGraphMode.PIECEWISE, None, r"inside CUDA graphs \(splitting_ops=None\)"),
    ],
)
def test_layerwise_is_refused_when_no_hook_is_called(
    graphs: CUDAGraphMode, splitting: list[str] | None, stated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `auto`, a step's layers are copied after the forward if no hook is called in the step.

    `layerwise` is refused in one sentence.
    """
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    engine = _engine(graphs, splitting=splitting)
    whole = graphs is not CUDAGraphMode.PIECEWISE
    assert replays(engine) is whole
    assert unhooked(engine, ["hooked", "own"], "auto") == ({"own"} if whole else {"hooked", "own"})
    assert unhooked(engine, ["hooked", "own"], "step") == {"hooked", "own"}
    with pytest.raises(
        UnsupportedError, match=f"mode='layerwise' with .*{stated} is not supported; set mode to 'auto'"
    ):
        unhooked(engine, ["hooked", "own"], "layerwise")


def test_which_steps_are_replayed() -> None:
    """Runner V1 marks a replayed step in its context. Runner V2 has no context outside of a model's own forward."""
    for graphs, metadata, replayed in (
        (CUDAGraphMode.FULL, {}, True),
        (CUDAGraphMode.NONE, None, True),
        (CUDAGraphMode.PIECEWISE, {}, False),
        (CUDAGraphMode.NONE, {}, False),
    ):
        context: Any = SimpleNamespace(cudagraph_runtime_mode=graphs, attn_metadata=metadata)
        assert is_replayed(context) is replayed


def test_layerwise_is_refused_with_fused_attention() -> None:
    """`layerwise` is refused with attention fused with quantisation, because then vLLM chooses whole CUDA graphs."""
    config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=CUDAGraphMode.PIECEWISE,  # vLLM sets this mode for a connector that needs piecewise graphs
        pass_config=PassConfig(fuse_attn_quant=True, eliminate_noops=True),
        use_inductor_graph_partition=False,
    )
    config.set_splitting_ops_for_v1(all2all_backend="naive")
    assert config.cudagraph_mode is CUDAGraphMode.FULL
    engine: Any = SimpleNamespace(compilation_config=config, speculative_config=None)
    with pytest.raises(UnsupportedError, match="whole steps"):
        unhooked(engine, [], "layerwise")


def test_a_wrong_mode_stops_the_engine_there() -> None:
    """A wrong mode is refused instead of ignored. vLLM reads the mode before any part of the engine has started."""
    with pytest.raises(ConfigError, match="mode='layer'"):
        ASKS({"mode": "layer"})
