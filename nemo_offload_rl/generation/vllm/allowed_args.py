"""Lists the arguments of vLLM's engine that a user may set (`policy.generation.vllm_kwargs`), and why not the others.

An argument is allowed if it changes only the engine's speed or reports. Arguments that change the model, the place of
its weights, the processes or the sampling have their own key or are refused. Every argument of vLLM 0.25.1 is in one of
the three lists.
"""

from collections.abc import Mapping

_REFUSED: Mapping[str, str] = {
    "the engine's model must be the policy's, as policy.model_name and policy.hf_config_overrides make it": """
        config_format convert disable_sliding_window hf_config_path hf_overrides model_class_overrides
        model_impl override_attention_dtype revision code_revision runner trust_remote_code
    """,
    "the engine loads nothing from files: the policy sends all weights": """
        download_dir ignore_patterns load_format max_parallel_loading_workers model_loader_extra_config
        model_weights pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size
        safetensors_prefetch_num_threads use_tqdm_on_load weight_transfer_config
    """,
    "the slots of the cluster decide where an engine runs, and tensor_parallel_size over how many devices": """
        _api_process_count _api_process_rank cp_kv_cache_interleave_size data_parallel_address
        data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
        data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port data_parallel_size
        data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold
        dcp_comm_backend dcp_kv_cache_interleave_size decode_context_parallel_size device_ids
        disable_nccl_for_dp_synchronization enable_dbo master_addr master_port nnodes node_rank numa_bind
        numa_bind_cpus numa_bind_nodes pipeline_parallel_size prefill_context_parallel_size
        ray_workers_use_nsight ubatch_size
    """,
    "experts would lie elsewhere than refits are tested with": """
        all2all_backend enable_elastic_ep enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy
    """,
    "vLLM computes such weights and scales once after loading, and a refit brings plain ones": """
        allow_deprecated_quantization calculate_kv_scales linear_backend quantization quantization_config
    """,
    "other kernels reformat weights once after loading, and refits bring them as they are": """
        kernel_config moe_backend
    """,
    "policy.generation.enable_lora decides whether the engine applies the policy's adapters": """
        default_mm_loras enable_lora enable_mixed_moe_lora_format enable_tower_connector_lora
        fully_sharded_loras lora_dtype lora_target_modules max_cpu_loras max_lora_rank max_loras
        specialize_active_lora
    """,
    "the draft model would get no refits": """
        spec_method spec_model spec_tokens speculative_config
    """,
    "keys and values kept elsewhere would outlive the weights that made them": """
        ec_transfer_config kv_events_config kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill
        kv_transfer_config
    """,
    "weights on the host are known neither to sleep mode nor to refits; enable_sleep_mode frees the device": """
        cpu_offload_gb cpu_offload_params enable_cumem_allocator offload_backend offload_group_size
        offload_num_in_group offload_params offload_prefetch_step
    """,
    "responses are drawn as the keys of policy.generation say, with the logprobs that drew them": """
        diffusion_config generation_config logits_processors override_generation_config reasoning_config
        reasoning_parser reasoning_parser_plugin skip_tokenizer_init structured_outputs_config tokens_only
    """,
    "prompts are text": """
        allowed_local_media_path allowed_media_domains disable_chunked_mm_input enable_mm_embeds
        enable_mm_processor_stats enable_prompt_embeds interleave_mm_strings language_model_only
        limit_mm_per_prompt media_io_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
        mm_encoder_only mm_encoder_tp_mode mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
        mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling video_pruning_rate
    """,
    "the models that are trained have no state-space layers": """
        enable_mamba_cache_stochastic_rounding gdn_prefill_backend mamba_backend mamba_cache_philox_rounds
        mamba_config
    """,
    "nothing here reads what it adds": """
        additional_config enable_log_requests io_processor_plugin pooler_config
        renderer_num_workers scheduler_cls served_model_name
    """,
}
REFUSED: Mapping[str, str] = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
"""Reason why each of these arguments may not be set."""

_ALLOWED = """
    aggregate_engine_logging async_scheduling attention_backend attention_config block_size collect_detailed_traces
    compilation_config cpu_distributed_timeout_seconds cudagraph_capture_sizes cudagraph_metrics
    disable_cascade_attn disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
    distributed_timeout_seconds enable_chunked_prefill enable_flashinfer_autotune enable_layerwise_nvtx_tracing
    enable_logging_iteration_details enable_mfu_metrics enable_prefix_caching fail_on_environ_validation hf_token
    ir_op_priority jit_monitor_mode jit_monitor_verbose kv_cache_dtype_skip_layers kv_cache_metrics
    kv_cache_metrics_sample long_prefill_token_threshold mamba_block_size mamba_cache_dtype mamba_cache_mode
    mamba_ssm_cache_dtype max_cudagraph_capture_size max_logprobs max_long_partial_prefills max_num_batched_tokens
    max_num_partial_prefills max_num_seqs num_gpu_blocks_override optimization_level otlp_traces_endpoint
    performance_mode prefill_schedule_interval prefix_caching_hash_algo profiler_config scheduler_reserve_full_isl
    scheduling_policy show_hidden_metrics_for_version shutdown_timeout stream_interval tokenizer tokenizer_mode
    tokenizer_revision use_fp64_gumbel watermark
"""
ALLOWED = frozenset(_ALLOWED.split())
"""Arguments that a user may set."""

_KEYS = "policy.generation.vllm_cfg"
OWN_KEYS: Mapping[str, str] = {
    "model": "policy.model_name",
    "dtype": f"{_KEYS}.precision",
    "seed": "grpo.seed",
    "kv_cache_memory_bytes": f"{_KEYS}.kv_cache_memory_gib",
    "kv_cache_dtype": f"{_KEYS}.kv_cache_dtype",
    "tensor_parallel_size": f"{_KEYS}.tensor_parallel_size",
    "enable_expert_parallel": f"{_KEYS}.expert_parallel_size",
    "gpu_memory_utilization": f"{_KEYS}.gpu_memory_utilization",
    "enable_sleep_mode": f"{_KEYS}.enable_sleep_mode",
    "max_model_len": f"{_KEYS}.max_model_len",
    "enforce_eager": f"{_KEYS}.enforce_eager",
    "enable_return_routed_experts": "policy.router_replay.enabled",
    "logprobs_mode": "nothing, for it is always processed_logprobs",
    "distributed_executor_backend": "nothing, for tensor_parallel_size decides",
    "worker_cls": "nothing, for refit needs its own",
    "worker_extension_cls": "nothing, for refit needs its own",
}
"""Key to use instead of each argument that this package sets."""
