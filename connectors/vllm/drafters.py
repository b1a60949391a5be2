"""Drafters with KV of their own: which are served, and what that KV depends on.

A drafter that is fed the model's hidden states (EAGLE, EAGLE3, MTP) computes the KV of position i from the hidden
state of i and the token at i + 1 (`SpecDecodeBaseProposer.set_inputs_first_pass` in vLLM): the key of a prefix has
to cover that token. Module j of several MTP modules is fed token i + j. A draft model is a model like any other.

One that drafts a block at once (DFlash, DSpark) projects the KV of position i from the hidden states of i alone, once
it is known which tokens were accepted (`DFlashSpeculator.propose`). Behind them it writes KV of the sampled token and
of masks, which is of no use to anybody and written over by the next step.

A drafter runs behind the model in the same step, over the same positions, and before vLLM ends the step for connectors
(`finalize_kv_connector` of runner V1, `post_forward` of V2). Its later passes write behind the last token only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpipe.connectors.vllm.models import config_digest, refuse

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

WITHOUT_KV: Final = ("ngram", "ngram_gpu", "suffix")
_FED_HIDDEN_STATES: Final = ("eagle", "eagle3", "mtp")
_FED_CONTEXT: Final = ("dflash", "dspark")
_DRAFT_MODEL: Final = "draft_model"
_LAYERS: Final = "draft_model."
"""What the names of a draft model's layers begin with (`DraftModelProposer._get_model`)."""
_FIRST_GROUP: Final = "vLLM's runner V1 lets it write into the blocks of the first KV cache group"


def check(config: VllmConfig) -> None:
    """Raise `UnsupportedError` for a way to draft of which it is not shown that hits leave it as it was."""
    drafts = config.speculative_config
    if drafts is None or drafts.method in WITHOUT_KV:
        return
    served = (*_FED_HIDDEN_STATES, *_FED_CONTEXT, _DRAFT_MODEL, *WITHOUT_KV)
    if drafts.method not in served:
        refuse(f"speculative method={drafts.method!r}", f"use one of {', '.join(served)}")
    if drafts.use_heterogeneous_vocab:
        refuse("a draft model with a vocabulary of its own (use_heterogeneous_vocab)", "use one of the model's own")
    if drafts.use_multi_module_mtp() and not config.use_v2_model_runner:
        refuse("several MTP modules with vLLM's runner V1 (which runs the first alone)", "set num_speculative_tokens=1")
    if drafts.uses_dynamic_speculative_decoding():
        refuse(
            f"speculative method={drafts.method!r} with num_speculative_tokens_per_batch_size (steps without drafts "
            "leave gaps in the drafter's KV)",
            "unset it",
        )


def check_states(config: VllmConfig) -> None:
    """Raise `UnsupportedError` for a way to draft with which no engine has shown recurrent states to be right."""
    if config.cache_config.use_replayssm:  # RecoverSSM of Kimi's KDA, too
        refuse("use_replayssm=True (a block holds an older state, and what came since then)", "set it to False")
    drafts = config.speculative_config
    if drafts is None:
        return
    interval, stages = (
        config.cache_config.prefix_cache_retention_interval,
        config.parallel_config.pipeline_parallel_size,
    )
    if stages > 1 and interval != 0:  # all but the last move an answer's states steps later, or never
        what = f"prefix_cache_retention_interval={interval} (vLLM offers states of answers that an earlier stage lacks)"
        refuse(f"{what} with speculative decoding and pipeline_parallel_size={stages}", "set it to 0")
    served = (*_FED_HIDDEN_STATES, *_FED_CONTEXT)
    if drafts.method not in served:
        why = "no engine has shown it" if config.use_v2_model_runner or drafts.method != _DRAFT_MODEL else _FIRST_GROUP
        refuse(
            f"speculative method={drafts.method!r} with recurrent states ({why})",
            f"use one of {', '.join(served)}, or unset speculative_config",
        )
    if drafts.draft_model_config.is_hybrid:
        refuse("a drafter with recurrent states of its own", "use one without")
    if drafts.method in _FED_HIDDEN_STATES and getattr(drafts, "disable_eagle_block_drop", False):
        refuse("disable_eagle_block_drop with recurrent states (a repeated prompt would find none)", "unset it")


def check_groups(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Raise `UnsupportedError` where vLLM writes a draft model's KV into blocks of others' KV.

    Runner V1 hands it the block table of the first group (`GPUModelRunner._build_attention_metadata`), whichever its
    layers are in: groups share their memory, so that it spoils the model's own KV, with a connector or without.
    """
    drafts = config.speculative_config
    if drafts is None or drafts.method != _DRAFT_MODEL or config.use_v2_model_runner:
        return
    if any(name.startswith(_LAYERS) for group in cache.kv_cache_groups[1:] for name in group.layer_names):
        refuse(
            f"a draft model whose layers are not in the first KV cache group ({_FIRST_GROUP})",
            "unset speculative_config",
        )


def unproven(config: VllmConfig) -> str:
    """Return the way to draft if it has been shown on no engine, only on vLLM's schedulers."""
    drafts = config.speculative_config
    shown = drafts is None or drafts.method not in _FED_CONTEXT or not config.use_v2_model_runner
    return "" if shown else str(drafts.method)


def has_kv(config: VllmConfig) -> bool:
    """Whether the drafter has layers with KV."""
    drafts = config.speculative_config
    return drafts is not None and drafts.method not in WITHOUT_KV


def ahead_tokens(config: VllmConfig) -> int:
    """Return on how many tokens behind a position its KV depends."""
    drafts = config.speculative_config
    if drafts is None or drafts.method not in _FED_HIDDEN_STATES:
        return 0
    return _modules(drafts)


def states_back(config: VllmConfig) -> int:
    """Return how many blocks before a prompt's last whole one vLLM keeps its last state.

    Where it drops a hit's last block (`get_mamba_prefill_checkpoint_position`): releases differ in for which drafters.
    """
    drafts = config.speculative_config
    return int(drafts is not None and drafts.use_eagle_block_drop())


def branches_within(config: VllmConfig) -> bool:
    """Whether vLLM keeps the state of where prompts branch within a block (`KVCacheManager.__init__`)."""
    drafts = config.speculative_config
    if drafts is None or not drafts.use_eagle_block_drop() or _modules(drafts) > 1:
        return False
    return bool(config.cache_config.enable_mamba_shared_prefix_checkpoint)


def facts(config: VllmConfig) -> dict[str, Any]:
    """Return what a drafter's KV depends on beside tokens and weights, as plain data; empty: there is none."""
    drafts = config.speculative_config
    if drafts is None or drafts.method in WITHOUT_KV:
        return {}
    model = drafts.draft_model_config
    return {
        "drafter": {
            "method": drafts.method,
            "ahead_tokens": ahead_tokens(config),
            "model_config": config_digest(model.hf_config),
            "model_dtype": str(model.dtype),
            "quantization": str(model.quantization),
            **({"kv_cache_dtype": str(drafts.kv_cache_dtype)} if drafts.kv_cache_dtype is not None else {}),
        }
    }


def _modules(drafts: SpeculativeConfig) -> int:
    """Return how many modules draft, one behind the other, each with its own KV."""
    if not drafts.use_multi_module_mtp():
        return 1
    modules: int = getattr(drafts.draft_model_config.hf_config, "num_nextn_predict_layers", 1)
    return min(modules, drafts.num_speculative_tokens)
