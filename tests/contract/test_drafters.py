"""Assumptions of kvpipe about drafters that get context as input (DFlash, DSpark), checked against vLLM's sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.support import make_geometry
from tests.contract.test_scheduler_versions import FETCH_SECONDS_MAX, other_releases

SPECULATORS = "v1/worker/gpu/spec_decode"


def check(folder: Path) -> None:
    """Check drafters of the package in `folder`.

    Drafters write KV of accepted hidden states and positions, and then of masks.
    """
    dflash = folder / SPECULATORS / "dflash/speculator.py"
    kernel = _source(dflash, "_prepare_dflash_inputs_kernel")
    for line in (
        "valid_ctx_end = ctx_end - num_rejected",
        "ctx_resident = is_valid_ctx & (ctx_block_id != 0)",
        "last_valid_pos = tl.load(target_positions_ptr + valid_ctx_end - 1)",
        "query_pos = last_valid_pos + 1 + query_off",
        "q_resident = is_query & (q_block_id != 0)",
    ):
        assert line in kernel, line
    stores = _source(dflash, "_precompute_context_kv", "DFlashSpeculator")
    assert "self.hidden_states[start:end], self.context_positions[start:end], context_slots)" in stores
    one = folder / "v1/spec_decode"
    kernel = _source(one / "utils.py", "copy_and_expand_dflash_inputs_kernel")
    assert "last_pos = tl.load(target_positions_ptr + valid_ctx_end - 1)" in kernel
    assert "query_pos = last_pos + 1 + query_off" in kernel
    assert "self._dflash_hidden_states, self._context_positions_buffer" in _source(
        one / "dflash.py", "build_model_inputs_first_pass", "DFlashProposer"
    )


def check_draft_models(folder: Path) -> None:
    """Check that runner V1 gives a draft model the blocks of the first cache group.

    V1 asks all other drafters for their group.
    """
    built = _source(folder / "v1/worker/gpu_model_runner.py", "_build_attention_metadata", "GPUModelRunner")
    asked = built[: built.index("if self.drafter.kv_cache_gid == kv_cache_gid")]
    assert "DraftModelProposer" not in asked[asked.rindex("isinstance(self.drafter") :]
    made = _source(folder / "v1/spec_decode/draft_model.py", "_get_model", "DraftModelProposer")
    assert 'prefix="draft_model"' in made.replace("'", '"')


def check_kinds(folder: Path) -> None:
    """Check that all these drafters prepare and store context like DFlash does, in every step that samples tokens."""
    bases = {"DFlashSpeculator", "DFlash2Speculator"}
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (folder / SPECULATORS).glob("*/speculator.py")]
    made = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    kinds = [node for node in made if bases & {ast.unparse(base) for base in node.bases}]
    assert {"DSparkSpeculator", "DFlash2Speculator"} <= {node.name for node in kinds}
    own = {"propose", "_precompute_context_kv", "_prepare_graph_forward"}
    for node in kinds:
        assert not own & {one.name for one in node.body if isinstance(one, ast.FunctionDef)}, node.name
    propose = _source(folder / SPECULATORS / "dflash/speculator.py", "propose", "DFlashSpeculator")
    if "num_speculative_tokens == 0" in propose:  # the step's drafts cannot be used, but context is stored
        rest = propose[propose.index("num_speculative_tokens == 0") :]
        assert rest.index("self._precompute_context_kv(0, num_target_tokens") < rest.index("return self.draft_tokens")
    sampling = _source(folder / "v1/worker/gpu/model_runner.py", "sample_tokens", "GPUModelRunner")
    ends = "kv_connector.finalize_step(" if "finalize_step(" in sampling else "kv_connector.post_forward("
    assert sampling.index("self.speculator.propose(") < sampling.rindex(ends)


def check_groups(folder: Path) -> None:
    """Check that vLLM's scheduler treats these drafters like drafters that get hidden states.

    Kimi's drafter has a cache group of its own.
    """
    config = folder / "config"
    eagle = _source(config / "speculative.py", "use_eagle", "SpeculativeConfig")
    assert "'dflash', 'dspark'" in eagle
    planning = folder / "v1/core/kv_cache_planning.py"
    if planning.is_file():
        assert "is_eagle_group = not draft_layer_names.isdisjoint(" in planning.read_text(encoding="utf-8")
    else:
        groups = _source(folder / "v1/core/kv_cache_utils.py", "_annotate_eagle_groups")
        assert groups.index("non_causal_multi_token_decode") < groups.index("group.is_eagle_group = True")
    lookahead = _source(config / "vllm.py", "num_lookahead_tokens", "VllmConfig")
    assert "return self.num_speculative_tokens + 1" in lookahead


def check_divided(folder: Path) -> None:
    """Check context parallelism: a rank writes only its own part of the blocks of the drafter's group.

    Drafters of runner V1 do not divide their blocks.
    """
    runner = _source(folder / "v1/worker/gpu/model_runner.py", "get_kv_cache_spec", "GPUModelRunner")
    assert "self.speculator.dcp_size == 1" in runner
    assert "replace(kv_cache_spec[name], dcp_sharded=False)" in runner
    dflash = folder / SPECULATORS / "dflash/speculator.py"
    divided = "decode_context_parallel_size if speculative_config.draft_model_config.use_mla else 1"
    assert divided in _source(dflash, "__init__", "DFlashSpeculator")
    kernel = _source(dflash, "_prepare_dflash_inputs_kernel")
    for line in (
        "ctx_block_num = ctx_pos // (block_size * CP_SIZE)",
        "cp_local_slot(ctx_pos, ctx_block_id, block_size, cp_rank, CP_SIZE, CP_INTERLEAVE, PAD_SLOT_ID)",
        "q_block_num = query_pos // (block_size * CP_SIZE)",
    ):
        assert line in kernel, line
    places = _source(folder / "v1/worker/gpu/cp_utils.py", "cp_local_slot")
    assert "is_local = block_offsets // CP_INTERLEAVE % CP_SIZE == cp_rank" in places
    kernel = _source(folder / "v1/worker/gpu/block_table.py", "_compute_slot_mappings_kernel")
    assert "local_positions = tl.where(sharded, local_positions, positions)" in kernel
    for path in (folder / SPECULATORS).glob("*/speculator.py"):  # other code that writes KV uses the same kernel
        text = path.read_text(encoding="utf-8")
        assert path == dflash or "// block_size" not in text, path
    one = folder / "v1/spec_decode/utils.py"
    assert "block_number = clamped_position // block_size" in _source(one, "eagle_step_slot_mapping_metadata_kernel")
    assert "block_num = positions // block_size" in _source(one, "copy_and_expand_dflash_inputs_kernel")


def _source(path: Path, name: str, owner: str = "") -> str:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    if owner:
        (made,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
        body = made.body
    (found,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.unparse(found)


def check_stages(folder: Path) -> None:
    """Check that the last stage drafts in its step.

    Other stages get the drafts before a later step, except for ended requests.
    """
    runner = folder / "v1/worker/gpu/model_runner.py"
    made = _source(runner, "__init__", "GPUModelRunner")
    assert re.search(r"if self\.is_last_pp_rank:\s+self\.speculator = init_speculator\(", made)
    execute = _source(runner, "execute_model", "GPUModelRunner")
    received, gone = "self.update_pp_decode_requests()", "self.finish_requests(scheduler_output)"
    moved, begun = "self.model_state.preprocess_state(", "self.kv_connector.pre_forward(scheduler_output"
    assert execute.index(received) < execute.index(gone) < execute.index(moved) < execute.index(begun)
    sample = _source(runner, "sample_tokens", "GPUModelRunner")
    early, ended = "self.model_state.postprocess_state(input_batch.idx_mapping, 0)", "post_forward(finished_req_ids)"
    assert sample.index(early) < sample.index(ended)
    later = _source(folder / "v1/worker/gpu/pp_utils.py", "get_prev_sampled_outputs", "PPHandler")
    assert "exclude_mask = freed | ~slot.need_sampled_mask" in later
    utils = folder / SPECULATORS / "eagle/eagle3_utils.py"
    assert "raise ValueError" in _source(utils, "verify_supports_aux_hidden_states_over_pp")
    assert "self.pp_handler.relay_aux_hidden_states(" in execute


def check_kept_states(folder: Path) -> None:
    """Check that with an interval of 0, vLLM keeps states at the ends of prefill steps.

    It keeps no state that drafts have crossed.
    """
    core = folder / "v1/core"
    known: dict[str, Any] = {}
    exec(_source(core / "kv_cache_coordinator.py", "replay_boundaries"), known)  # noqa: S102
    for tokens in range(1, 200):
        kept = (*known["replay_boundaries"](tokens, 32, True), *known["replay_boundaries"](tokens, 32, False))
        assert max(kept) < tokens
    managers = core / "single_type_kv_cache_manager.py"
    cached = _source(managers, "cache_blocks", "SingleTypeKVCacheManager")
    assert "reachable_boundaries = [*replay_boundaries]" in cached
    assert set(re.findall(r"reachable_boundaries\.append\((.+?)[ )]", cached)) == {"request.shared_prefix_boundary"}
    mask = _source(managers, "reachable_block_mask", "MambaManager")
    assert "segment_tokens = None if retention_interval == 0 else retention_interval" in mask
    split = _source(core / "sched/scheduler.py", "_mamba_block_aligned_split", "Scheduler")
    assert "prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)" in split
    assert "junction_stop if start < junction < end else 0" in split


CHECKS = (
    check,
    check_kinds,
    check_draft_models,
    check_groups,
    check_divided,
    check_stages,
    check_kept_states,
)


@pytest.mark.parametrize("one", CHECKS)
def test_drafters_that_are_fed_context(one: object) -> None:
    """The installed vLLM satisfies each assumption."""
    assert callable(one)
    one(Path(vllm.__file__).parent)


@pytest.mark.slow
@pytest.mark.timeout(FETCH_SECONDS_MAX + 60)
def test_drafters_that_are_fed_context_of_other_supported_releases() -> None:
    """Each recorded release that is not installed satisfies every assumption."""
    for _, sources in other_releases():
        for one in CHECKS:
            one(sources / "vllm")


def test_the_caches_of_a_drafter_with_latents_are_served() -> None:
    """The attention of Kimi K3's drafter is not causal among drafts. The KV of a prefix does not depend on drafts."""
    latents: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.uint8}
    drafter = MLAAttentionSpec(**latents, non_causal_multi_token_decode=True)
    groups = [
        KVCacheGroupSpec(["model.0"], MLAAttentionSpec(**latents)),
        KVCacheGroupSpec(["model.1"], drafter, is_eagle_group=True),
    ]
    made = make_geometry(KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups), load_settings())
    assert [group.layers[0].page_bytes for group in made.groups] == [64 * 576, 64 * 576]
    assert made.ahead_tokens == 0
