"""Layers of `transformer_impl: local`, in plain torch, without kernels of Transformer Engine or apex.

Megatron-core has such layers for most families. This module adds norms for sequence parallelism, norms whose weights
are stored minus one, and attention whose values differ in size from its keys.
"""

from copy import copy
from dataclasses import fields, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, torch_chunk_gated_delta_rule
from megatron.core.ssm.gated_delta_net import common as delta_nets
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

PROVIDER_FIELDS = {
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
"""Fields of Megatron's configuration that turn fused kernels off."""


def local_norm(config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:
    """Make the configuration's norm over `hidden_size` numbers.

    With sequence parallelism, a rank's gradient of the norm covers only its own tokens. Megatron-core sums it over the
    ranks that share a row if the parameter is marked, as Transformer Engine's parameters are.
    """
    if config.layernorm_zero_centered_gamma:
        norm: nn.Module = ZeroCenteredNorm(config, hidden_size, eps)
    else:
        whole = copy(config)
        whole.sequence_parallel = False  # megatron-core's norms refuse it, since they do not set the mark
        norm = cast(nn.Module, WrappedTorchNorm(whole, hidden_size, eps))
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class ZeroCenteredNorm(nn.Module):
    """Norm that multiplies by its weight plus one.

    Args:
        config: Megatron's config; its `normalization` is RMSNorm or LayerNorm.
        hidden_size: Size of the last dimension.
        eps: Number added to the mean square.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        is_centered = config.normalization == "LayerNorm"
        self.bias = nn.Parameter(torch.zeros_like(self.weight)) if is_centered else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize in float32 and return the input's type."""
        value, scale = hidden.float(), self.weight.float() + 1
        if self.bias is None:
            return F.rms_norm(value, scale.shape, scale, self.eps).type_as(hidden)
        return F.layer_norm(value, scale.shape, scale, self.bias.float(), self.eps).type_as(hidden)


class LatentAttention(DotProductAttention):
    """Attention over the keys and values of latent attention.

    Args:
        k_channels: Size of a head's keys; ignored, since the keys have it.
        v_channels: Size of a head's values.
        options: Options of Megatron-core's attention.
    """

    def __init__(self, *, k_channels: int | None = None, v_channels: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if v_channels is not None:  # without it, Megatron-core replaces this module later
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LocalDeltaNet(GatedDeltaNet):
    """Gated delta net by torch's operations, for padded rows; Megatron-core's needs flash-linear-attention.

    Args:
        config: Megatron's config.
        args: Further arguments of Megatron-core's module.
        options: The same, by name.
    """

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        in_torch = copy(config)
        in_torch.deterministic_mode = True  # Megatron-core then uses no kernels
        has_kernels, delta_nets.HAVE_FLA = delta_nets.HAVE_FLA, True
        try:
            super().__init__(in_torch, *args, use_qk_l2norm=False, **options)
        finally:
            delta_nets.HAVE_FLA = has_kernels
        self.gated_delta_rule: Any = _normalized_delta_rule
        self.out_norm = local_norm(config, config.linear_value_head_dim, config.layernorm_epsilon)


def _normalized_delta_rule(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Any:
    """Compute the gated delta rule with queries and keys [B, L, H, D] that are normalized to length 1 before."""
    queries, keys = (states * (states.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for states in (queries, keys))
    return torch_chunk_gated_delta_rule(queries, keys, values, **options)


def _with_delta_net(layer: Any) -> Any:
    """Copy a layer's spec, which others share, with a gated delta net in place of attention."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type(LocalDeltaNet.__name__, "column")  # as the bridge does for Megatron-core's class
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    own = copy(layer)
    own.submodules = replace(layer.submodules, self_attention=ModuleSpec(module=LocalDeltaNet, submodules=parts))
    return own


def local_block(config: Any, vp_stage: int | None = None) -> Any:
    """Return the spec of the layers; `config.moe_layer_freq` says which have experts."""
    with_attention = copy(config)  # in all layers
    with_attention.experimental_attention_variant = None
    block: Any = get_gpt_decoder_block_spec(
        with_attention, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    if config.multi_latent_attention:
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = LatentAttention
    if config.experimental_attention_variant == "gated_delta_net":
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        for layer, has_state in enumerate(get_linear_attention_pattern(config)[first:][: len(block.layer_specs)]):
            if has_state:
                block.layer_specs[layer] = _with_delta_net(block.layer_specs[layer])
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        attention.submodules = _with_local_norms(attention.submodules)
        layer.submodules = _with_local_norms(layer.submodules)
    return _with_local_norms(block)


def _with_local_norms(submodules: Any) -> Any:
    """Return the submodules with `local_norm` in place of megatron-core's norms."""
    norms = [field.name for field in fields(submodules) if getattr(submodules, field.name) is WrappedTorchNorm]
    return replace(submodules, **dict.fromkeys(norms, local_norm))


def let_experts_add_biases(chunks: list[nn.Module]) -> list[nn.Module]:
    """Clone each expert's product: the expert adds its bias in place, which autograd refuses on a view."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, SequentialMLP) and module.config.add_bias_linear:
            experts: Any = module.local_experts
            for expert in experts:
                expert.linear_fc2.register_forward_hook(
                    lambda _layer, _inputs, outputs: (outputs[0].clone(), outputs[1])
                )
    return chunks
