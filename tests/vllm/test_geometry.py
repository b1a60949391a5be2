"""Cache groups as vLLM specifies them."""

from __future__ import annotations

import copy
import dataclasses
import inspect

import pytest
import torch
import vllm
from vllm.config import LoRAConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm import compat
from kvpipe.connectors.vllm.identity import drafters
from kvpipe.connectors.vllm.identity.engine_facts import identity, layout_facts
from kvpipe.connectors.vllm.support import check_engine, hash_tokens, make_geometry
from kvpipe.connectors.vllm.trial.invariants import Watched
from kvpipe.connectors.vllm.trial.shapes import BLOCK, SHAPES, make_cache, make_configs
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.errors import UnsupportedError


def _cache(chunk: int) -> KVCacheConfig:
    """Return full attention, and local attention in chunks of `chunk` tokens."""
    full = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    local = ChunkedLocalAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=chunk
    )
    return KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["local"], local)],
    )


def test_chunks_of_local_attention_are_whole_units() -> None:
    """Blocks before the last multiple of `attention_chunk_size` are not read. A multiple within a block is refused."""
    full, local = make_geometry(_cache(96), load_settings()).groups
    assert (local.window_tokens, local.local, full.window_tokens, full.local) == (96, True, None, False)
    with pytest.raises(UnsupportedError, match=r"attention_chunk_size=100 with blocks of 32 tokens .*divisor"):
        make_geometry(_cache(100), load_settings())
    alone = _cache(96)
    del alone.kv_cache_groups[0]
    with pytest.raises(UnsupportedError, match="chunked local attention in every layer"):
        make_geometry(alone, load_settings())


@pytest.mark.parametrize(("given", "used"), [(1, 96), (96, 96), (100, 192), (256, 288)])
def test_chunk_tokens_are_rounded_up_to_whole_blocks_of_all_groups(given: int, used: int) -> None:
    """A user need not know the engine's block sizes, which vLLM may choose itself."""
    cache = _cache(96)
    cache.kv_cache_groups[1] = KVCacheGroupSpec(
        ["other"], FullAttentionSpec(block_size=48, num_kv_heads=1, head_size=8, dtype=torch.float32)
    )
    assert make_geometry(cache, load_settings({"chunk_tokens": given})).chunk_tokens == used


def test_states_need_the_attention_up_to_them() -> None:
    """If a state lies within a chunk of attention, a repeated prompt finds it only if partial chunks are kept."""
    full = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(
        block_size=32, shapes=((32,), (32,)), dtypes=(torch.float32, torch.float32), mamba_cache_mode="align"
    )
    groups = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["state"], state)]
    cache = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    assert make_geometry(cache, load_settings({"chunk_tokens": 128})).states
    assert make_geometry(cache, load_settings({"chunk_tokens": 32, "save_partial": False})).states
    with pytest.raises(UnsupportedError, match="save_partial=false with recurrent states"):
        make_geometry(cache, load_settings({"chunk_tokens": 128, "save_partial": False}))


def test_state_behind_its_boundary_is_refused() -> None:
    """With ReplaySSM a block holds an older state, and the inputs after that state."""
    shapes, dtypes = ((32,),) * 5, (torch.float32,) * 5
    state = MambaSpec(block_size=32, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
    cache = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["state"], state)])
    with pytest.raises(UnsupportedError, match="use_replayssm=True is not supported; set it to False"):
        make_geometry(cache, load_settings())


def _shape(dcp: int, interleave: int = 1) -> tuple[dict[str, object], int]:
    """Return the facts of the chunks of a context parallel engine, and the number of tokens in its blocks."""
    shape = SHAPES["context-parallel"]
    config, cache = copy.deepcopy(make_configs(shape))
    config.parallel_config.decode_context_parallel_size = dcp
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    geometry = make_geometry(cache, load_settings({"chunk_tokens": 128}), dcp=dcp)
    return identity(config, cache, geometry), geometry.unit_tokens


