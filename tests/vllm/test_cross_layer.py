"""kvpipe asks vLLM for a cross-layer layout if and only if blocks will be copied whole."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

from kvpipe.connectors.vllm.connector import KVPipeConnector

EXTRA = {"mode": "step"}
CHILD = {
    "kv_connector": "KVPipeConnector", "kv_connector_module_path": "kvpipe.connectors.vllm.connector",
    "kv_role": "kv_both", "kv_connector_extra_config": EXTRA,
}  # fmt: skip


def engine(extra: dict[str, Any] = EXTRA, **text: Any) -> Any:
    """Return the configuration of an engine on a GPU. `text` has fields of the model's configuration."""
    from vllm.config import KVTransferConfig

    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**CHILD | {"kv_connector_extra_config": extra}),
        cache_config=SimpleNamespace(
            user_specified_block_size=False, kv_cache_dtype_skip_layers=[], kv_cache_layout=None
        ),
        model_config=SimpleNamespace(is_hybrid=False, hf_text_config=SimpleNamespace(**text)),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, splitting_ops=None),
    )


asks = KVPipeConnector.get_required_kvcache_layout


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Let vLLM's platform be a GPU whose compute capability a test may change."""
    found = SimpleNamespace(major=9)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda *_: found))
    return found


@pytest.mark.parametrize(("major", "layout"), [(8, "BLNHC"), (9, "BLNHC"), (10, "BLHNC"), (12, "BLNHC")])
def test_step_mode_asks_for_the_order_within_a_page_that_the_device_prefers(
    gpu: SimpleNamespace, major: int, layout: str
) -> None:
    """On Blackwell, FlashInfer's kernels support only heads first. On other devices vLLM prefers tokens first."""
    gpu.major = major
    assert asks(engine()) == layout
    assert asks(engine(layer_types=["full_attention"] * 2)) == layout


def test_other_modes_ask_only_if_no_hook_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are copied one by one are copied faster in vLLM's usual layouts."""
    for mode in ("auto", "layerwise"):
        assert asks(engine({"mode": mode})) is None
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    assert asks(engine({"mode": "auto"})) == "BLNHC", "attention is inside the graphs' pieces"


@pytest.mark.parametrize(
    "text",
    [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": 4096},
        {"attention_chunk_size": 8192},
        {"index_topk": 2048},
    ],
    ids=str,
)
def test_models_with_several_kinds_of_layers_are_left_to_vllm(text: dict[str, Any]) -> None:
    """vLLM may divide such layers into other groups, and pages may differ in size."""
    assert asks(engine(**text)) is None


def test_other_engines_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases: a CPU's backend, a block size from the user, layers of several types, states, and a drafter."""
    for place, field, value in (
        ("cache_config", "user_specified_block_size", True),
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"]),
        ("model_config", "is_hybrid", True),
    ):
        config = engine()
        setattr(getattr(config, place), field, value)
        assert asks(config) is None, field
    config = engine()
    config.speculative_config = SimpleNamespace(method="eagle")
    assert asks(config) is None
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: False)
    assert asks(engine()) is None


def test_no_layout_is_requested_when_the_mover_is_staged() -> None:
    """A block of all layers may not fit a bay. Then the engine would not start."""
    assert asks(engine(EXTRA | {"mover": "staged"})) is None


def test_multi_connector_asks_for_no_layout() -> None:
    """Under MultiConnector kvpipe requests no layout.

    VLLM refuses connectors with different layouts, and NIXL requests LBHNC.
    """
    config = engine()
    config.kv_transfer_config.kv_connector = "MultiConnector"
    config.kv_transfer_config.kv_connector_module_path = None
    config.kv_transfer_config.kv_connector_extra_config = {"connectors": [CHILD]}
    assert MultiConnector.get_required_kvcache_layout(config) is None


@pytest.mark.parametrize(
    ("supported", "given", "layout"),
    [
        (["LBNHC", "LBHNC", "BLNHC", "BLHNC"], None, "BLNHC"),
        (["LBNHC"], None, "LBNHC"),
        (["LBNHC", "BLNHC"], "LBNHC", "LBNHC"),
    ],
    ids=["supported", "not supported", "the user's own"],
)
def test_vllm_takes_the_layout_if_it_can(
    supported: list[str], given: str | None, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself resolves layouts: backends and the user decide. The engine starts with any layout."""
    if given is not None:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", given)
    assert resolve_kv_cache_layout(engine(), [supported]).name == layout
