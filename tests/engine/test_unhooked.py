"""Models with layers whose attention calls no hook, such as DeepSeek V3.2 and V4, are saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import ModelRegistry
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention import attention as ops
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.llama import LlamaForCausalLM

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from tests.engine.common import BLOCK, assert_clean, prompt, whole_blocks

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 21), prompt(530, 22), prompt(16 * BLOCK, 23)]
ARCHITECTURE = "PartlyHookedForCausalLM"


def attend(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend as `Attention.forward` does, but without the operator that calls the hooks."""
    inner = layer.impl
    query = query.view(-1, inner.num_heads, inner.head_size)
    key, value = (one.view(-1, inner.num_kv_heads, inner.head_size) for one in (key, value))
    output = torch.empty_like(query)
    if not layer.get_attn_backend().forward_includes_kv_cache_update:
        ops.unified_kv_cache_update(key, value, layer.layer_name)
    ops.unified_attention_with_output.__wrapped__(query, key, value, output, layer.layer_name)
    return output.view(len(query), -1)


class OwnForward(Attention):
    """An attention like DeepSeek V3.2's: the class calls no hook, although its base class calls hooks."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Attend, and call no hook."""
        return attend(self, query, key, value)


class OwnClass(torch.nn.Module, AttentionLayerBase):
    """An attention like DeepSeek V4's and the indexers' caches.

    The class inherits from neither of vLLM's two attention classes.
    """

    def __init__(self, inner: Attention) -> None:
        """Replace the layer `inner`."""
        super().__init__()
        self.layer_name = inner.layer_name
        self._inner = (inner,)  # a tuple, so that torch does not register `inner` as a submodule
        self.kv_cache = inner.kv_cache

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner layer. The backend reads several attributes of the inner layer."""
        return getattr(self.__dict__["_inner"][0], name)

    @property
    def isa(self) -> str:
        """The CPU's instruction set, which the backend passes only to vLLM's own classes."""
        return next(one.isa for one in get_forward_context().no_compile_layers.values() if isinstance(one, Attention))

    def get_attn_backend(self) -> Any:
        """Return the backend of the inner layer."""
        return self._inner[0].get_attn_backend()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return the specification of the inner layer."""
        return self._inner[0].get_kv_cache_spec(vllm_config)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend, and call no hook."""
        return attend(self, query, key, value)


class PartlyHooked(LlamaForCausalLM):
    """A Llama in which every third layer calls hooks. With `everywhere` no layer calls hooks."""

    everywhere = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Replace the layers that must not call hooks."""
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        made = vllm_config.compilation_config.static_forward_context
        for number, layer in enumerate(self.model.layers):
            own = layer.self_attn
            if number % 3 == 1 or (self.everywhere and number % 3 == 0):
                own.attn.__class__ = OwnForward
            elif number % 3 == 2:
                own.attn = made[own.attn.layer_name] = OwnClass(own.attn)


class Unhooked(PartlyHooked):
    """A Llama in which no hook is called."""

    everywhere = True


@pytest.fixture(params=[PartlyHooked, Unhooked])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return the small Llama with `request.param` as its class."""
    for path in make_model("llama").iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [ARCHITECTURE]}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    ModelRegistry.register_model(ARCHITECTURE, request.param)
    yield tmp_path
    ModelRegistry.models.pop(ARCHITECTURE)


def test_layers_without_hooks_are_saved_and_loaded(model: Path) -> None:
    """Hooks copy the layers that call hooks. The other layers are copied after the forward.

    Every save succeeds, and every hit is right.
    """
    options: dict[str, Any] = {"enable_prefix_caching": False}
    plain = Engine(str(model), **options)
    expected = [plain.generate([tokens], 24)[0] for tokens in PROMPTS]
    plain.close()
    live = Engine(str(model), kvpipe={"mode": "layerwise", "load": "sync", "chunk_tokens": 128}, **options)
    try:
        for _ in range(2):
            assert [live.generate([tokens], 24)[0] for tokens in PROMPTS] == expected
        stats = assert_clean(live)
        assert stats["tokens_loaded"] == whole_blocks(live, *map(len, PROMPTS)) - 1
        assert stats.get("worker.job_failed", 0) == 0
    finally:
        live.close()