def test_a_block_is_as_long_as_all_ranks_shares_of_it() -> None:
    """A rank has only some tokens of a block. The bytes of the rank's block depend on which tokens these are."""
    (alone, block), (two, blocks), (other, _) = _shape(1), _shape(2), _shape(2, 4)
    assert (block, blocks) == (16, 32)
    assert "context_parallel" not in alone
    assert two["context_parallel"] == [2, 1] != other["context_parallel"]


def test_a_rank_reports_which_tokens_it_holds() -> None:
    """The setting is the number of consecutive tokens per rank.

    VLLM changes it only on ranks (`adjust_dcp_kv_cache_interleave_size`).
    """

    def noted(dcp: int, interleave: int) -> list[object]:
        config, _ = copy.deepcopy(make_configs(SHAPES["context-parallel"]))
        config.parallel_config.decode_context_parallel_size = dcp
        config.parallel_config.cp_kv_cache_interleave_size = interleave
        return layout_facts({"layer": torch.zeros(4, 2, 16)}, 4, config)

    assert noted(2, 1) != noted(2, 16)
    assert noted(1, 1) == noted(1, 16)


def test_a_state_is_found_within_blocks_of_attention() -> None:
    """A unit is one block of states and one hash of vLLM. A block of attention has two units."""
    config, cache = make_configs(SHAPES["states-context-parallel"])
    geometry = make_geometry(cache, load_settings({"chunk_tokens": 128}), dcp=2)
    blocks, hashes = resolve_kv_cache_block_sizes(cache, config)
    assert (geometry.unit_tokens, geometry.units_per_block) == (hashes, (2, 1))
    assert geometry.whole_units * geometry.unit_tokens == blocks
    assert hash_tokens(cache, geometry) == hashes


@pytest.mark.parametrize("shape", [name for name in SHAPES if "states" in name and name.endswith("hash-blocks")])
def test_a_unit_of_states_is_several_hashes(shape: str) -> None:
    """vLLM allows several hashes per block of states. A unit is still a block of states."""
    config, cache = copy.deepcopy(make_configs(SHAPES[shape]))
    config.cache_config.prefix_match_unit = cache.hash_block_size
    geometry = make_geometry(cache, load_settings({"chunk_tokens": 128}), dcp=SHAPES[shape].dcp)
    assert (geometry.unit_tokens, hash_tokens(cache, geometry)) == (32, 8)
    assert resolve_kv_cache_block_sizes(cache, config) == (geometry.whole_units * 32, 8)


WITHIN = [name for name, shape in SHAPES.items() if shape.states and shape.hashes and (shape.exports or shape.drafter)]


@pytest.mark.parametrize("shape", WITHIN)
def test_a_unit_is_a_hash_where_states_are_kept_within_blocks(shape: str) -> None:
    """With drafts or exported states, vLLM keeps no states at the ends of blocks. VLLM's hits may end at any hash."""
    config, cache = copy.deepcopy(make_configs(SHAPES[shape]))
    config.cache_config.prefix_match_unit = cache.hash_block_size
    settings, back = load_settings({"chunk_tokens": 128}), drafters.states_back(config)
    geometry = make_geometry(cache, settings, dcp=SHAPES[shape].dcp, states_back=back)
    blocks, hashes = resolve_kv_cache_block_sizes(cache, config)
    assert (geometry.unit_tokens, hash_tokens(cache, geometry)) == (hashes, hashes) == (8, 8)
    assert resolve_cache_hit_alignment_tokens(cache, config, blocks, hashes) == cache.cache_hit_alignment_tokens == 8
    assert geometry.whole_units * 8 == blocks
    assert identity(config, cache, geometry)["match_tokens"] == 8
    assert "match_tokens" not in identity(config, cache, dataclasses.replace(geometry, match_tokens=0))


