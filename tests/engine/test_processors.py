"""vLLM's decisions on each simulated processor. The sizes in tests are valid on all of these processors.

`common.engine` starts every engine of every test on each processor, until the block size is known
(`starts_on_every_processor`). These tests show that this check works, and how the processors differ. Three tests
generate on more than one processor, because the decisions for their engines differ: `test_mla`,
`test_preempted_and_aborted` and `test_states_in_the_models_own_type`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.connectors.vllm.trial.processors import PROCESSORS, Plan, Processor, lent, processor
from tests.engine.common import planned, starts_on_every_processor

pytestmark = pytest.mark.engine

MLA, MLA_OPTIONS = "deepseek-mla", {"dtype": "bfloat16"}
STATES: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": True}


def _plans(recipe: str, kvpipe: dict[str, Any] | None = None, **options: Any) -> dict[Processor, Plan]:
    plans: dict[Processor, Plan] = {}
    for kind in PROCESSORS:
        with processor(kind):
            plans[kind] = planned(make_model(recipe), kvpipe, options)
    return plans


@pytest.mark.parametrize(
    ("kind", "avx512", "amx"), [("amx", True, True), ("avx512", True, False), ("plain", False, False)]
)
def test_processor_is_reported_by_torch_and_restored_at_the_end(kind: Processor, avx512: bool, amx: bool) -> None:
    """Every feature that vLLM and kvpipe query has the simulated value."""
    before = dict(torch.cpu.get_capabilities()), torch.backends.cpu.get_cpu_capability()
    with processor(kind):
        assert torch.cpu._is_amx_tile_supported() == amx
        assert torch.cpu._is_avx512_supported() == torch.cpu._is_avx512_bf16_supported() == avx512
        assert (torch.backends.cpu.get_cpu_capability() == "AVX512") == avx512
        assert torch.cpu._is_avx2_supported() == before[0]["avx2"]
    assert (dict(torch.cpu.get_capabilities()), torch.backends.cpu.get_cpu_capability()) == before


@pytest.mark.parametrize("kind", PROCESSORS)
def test_kernels_are_never_amx_when_lent(kind: Processor) -> None:
    """vLLM's platform decides as on the simulated processor.

    But code that chooses a kernel sees a processor without AMX.
    """
    with lent(kind):
        assert not torch.cpu._is_amx_tile_supported()


def test_latent_attention_has_another_backend_and_other_blocks_with_amx() -> None:
    """With AMX the backend accepts multiples of 32 tokens, and vLLM caches prefixes.

    Without AMX the backend accepts 16 tokens only.
    """
    plans = _plans(MLA, {}, **MLA_OPTIONS, enable_prefix_caching=True)
    assert plans["amx"][:4] == (("AMX_MLA",), 32, 32, True)
    assert plans["avx512"] == plans["plain"]
    assert plans["plain"][:4] == (("CPU_MLA",), 16, 16, False)


def test_states_make_longer_blocks_with_avx512() -> None:
    """With AVX-512, states are in float32 instead of the model's type, so a block of attention is longer."""
    plans = _plans("qwen3-next", {"chunk_tokens": 192}, **STATES)
    assert plans["amx"] == plans["avx512"]
    assert plans["avx512"].block_tokens > plans["plain"].block_tokens


def test_full_attention_is_the_same_everywhere() -> None:
    """With full attention, a test on one processor is valid for all processors."""
    assert len(set(_plans("llama", {}).values())) == 1


def test_named_block_size_fails_when_a_backend_refuses_it() -> None:
    """If AMX refuses blocks of 16 tokens, a test with such blocks fails on every machine, not only with AMX."""
    with pytest.raises(ValueError, match="No common block size for 16"):
        starts_on_every_processor(make_model(MLA), {}, MLA_OPTIONS | {"block_size": 16})


def test_chunk_size_is_rounded_up_when_it_is_no_multiple_of_the_blocks() -> None:
    """A chunk size that fits one processor's blocks starts an engine on every processor."""
    units = {kind: one.unit_tokens or 0 for kind, one in _plans("qwen3-next", {"chunk_tokens": 192}, **STATES).items()}
    starts_on_every_processor(make_model("qwen3-next"), {"chunk_tokens": min(units.values())}, STATES)
