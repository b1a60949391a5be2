"""The classes, fields and attributes of vLLM on which kvpipe relies, by file. Records contain all of these."""

from __future__ import annotations

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
_FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
_INTERFACE = "vllm/v1/kv_cache_interface.py"
_OUTPUT = "vllm/v1/core/sched/output.py"
_SPEC = ("block_size", "page_size_bytes", "prefix_cacheable")

SIGNATURES: dict[str, tuple[str, ...]] = {
    BASE: ("KVConnectorBase_V1", "SupportsHMA", "KVConnectorWorkerMetadata"),
}
"""Classes whose methods are recorded, by file. kvpipe subclasses these classes."""

FIELDS: dict[str, tuple[str, ...]] = {
    BASE: ("KVConnectorTransferResults",),
    "vllm/v1/outputs.py": ("KVConnectorOutput",),
    _OUTPUT: ("CachedRequestData", "NewRequestData", "SchedulerOutput"),
}
"""Dataclasses whose fields are recorded, by file."""

RELIED: dict[str, dict[str, tuple[str, ...]]] = {
    BASE: {
        "KVConnectorBase_V1": ("_kv_cache_config", "_kv_transfer_config"),
        "KVConnectorMetadata": (),
        "KVConnectorRole": ("SCHEDULER", "WORKER"),
        "KVConnectorTransferResults": ("failed_recving", "finished_recving"),
    },
    _FACTORY: {"KVConnectorFactory": ("_registry", "register_connector")},
    _INTERFACE: {
        "FullAttentionSpec": _SPEC,
        "KVCacheConfig": (
            "cache_hit_alignment_tokens",
            "hash_block_size",
            "kv_cache_groups",
            "kv_cache_layout",
            "kv_cache_tensors",
            "num_blocks",
        ),
        "KVCacheGroupSpec": (
            "enable_kv_transfer",
            "host_resident",
            "kv_cache_spec",
            "layer_names",
        ),
        "KVCacheTensor": ("block_stride", "layer_stride", "layers"),
        "MLAAttentionSpec": _SPEC,
        "MambaSpec": (
            *_SPEC,
            "dtypes",
            "mamba_cache_mode",
            "mamba_type",
            "num_prefill_checkpoint_blocks",
            "num_speculative_blocks",
            "shapes",
            "state_content_size_bytes",
        ),
        "SlidingWindowSpec": (*_SPEC, "extra_retained_tokens", "sliding_window"),
        "UniformTypeKVCacheSpecs": ("block_size", "kv_cache_specs"),
    },
    _OUTPUT: {
        "KVConnectorBlockState": ("boundary_state_offloads",),
        "SchedulerOutput": ("kv_connector_block_state", "num_scheduled_tokens", "preempted_req_ids"),
    },
    "vllm/config/attention.py": {
        "AttentionConfig": ("disable_flashinfer_q_quantization", "use_prefill_query_quantization"),
    },
    "vllm/config/aux_output.py": {"AuxOutputConfig": ("enabled",)},
    "vllm/config/cache.py": {
        "CacheConfig": (
            "cache_dtype",
            "enable_mamba_shared_prefix_checkpoint",
            "enable_prefix_caching",
            "kv_cache_dtype_skip_layers",
            "kv_offloading_backend",
            "kv_offloading_size",
            "prefix_cache_retention_interval",
            "prefix_caching_hash_algo",
            "use_replayssm",
            "user_specified_block_size",
        )
    },
    "vllm/config/kv_transfer.py": {
        "KVTransferConfig": (
            "engine_id",
            "has_connector",
            "is_kv_consumer",
            "is_kv_producer",
            "kv_connector",
            "kv_connector_extra_config",
            "kv_load_failure_policy",
        ),
    },
    "vllm/config/lora.py": {
        "LoRAConfig": (
            "enable_mixed_moe_lora_format",
            "enable_moe_shared_loras",
            "enable_tower_connector_lora",
            "lora_dtype",
            "target_modules",
        ),
    },
    "vllm/config/model.py": {
        "ModelConfig": (
            "attn_type",
            "dtype",
            "enable_prompt_embeds",
            "enable_sleep_mode",
            "hf_config",
            "hf_text_config",
            "is_diffusion",
            "is_encoder_decoder",
            "is_hybrid",
            "is_mm_prefix_lm",
            "is_prefix_caching_supported",
            "max_model_len",
            "model",
            "multimodal_config",
            "original_max_model_len",
            "pooler_config",
            "quantization",
            "quantization_config",
            "revision",
            "rswa_window",
            "served_model_name",
            "sleep_mode_backend",
            "uses_mrope",
        ),
    },
    "vllm/config/multimodal.py": {"MultiModalConfig": ("is_multimodal_pruning_enabled", "video_pruning_rate")},
    "vllm/config/parallel.py": {
        "ParallelConfig": (
            "cp_kv_cache_interleave_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "distributed_executor_backend",
            "enable_ep_weight_filter",
            "enable_expert_parallel",
            "enable_fault_tolerance",
            "nnodes",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "rank",
            "tensor_parallel_size",
            "use_ubatching",
            "worker_cls",
            "world_size",
        ),
    },
    "vllm/config/scheduler.py": {"SchedulerConfig": ("async_scheduling", "max_num_batched_tokens", "policy")},
    "vllm/config/speculative.py": {
        "SpeculativeConfig": (
            "disable_eagle_block_drop",
            "draft_model_config",
            "kv_cache_dtype",
            "method",
            "num_speculative_tokens",
            "use_eagle_block_drop",
            "use_heterogeneous_vocab",
            "use_multi_module_mtp",
            "uses_dynamic_speculative_decoding",
        )
    },
    "vllm/config/vllm.py": {
        "VllmConfig": (
            "_post_init_kv_transfer_config",
            "_resolve_mm_embedding_inputs",
            "attention_config",
            "aux_output_config",
            "cache_config",
            "compilation_config",
            "ec_transfer_config",
            "instance_id",
            "is_mm_encoder_only",
            "kv_events_config",
            "kv_transfer_config",
            "load_config",
            "lora_config",
            "max_in_flight_tokens",
            "model_config",
            "num_lookahead_tokens",
            "num_speculative_tokens",
            "parallel_config",
            "scheduler_config",
            "speculative_config",
            "use_v2_model_runner",
        ),
    },
    "vllm/model_executor/offloader/prefetch.py": {
        "PrefetchOffloader": ("module_offloaders",),
        "_CpuParamOffloader": ("_cpu_storage",),
        "_ModuleOffloader": ("_param_offloaders",),
    },
    "vllm/lora/request.py": {"LoRARequest": ("is_3d_lora_weight",)},
    "vllm/lora/worker_manager.py": {"WorkerLoRAManager": ("_adapter_manager", "_load_adapter")},
    "vllm/multimodal/inputs.py": {
        "MultiModalFeatureSpec": ("modality", "mm_position"),
        "PlaceholderRange": ("length", "offset"),
    },
    "vllm/v1/attention/backends/triton_attn.py": {
        "TritonAttentionImpl": ("_ensure_scale_caches", "_is_per_token_head_quant")
    },
    "vllm/v1/core/block_pool.py": {"BlockPool": ("blocks", "get_num_free_blocks", "num_gpu_blocks")},
    "vllm/v1/core/kv_cache_coordinator.py": {"KVCacheCoordinator": ("single_type_managers",)},
    "vllm/v1/core/kv_cache_manager.py": {
        "KVCacheBlocks": ("blocks",),
        "KVCacheManager": ("block_pool", "coordinator", "evict_blocks", "free", "reset_prefix_cache"),
    },
    "vllm/v1/core/kv_cache_utils.py": {"KVCacheBlock": ("block_hash", "block_id", "is_null")},
    "vllm/v1/core/single_type_kv_cache_manager.py": {
        "SingleTypeKVCacheManager": ("_pending_cow_copies", "num_cached_block", "req_to_blocks")
    },
    "vllm/v1/metrics/cache_hit_source.py": {"CacheHitSource": ("DISK", "EXTERNAL_UNSPECIFIED", "HOST")},
    "vllm/v1/engine/core.py": {"EngineCore": ("_reset_caches", "release_kv_cache_memory", "sleep", "vllm_config")},
    "vllm/v1/executor/abstract.py": {"Executor": ("collective_rpc", "get_class")},
    "vllm/v1/outputs.py": {"KVConnectorOutput": ("invalid_block_ids", "kv_connector_worker_meta")},
    "vllm/v1/request.py": {
        "Request": (
            "all_token_ids",
            "block_hashes",
            "cache_salt",
            "kv_hints",
            "kv_transfer_params",
            "lora_request",
            "mm_features",
            "num_computed_tokens",
            "num_preemptions",
            "num_prompt_tokens",
            "num_tokens",
            "priority",
            "prompt_embeds",
            "prompt_is_token_ids",
            "request_id",
            "resumable",
            "session_id",
            "shared_prefix_boundary",
            "skip_reading_prefix_cache",
            "status",
            "trace_headers",
        ),
        "RequestStatus": ("RUNNING",),
    },
}
"""The attributes that the connector reads of vLLM's objects, by file and class."""