@pytest.mark.parametrize(("states_back", "checkpoints"), [(1, 0), (0, 1)])
@pytest.mark.parametrize(("shape", "aligned"), [("window-and-states", 8), ("states", 32)])
def test_states_within_blocks_at_which_no_hit_ends_are_refused(
    states_back: int, checkpoints: int, shape: str, aligned: int
) -> None:
    """States within blocks are refused if the model also has a window, or if vLLM's hits end only with blocks.

    The same states are accepted with one hash per block (`hash_block_size` 32).
    """
    cache = copy.deepcopy(make_cache(SHAPES[shape]))
    cache.hash_block_size, cache.cache_hit_alignment_tokens = 8, aligned
    group = cache.kv_cache_groups[-1]
    group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, num_prefill_checkpoint_blocks=checkpoints)  # type: ignore[call-arg]
    geometry = make_geometry(cache, load_settings({"chunk_tokens": 128}), states_back=states_back)
    why = "speculative decoding" if states_back else "from within a step"
    beside = " beside a sliding window" if "window" in shape else ""
    wording = f"^kvpipe: prefix_match_unit=8 with recurrent states every 32 tokens{beside} .*{why} .*; unset it$"
    with pytest.raises(UnsupportedError, match=wording):
        hash_tokens(cache, geometry)
    cache.hash_block_size = 32
    assert hash_tokens(cache, geometry) == 32


@pytest.mark.parametrize(
    ("states_back", "remedy"), [(1, "unset speculative_config"), (0, "serve the model without kvpipe")]
)
def test_useless_remedy_is_not_recommended(states_back: int, remedy: str) -> None:
    """Short blocks of a window also make hashes short.

    If short blocks are the reason, the message does not recommend changing `prefix_match_unit`, which is not set.
    """
    cache = copy.deepcopy(make_cache(SHAPES["window-and-states"]))
    window, states = cache.kv_cache_groups[1:]
    window.kv_cache_spec = dataclasses.replace(window.kv_cache_spec, block_size=8)
    states.kv_cache_spec = dataclasses.replace(states.kv_cache_spec, num_prefill_checkpoint_blocks=1)  # type: ignore[call-arg]
    cache.hash_block_size = cache.cache_hit_alignment_tokens = 8
    geometry = make_geometry(cache, load_settings({"chunk_tokens": 128}), states_back=states_back)
    wording = rf"^kvpipe: block hashes of 8 tokens \(of KV cache groups with blocks of 8, 32\) with .*; {remedy}$"
    with pytest.raises(UnsupportedError, match=wording):
        hash_tokens(cache, geometry)


def test_a_load_never_begins_within_a_block() -> None:
    """vLLM reports only whole blocks of its own hit to kvpipe. So a load begins at the beginning of a block."""
    trial = Trial(SHAPES["states-context-parallel"])
    try:
        assert "block_aligned_local = (" in inspect.getsource(Scheduler.schedule)
        with pytest.raises(LookupError, match="from unit 1 on, within a block"):
            trial.side.loading.rows(None, (), 1, 3)  # type: ignore[arg-type]
    finally:
        trial.close()


@pytest.mark.parametrize("tokens", [129, 161, 193])
def test_a_prompt_is_found_as_far_as_its_last_state(tokens: int) -> None:
    """The last state may be at any place within a block of attention."""
    trial = Trial(SHAPES["states-context-parallel"])
    watched, trial.documents[0] = Watched(trial), list(range(200))
    try:
        for _ in range(2):
            trial.do(("add", 0, tokens - 1, 0, 3))
            trial.do(("drain",))
            trial.do(("reset", False, False))
        assert trial.side.counters["tokens_loaded"] == tokens - 1
        assert not watched.broken
    finally:
        trial.close()


@pytest.mark.parametrize("tokens", [129, 161, 193])
@pytest.mark.parametrize("kind", ["drafter", "masks"])
@pytest.mark.parametrize("scheduler", ["", "async-scheduler-"])
def test_a_prompt_is_found_as_far_as_its_last_state_with_drafts(scheduler: str, kind: str, tokens: int) -> None:
    """The prompt is found up to an earlier boundary than without drafts.

    The drafter's KV may be divided over ranks, or whole on every rank.
    """
    trial = Trial(SHAPES[f"{scheduler}states-context-parallel-{kind}"])
    watched, trial.documents[0] = Watched(trial), list(range(200))
    try:
        for _ in range(2):
            trial.do(("add", 0, tokens - 1, 0, 3))
            trial.do(("drain",))
            trial.do(("reset", False, False))
        back = BLOCK if trial.scheduler.use_eagle_block_drop else 0
        assert trial.side.counters["tokens_loaded"] == tokens - 1 - back
        assert not watched.broken
    finally:
        trial.close()


