"""Checks which drafters with their own KV kvpipe serves, and states the facts on which that KV depends.

EAGLE, EAGLE3 and MTP drafters read the model's hidden states. Such a drafter computes the KV of position i from the
hidden state of position i and the token at i + 1 (`SpecDecodeBaseProposer.set_inputs_first_pass` in vLLM). The key of a
prefix therefore has to cover the token at i + 1. If there are several MTP modules, module j reads token i + j. A draft
model computes its KV like any other model.

A drafter that drafts a whole block at once (DFlash, DSpark) computes the KV of position i from the hidden states of
position i alone. Such a drafter computes after the accepted tokens are known (`DFlashSpeculator.propose`). After the
accepted tokens, the drafter writes KV of the sampled token and of mask tokens. No step reads this additional KV, and
the next step overwrites it.

A drafter runs after the model in the same step, over the same positions. vLLM ends the step for connectors after the
drafter's first pass (`finalize_kv_connector` of runner V1, `post_forward` of V2). Later passes of a drafter write only
after the last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpipe.connectors.vllm.identity.models import config_digest, refuse

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

WITHOUT_KV: Final = ("ngram", "ngram_gpu", "suffix")
_FED_HIDDEN_STATES: Final = ("eagle", "eagle3", "mtp")
_FED_CONTEXT: Final = ("dflash", "dspark")
_DRAFT_MODEL: Final = "draft_model"
_LAYERS: Final = "draft_model."
"""The prefix of the names of a draft model's layers (`DraftModelProposer._get_model`)."""
_FIRST_GROUP: Final = "vLLM's runner V1 lets it write into the blocks of the first KV cache group"


def check_drafter(config: VllmConfig) -> None:
    """Raise `UnsupportedError` for a speculative method that is not tested to draft the same tokens after hits."""
    drafts = config.speculative_config
    if drafts is None or drafts.method in WITHOUT_KV:
        return
    served = (*_FED_HIDDEN_STATES, *_FED_CONTEXT, _DRAFT_MODEL, *WITHOUT_KV)
    if drafts.method not in served:
        refuse(f"speculative method={drafts.method!r}", f"use one of {', '.join(served)}")
    if drafts.use_heterogeneous_vocab:
        refuse("a draft model with its own vocabulary (use_heterogeneous_vocab)", "use one with the model's vocabulary")
    if drafts.use_multi_module_mtp() and not config.use_v2_model_runner:
        refuse(
            "several MTP modules with vLLM's runner V1 (which runs only the first module)",
            "set num_speculative_tokens=1",
        )
    if drafts.uses_dynamic_speculative_decoding():
        refuse(
            f"speculative method={drafts.method!r} with num_speculative_tokens_per_batch_size (steps without drafts "
            "leave gaps in the drafter's KV)",
            "unset it",
        )


def check_states(config: VllmConfig) -> None:
    """Raise `UnsupportedError` for a speculative method that no engine test covers together with recurrent states."""
    if config.cache_config.use_replayssm:  # also set for RecoverSSM of Kimi's KDA
        refuse("use_replayssm=True (a block holds an older state and the later inputs)", "set it to False")
    drafts = config.speculative_config
    if drafts is None:
        return
    interval, stages = (
        config.cache_config.prefix_cache_retention_interval,
        config.parallel_config.pipeline_parallel_size,
    )
    if stages > 1 and interval != 0:  # earlier stages move an answer's states too late
        what = f"prefix_cache_retention_interval={interval} (vLLM offers states of answers that an earlier stage lacks)"
        refuse(f"{what} with speculative decoding and pipeline_parallel_size={stages}", "set it to 0")
    served = (*_FED_HIDDEN_STATES, *_FED_CONTEXT)
    if drafts.method not in served:
        why = (
            "no test has run it on an engine"
            if config.use_v2_model_runner or drafts.method != _DRAFT_MODEL
            else _FIRST_GROUP
        )
        refuse(
            f"speculative method={drafts.method!r} with recurrent states ({why})",
            f"use one of {', '.join(served)}, or unset speculative_config",
        )
    if drafts.draft_model_config.is_hybrid:
        refuse("a drafter that has recurrent states itself", "use a drafter without recurrent states")
    if drafts.method in _FED_HIDDEN_STATES and getattr(drafts, "disable_eagle_block_drop", False):
        refuse("disable_eagle_block_drop with recurrent states (a repeated prompt would find no state)", "unset it")


def check_groups(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Raise `UnsupportedError` if vLLM writes a draft model's KV into blocks with KV of other layers.

    Runner V1 gives a draft model the block table of the first group (`GPUModelRunner._build_attention_metadata`), even
    if the draft model's layers are in another group. Groups share their memory, so the drafter overwrites the model's
    own KV, with or without a connector.
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
    """Return the speculative method if it is tested only on vLLM's schedulers, or "" if it is tested on engines."""
    drafts = config.speculative_config
    shown = drafts is None or drafts.method not in _FED_CONTEXT or not config.use_v2_model_runner
    return "" if shown else str(drafts.method)


def has_kv(config: VllmConfig) -> bool:
    """Whether the engine has a drafter whose layers have KV."""
    drafts = config.speculative_config
    return drafts is not None and drafts.method not in WITHOUT_KV


def ahead_tokens(config: VllmConfig) -> int:
    """Return the number of following tokens on which the KV of a position depends."""
    drafts = config.speculative_config
    if drafts is None or drafts.method not in _FED_HIDDEN_STATES:
        return 0
    return _modules(drafts)


def states_back(config: VllmConfig) -> int:
    """Return how many blocks before a prompt's last whole block vLLM keeps the prompt's last state.

    The result is 1 if vLLM drops the last block of a hit (`get_mamba_prefill_checkpoint_position`). The drafters for
    which vLLM drops this block differ between vLLM's releases.
    """
    drafts = config.speculative_config
    return int(drafts is not None and drafts.use_eagle_block_drop())


def branches_within(config: VllmConfig) -> bool:
    """Whether vLLM keeps the state at which prompts branch within a block (`KVCacheManager.__init__`)."""
    drafts = config.speculative_config
    if drafts is None or not drafts.use_eagle_block_drop() or _modules(drafts) > 1:
        return False
    return bool(config.cache_config.enable_mamba_shared_prefix_checkpoint)


def facts(config: VllmConfig) -> dict[str, Any]:
    """Return the facts, besides tokens and weights, on which a drafter's KV depends.

    The result is empty without a drafter that has KV.
    """
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
    """Return the number of modules that draft in sequence, each with its own KV."""
    if not drafts.use_multi_module_mtp():
        return 1
    modules: int = getattr(drafts.draft_model_config.hf_config, "num_nextn_predict_layers", 1)
    return min(modules, drafts.num_speculative_tokens)
