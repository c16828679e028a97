"""Corrections to Megatron-Bridge 0.6.2's settings of some families, applied before a model is built."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention

from nemo_offload_rl.backends.megatron.upstream.local_layers import local_block


def complete_provider(provider: Any, hf_config: Any) -> None:
    """Set fields of the bridge's provider.

    Args:
        provider: The provider, with the run's settings already applied.
        hf_config: The model's config.
    """
    completions = {
        "deepseek_v3": _set_latent_attention,
        "exaone_moe": _set_biases_and_rotation,
        "glm4_moe": _set_shared_experts,
        "olmoe": _set_whole_norms,
        "qwen3_moe": _set_dense_layers,
    }
    if hf_config.model_type in completions:
        completions[hf_config.model_type](provider, hf_config)


def _set_dense_layers(provider: Any, hf_config: Any) -> None:
    """Set the dense layers of Qwen3-MoE between its layers with experts, which the bridge ignores."""
    step, dense = hf_config.decoder_sparse_step, hf_config.mlp_only_layers or ()
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(hf_config.num_hidden_layers)]
    if not all(has_experts):
        provider.moe_layer_freq = [int(has) for has in has_experts]
        if provider.transformer_layer_spec is not local_block:
            provider.transformer_layer_spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)


def _set_whole_norms(provider: Any, hf_config: Any) -> None:
    """Set norms over all heads of queries and of keys: the bridge's norm for OLMoE assumes as many keys as queries."""
    from megatron.bridge.models.minimax_m2.minimax_m2_provider import FullDimKNorm, FullDimQNorm

    make_layers = provider.transformer_layer_spec

    @wraps(make_layers)
    def make_layers_with_norms(*args: Any, **kwargs: Any) -> Any:
        layers = make_layers(*args, **kwargs)
        for layer in getattr(layers, "layer_specs", None) or [layers]:
            attention = layer.submodules.self_attention
            attention.module = SelfAttention
            attention.submodules.q_layernorm, attention.submodules.k_layernorm = FullDimQNorm, FullDimKNorm
        return layers

    provider.transformer_layer_spec = make_layers_with_norms


def _set_biases_and_rotation(provider: Any, hf_config: Any) -> None:
    """Enable the biases of EXAONE's experts and, in models without windows, rotation in all layers."""
    provider.moe_router_enable_expert_bias = True
    if hf_config.sliding_window is None:
        provider.no_rope_freq = None


def _set_shared_experts(provider: Any, hf_config: Any) -> None:
    """Set the size of all shared experts of a layer together: the bridge for GLM-4.5 has the size of one."""
    provider.moe_shared_expert_intermediate_size = hf_config.n_shared_experts * hf_config.moe_intermediate_size


def _set_latent_attention(provider: Any, hf_config: Any) -> None:
    """Set rotary embeddings that accept frequencies and have no fused kernel, and the factor of attention scores."""
    rope = hf_config.rope_parameters
    provider.rope_type = "rope"
    provider.apply_rope_fusion = False
    provider.rotary_scaling_factor = rope.get("factor") or 1.0
    provider.mscale_all_dim = rope.get("mscale_all_dim") or 0.0
    provider.num_query_groups = provider.num_attention_heads