@pytest.mark.parametrize("shape", [name for name, shape in SHAPES.items() if shape.undropped])
def test_a_repeated_prompt_is_found_as_far_as_its_last_state_where_none_is_dropped(shape: str) -> None:
    """In this engine vLLM drops no block of a hit.

    VLLM keeps the last state before the prompt's last token, so a hit ends at that state.
    """
    trial = Trial(SHAPES[shape])
    watched, unit = Watched(trial), trial.side.geometry.unit_tokens
    try:
        assert not trial.scheduler.use_eagle_block_drop
        for document, tokens in enumerate(range(97, 161, 7)):
            trial.documents[0] = list(range(document, document + 200))
            for _ in range(2):
                before = trial.side.counters["tokens_loaded"]
                trial.do(("add", 0, tokens - 1, 0, 3))
                trial.do(("drain",))
                trial.do(("reset", False, False))
            found = trial.side.counters["tokens_loaded"] - before
            assert (tokens, found) == (tokens, (tokens - 1) // unit * unit)
        assert not watched.broken
    finally:
        trial.close()


@pytest.mark.parametrize(("branches", "found"), [(True, 56), (False, 32)])
def test_state_is_found_where_prompts_branch(branches: bool, found: int) -> None:
    """The second prompt makes vLLM notice the branch, and the third prompt hits at the branch.

    The state is within a block. If vLLM keeps no states within blocks, the state is at the end of the previous block.
    """
    trial = Trial(SHAPES["states-masks"]._replace(hashes=8, dense=False, branches=branches))
    watched = Watched(trial)
    try:
        for document in range(3):
            trial.documents[document] = [*range(90), *(200 + 7 * document + token for token in range(50))]
            if document == 2:
                trial.do(("reset", False, False))
            trial.do(("add", document, 139, 0, 3))
            trial.do(("drain",))
        assert trial.side.counters["tokens_loaded"] == found
        assert not watched.broken
    finally:
        trial.close()


def test_a_drafter_that_every_rank_holds_whole_has_blocks_of_its_own_length() -> None:
    """A block of the model has as many tokens as the parts of both ranks, so a unit is two blocks of the drafter."""
    config, cache = make_configs(SHAPES["async-scheduler-context-parallel-masks"])
    geometry = make_geometry(cache, load_settings({"chunk_tokens": 128}), dcp=2)
    assert [(group.block_tokens, group.ranks) for group in geometry.groups] == [(64, 2), (32, 1)]
    assert (geometry.unit_tokens, geometry.blocks_per_unit) == (64, (1, 2))
    assert (geometry.unit_tokens, hash_tokens(cache, geometry)) == resolve_kv_cache_block_sizes(cache, config)


def test_drafters_of_the_first_runner_are_refused_under_context_parallelism() -> None:
    """Drafters of runner V1 write as if one rank held all tokens."""
    config, _ = copy.deepcopy(make_configs(SHAPES["context-parallel-drafter"]))
    check_engine(config)
    config.__class__ = VllmConfig
    assert not config.use_v2_model_runner
    with pytest.raises(UnsupportedError, match=r"'eagle' with decode_context_parallel_size=2 .*RUNNER=1$"):
        check_engine(config)
    config.speculative_config.method = "ngram"
    check_engine(config)


def _facts(**changed: object) -> dict[str, object]:
    """Return the facts of the chunks of an engine with LoRA adapters and with the settings `changed`."""
    config, cache = copy.deepcopy(make_configs(SHAPES["context-parallel"]))
    config.lora_config = LoRAConfig(lora_dtype=config.model_config.dtype)
    for name, value in changed.items():
        setattr(config.lora_config, name, value)
    return identity(config, cache, make_geometry(cache, load_settings()))


@pytest.mark.parametrize(
    "changed",
    [
        {"target_modules": ["o_proj"]}, {"target_modules": []}, {"lora_dtype": torch.bfloat16},
        {"enable_tower_connector_lora": True}, {"enable_mixed_moe_lora_format": True},
        {"enable_moe_shared_loras": True},
    ],
)  # fmt: skip
def test_use_of_adapters_is_part_of_the_identity(changed: dict[str, object]) -> None:
    """The same adapter files make another model if the engine ignores some modules or reads the files differently."""
    assert _facts(**changed) != _facts()
    assert _facts(max_loras=4) == _facts() == _facts(lora_dtype="auto")


def test_requested_quantization_is_part_of_the_identity() -> None:
    """A change to the quantization of activations changes the identity. The weights alone do not show this change."""
    config, cache = copy.deepcopy(make_configs(SHAPES["context-parallel"]))
    geometry, noted = make_geometry(cache, load_settings()), list[dict[str, object]]()
    for wanted in (None, {"linear": {"activation": "fp8"}}, {"linear": {"activation": "fp4"}}):
        config.model_config.quantization_config = wanted
        noted.append(identity(config, cache, geometry))
    assert all(one not in noted[:i] for i, one in enumerate(noted))


@pytest.mark.parametrize(
    ("name", "value", "usual"),
    [
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random", ""), ("VLLM_MARLIN_INPUT_DTYPE", "int8", None),
        ("VLLM_HUMMING_INPUT_QUANT_CONFIG", '{"dtype": "int8"}', None), ("VLLM_B12X_MOE_FP4_FORCE_A16", "1", "0"),
        ("VLLM_CPU_INT4_W4A8", "0", "1"), ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1", "0"),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "medium", "highest"), ("VLLM_ROCM_USE_AITER_FP8BMM", "0", "1"),
        ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT4", "NONE"), ("VLLM_ROCM_USE_AITER_FP4BMM", "0", "1"),
        ("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "1", "0"), ("VLLM_ROCM_FP8_MFMA_PAGE_ATTN", "1", "0"),
        ("VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4", "1", None), ("VLLM_XPU_INC_WNA16_BACKEND", "w4a8", "auto"),
        ("VLLM_DEEPEPLL_NVFP4_DISPATCH", "1", "0"), ("VLLM_USE_DEEP_GEMM_E8M0", "0", "1"),
        ("VLLM_HUMMING_USE_F16_ACCUM", "1", None), ("VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "0", "1"),
    ],
)  # fmt: skip
def test_variables_that_change_results_are_part_of_the_identity(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, usual: str | None
) -> None:
    """Such variables draw experts at random, or change the precision of activations or the order in a block.

    A variable with its default value does not count.
    """
    monkeypatch.delenv(name, raising=False)
    plain = _facts()
    monkeypatch.setenv(name, value)
    assert _facts() != plain
    if usual is not None:
        monkeypatch.setenv(name, usual)
        assert _facts() == plain


def test_quantization_of_queries_is_part_of_the_identity() -> None:
    """The weights do not show how queries and other activations are quantized."""
    config, cache = copy.deepcopy(make_configs(SHAPES["context-parallel"]))
    geometry, noted = make_geometry(cache, load_settings()), list[dict[str, object]]()
    for name in ("use_prefill_query_quantization", "disable_flashinfer_q_quantization"):
        noted.append(identity(config, cache, geometry))
        setattr(config.attention_config, name, True)
    noted.append(identity(config, cache, geometry))
    assert all(one not in noted[:i] for i, one in enumerate(noted))


def test_release_of_vllm_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's release is part of the identity, but not the build of the release."""
    plain = _facts()
    for found, same in (("0.99.1", False), (f"{vllm.__version__}+cpu", True)):
        monkeypatch.setattr(compat, "installed_version", lambda found=found: found)
        assert (_facts() == plain) is same
