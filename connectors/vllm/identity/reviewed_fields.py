"""Lists the fields of vLLM's configuration on which KV depends, and the reasons why KV does not depend on the others.

Names are CLASS.FIELD, or CLASS for all fields of a class. A field that is in no list belongs to a newer vLLM, and is
part of the key. If a supported release of vLLM has such a field, a test fails (`tests/contract/test_reviewed.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final


def _names(classes: dict[str, str]) -> Iterator[str]:
    for name, fields in classes.items():
        yield from (f"{name}.{field}" for field in fields.split())


def _classes(text: str) -> frozenset[str]:
    return frozenset(text.split())


IRRELEVANT: Final[dict[str, frozenset[str]]] = {
    "The class configures logs, metrics, profiles and watchdogs.": _classes(
        "ObservabilityConfig LoggingConfig ProfilerConfig WatchdogConfig FaultToleranceConfig"
    ),
    "The class configures connectors, events and transfers, not the model.": _classes(
        "KVTransferConfig KVEventsConfig ECTransferConfig EncoderCacheManagerConfig WeightTransferConfig"
    ),
    "The class acts after the last layer, on logits and tokens, or kvpipe refuses its use.": _classes(
        "StructuredOutputsConfig ReasoningConfig WatermarkConfig PoolerConfig DiffusionConfig AuxOutputConfig"
    ),
    "The class says where weights come from and lie. The key has their bytes.": _classes(
        "LoadConfig OffloadConfig UVAOffloadConfig PrefetchOffloadConfig EngramConfig HiSparseConfig"
    ),
    "The class says which tokens are computed together. KV differs by batch with and without kvpipe.": _classes(
        "SchedulerConfig"
    ),
    "The class says on which rank an expert is, or how many copies there are.": _classes("EPLBConfig"),
    "The key has its content: of the model's own configuration, of media, of quantization, of the device.": _classes(
        "ModelArchitectureConfig MultiModalConfig QuantSpec QuantizationConfigArgs DeviceConfig"
    ),
    "The class is no part of an engine's configuration: inputs of profiles, speech, helpers.": _classes(
        "BaseDummyOptions VideoDummyOptions ImageDummyOptions AudioDummyOptions SpeechToTextParams "
        "SpeechToTextConfig Range KVCacheDTypeHandler"
    ),
    "The key has its content: weights, code, dtypes, media, quantization, adapters, layouts, ranks.": frozenset(
        _names(
            {
                "VllmConfig": "quant_config",
                "ModelConfig": """model_weights hf_config hf_text_config dtype max_model_len quantization
                quantization_config hf_overrides revision code_revision is_submodel_config
                word_embeddings_untied_by_checkpoint""",
                "CacheConfig": """block_size user_specified_block_size kv_cache_layout prefix_match_unit cache_dtype
                is_attention_free sliding_window prefix_caching_hash_algo mamba_page_size_padded skip_page_size_padded
                mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode
                effective_attention_block_size hash_block_size cache_hit_alignment_tokens _block_size_resolved""",
                "ParallelConfig": """pipeline_parallel_size tensor_parallel_size
                prefill_context_parallel_size world_size
                decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
                _allow_auto_resolve_cp_interleave_size""",
                "AttentionConfig": "backend backend_per_kind indexer_kv_dtype hisparse_config",
                "LoRAConfig": """lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format
                enable_moe_shared_loras default_mm_loras""",
                "SpeculativeConfig": """method model quantization kv_cache_dtype draft_model_config revision
                code_revision max_model_len""",
            }
        )
    ),
    "It names a model, its tokenizer, its files, or what a server answers.": frozenset(
        _names(
            {
                "VllmConfig": "instance_id",
                "ModelConfig": """model tokenizer tokenizer_mode trust_remote_code hf_config_path
                allowed_local_media_path
                allowed_media_domains tokenizer_revision skip_tokenizer_init served_model_name config_format hf_token
                allow_deprecated_quantization io_processor_plugin renderer_num_workers enable_prompt_embeds""",
            }
        )
    ),
    "It acts after the last layer, on logits and tokens.": frozenset(
        _names(
            {
                "ModelConfig": """runner convert seed return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel
                enable_trace_replay generation_config override_generation_config logits_processors pooler_config""",
                "SpeculativeConfig": """num_speculative_tokens num_speculative_tokens_per_batch_size
                disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction
                use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth
                suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob
                rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length
                enable_adaptive_verification draft_sample_method dspark_draft_topk draft_lm_head_quantization
                fly_entropy_top_k fly_entropy_threshold fly_window_size xpress_topc disable_lookahead_block_hashes""",
            }
        )
    ),
    "It says how much memory is used, where it is, or when it is given back.": frozenset(
        _names(
            {
                "ModelConfig": """enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
                sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator""",
                "CacheConfig": """gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
                kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size
                kv_offloading_backend simple_cpu_offload_num_blocks""",
                "LoRAConfig": "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels",
            }
        )
    ),
    "It says which prefixes vLLM's own cache keeps.": frozenset(
        _names(
            {
                "CacheConfig": """enable_prefix_caching prefix_cache_retention_interval
                enable_mamba_shared_prefix_checkpoint""",
            }
        )
    ),
    "It configures processes, their network and their starts and ends.": frozenset(
        _names(
            {
                "VllmConfig": "shutdown_timeout",
                "ParallelConfig": """data_parallel_size data_parallel_size_local data_parallel_rank
                data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port dp_sync_interval
                data_parallel_master_port data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
                is_moe_model enable_ep_weight_filter enable_eplb expert_placement_strategy max_parallel_loading_workers
                enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size disable_nccl_for_dp_synchronization
                ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend master_addr
                master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
                distributed_timeout_seconds cpu_distributed_timeout_seconds rank _data_parallel_master_port_list
                _coord_store_port data_parallel_index _api_process_count _api_process_rank enable_fault_tolerance
                enable_batch_sharded_sampling enable_dbo ubatch_size dbo_decode_token_threshold
                dbo_prefill_token_threshold""",
            }
        )
    ),
    "It says which batches are replayed as graphs, and where compiled code is kept.": frozenset(
        _names(
            {
                "ModelConfig": "enforce_eager",
                "SpeculativeConfig": "enforce_eager",
                "CompilationConfig": """debug_dump_path cache_dir compile_cache_save_format local_cache_dir traced_files
                compilation_time encoder_compilation_time static_forward_context static_all_moe_layers
                fast_moe_cold_start enabled_custom_ops disabled_custom_ops splitting_ops cudagraph_mm_encoder
                encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch
                encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay
                decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold compile_ranges_endpoints
                cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs
                cudagraph_specialize_lora max_cudagraph_capture_size""",
                "KernelConfig": "enable_cutedsl_warmup enable_jit_warmup",
            }
        )
    ),
    "It sets other fields, which are reviewed here.": frozenset(
        _names(
            {
                "VllmConfig": "optimization_level performance_mode",
                "ModelConfig": "spec_target_max_model_len",
                "SpeculativeConfig": """target_model_config target_parallel_config draft_parallel_config
                draft_load_config
                draft_tensor_parallel_size tensor_parallel_size""",
            }
        )
    ),
}
"""By reason, the fields on which KV does not depend, or whose effect is already in the key."""

PART: Final = frozenset(
    _names(
        {
            "VllmConfig": """model_config cache_config parallel_config scheduler_config device_config load_config
            offload_config attention_config aux_output_config engram_config mamba_config kernel_config lora_config
            speculative_config watermark_config diffusion_config structured_outputs_config observability_config
            logging_config compilation_config profiler_config kv_transfer_config kv_events_config ec_transfer_config
            ec_manager_config reasoning_config weight_transfer_config watchdog_config additional_config""",
            "ModelConfig": """disable_sliding_window disable_cascade_attn model_class_overrides model_impl
                multimodal_config""",
            "CacheConfig": """kv_cache_dtype_skip_layers replayssm_buffer_len use_replayssm use_kda_recoverssm
            kv_sharing_fast_prefill swa_bounded_replay""",
            "ParallelConfig": "worker_cls worker_extension_cls eplb_config fault_tolerance_config",
            "AttentionConfig": """minimax_m3_msa_decode_backend flash_attn_version
            flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
            use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization
            indexer_sparse_logits use_non_causal sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
            flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size
            trtllm_ragged_backend""",
            "CompilationConfig": """mode backend custom_ops ir_enable_torch_wrap compile_mm_encoder compile_sizes
            inductor_compile_config inductor_passes use_inductor_graph_partition pass_config dynamic_shapes_config""",
            "PassConfig": """fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops enable_qk_norm_rope_fusion
            fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm fuse_rope_kvcache
            fuse_qk_norm_rope_kvcache rope_kvcache_fusion_max_token_num""",
            "DynamicShapesConfig": "type evaluate_guards assume_32_bit_indexing",
            "KernelConfig": """ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune moe_backend
            sparse_indexer_topk_backend linear_backend linear_backend_per_quant monokernel""",
            "IrOpPriorityConfig": "rms_norm fused_add_rms_norm gelu_and_mul_sparse",
            "MambaConfig": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
            "LoRAConfig": "specialize_active_lora",
            "SpeculativeConfig": "moe_backend attention_backend index_share_for_mtp_iteration parallel_drafting",
        }
    )
)
"""The fields that choose the computation, its precision or its kernel, and the fields that contain such fields."""

OF_RANKS: Final = frozenset(
    _names(
        {
            "ParallelConfig": """enable_hc_sp enable_expert_parallel all2all_backend disable_custom_all_reduce
            dcp_comm_backend dcp_q_replicate""",
            "PassConfig": "fuse_allreduce_rms fi_allreduce_fusion_max_size_mb",
            "AttentionConfig": "indexer_tp_shard_min_rows minimax_m3_indexer_cp",
            "LoRAConfig": "fully_sharded_loras",
        }
    )
)
"""The fields that choose how ranks divide work and add up results.

Layouts also differ in these choices (decision 24).
"""
