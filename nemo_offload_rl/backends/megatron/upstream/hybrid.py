"""Models whose layers are attention, an MLP, experts or a Mamba-2 mixer each (Nemotron-H), on megatron-core 0.19.2.

Its `HybridModel` has no output processor, which `GPTModel` has, and layers of Transformer Engine only. Its mixer needs
mamba-ssm. This module adds the processor, layers in plain torch for `transformer_impl: local`, and what
Megatron-Bridge 0.6.2 leaves out of the settings.

Shape suffixes: L tokens of B rows, H heads of size P.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor, nn

from nemo_offload_rl.backends.mamba import scanned
from nemo_offload_rl.backends.megatron.upstream.local_layers import local_norm


def complete_hybrid(provider: Any, hf_config: Any) -> None:
    """Set the provider's local layers, and leave out experts and predicting layers that the model does not have."""
    if provider.transformer_impl == "local":
        provider.hybrid_stack_spec = local_stack
    if "moe" not in hf_config.layers_block_type:
        own = [it for it in fields(provider) if it.name.startswith(("moe_", "num_moe_")) and it.default is not MISSING]
        for setting in own:
            if setting.name != "moe_token_dispatcher_type":  # the default cannot be with pipeline parallelism
                setattr(provider, setting.name, setting.default)
    provider.mtp_hybrid_override_pattern = None


def process_outputs(chunks: list[nn.Module]) -> list[nn.Module]:
    """Let hybrid models take `GPTModel`'s output processor; others stay unchanged."""
    for chunk in chunks:
        if isinstance(chunk, HybridModel):
            chunk.forward = partial(_forward, chunk, chunk.forward)  # type: ignore[method-assign]
    return chunks


def _forward(
    model: Any,
    own: Callable[..., Tensor],
    *,
    output_processor: Callable[..., Any],
    output_processor_context: Any,
    **inputs: Any,
) -> Any:
    is_last, model.post_process = model.post_process, False  # the method then returns hidden states
    try:
        hidden_states = own(**inputs)
    finally:
        model.post_process = is_last
    if not is_last:
        return hidden_states
    is_tied = model.share_embeddings_and_output_weights
    return output_processor(
        hidden_states=hidden_states,
        output_layer=model.output_layer,
        output_weight=model.shared_embedding_or_output_weight() if is_tied else None,
        context=output_processor_context,
    )


class GroupedNorm(nn.Module):
    """Root-mean-square norm of each group of channels, with the arguments of mamba-ssm's gated norm."""

    def __init__(self, size: int, *, eps: float, group_size: int, device: Any, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps, self._group_size = eps, group_size

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize in float32 and return the input's type."""
        groups = hidden.float().unflatten(-1, (-1, self._group_size))
        return (F.rms_norm(groups, (self._group_size,), eps=self.eps).flatten(-2) * self.weight.float()).type_as(hidden)


class LatentLinear(nn.Module):
    """Projection to or from the experts' latent states, whole on each rank, with the arguments of a `TELinear`."""

    def __init__(self, in_size: int, out_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        weight = torch.empty(out_size, in_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return the product and no bias."""
        return F.linear(hidden, self.weight), None


@contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    """Replace names of a module while one of its classes is made."""
    own = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(own)


class LocalMambaMixer(MambaMixer):
    """Mamba-2 mixer by torch's operations, for padded rows.

    Args:
        args: Arguments of Megatron-core's module.
        options: The same, by name.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        with _replaced(mamba_mixer, HAVE_MAMBA_SSM=True, ExtendedRMSNorm=GroupedNorm):
            super().__init__(*args, **options)

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: Any = None) -> Tensor:
        inner, groups = self.d_inner_local_tp, self.ngroups_local_tp
        size = groups * self.d_state
        gate, mixed, steps = zxBCdt.transpose(0, 1).split([inner, inner + 2 * size, self.nheads_local_tp], dim=-1)
        convolved = F.conv1d(
            mixed.transpose(1, 2),
            self.conv1d_weight,
            self.conv1d_bias,
            padding=self.d_conv - 1,
            groups=inner + 2 * size,
        )
        mixed = F.silu(convolved[..., : mixed.shape[1]].transpose(1, 2)).float()
        values, keys, queries = mixed.split([inner, size, size], dim=-1)
        values_BLHP = values.unflatten(-1, (-1, self.headdim))
        made_BLHP = scanned(
            values_BLHP,
            F.softplus(steps.float() + self.dt_bias.float()),
            -self.A_log.float().exp(),
            keys.unflatten(-1, (groups, -1)),
            queries.unflatten(-1, (groups, -1)),
            self.chunk_size,
        )
        made_BLHP = made_BLHP + self.D.float().unsqueeze(-1) * values_BLHP
        made = (made_BLHP.flatten(-2) * F.silu(gate.float())).to(zxBCdt.dtype)
        return self.norm(made.transpose(0, 1).contiguous())


class LocalStack(HybridStack):
    """Stack of layers with a final norm and latent projections in plain torch.

    Args:
        args: Arguments of Megatron-core's module.
        options: The same, by name.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        with _replaced(hybrid_block, TENorm=local_norm), _replaced(moe_layer, HAVE_TE=True, TELinear=LatentLinear):
            super().__init__(*args, **options)


def local_stack(config: Any) -> ModuleSpec:
    """Return the spec of all kinds of layers in plain torch."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type(LatentLinear.__name__, "replicated")
    add: Any = get_bias_dropout_add
    linear = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    mixer = ModuleSpec(LocalMambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(**linear))
    experts = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts or 1, moe_grouped_gemm=False)

    def layer(kind: type, **parts: Any) -> ModuleSpec:
        return ModuleSpec(kind, submodules=TransformerLayerSubmodules(**parts))

    return ModuleSpec(
        LocalStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(local_norm, mixer, add)),
            attention_layer=layer(
                TransformerLayer,
                input_layernorm=local_norm,
                self_attention=attention,
                self_attn_bda=add,
            ),
            mlp_layer=layer(MLPLayer, pre_mlp_layernorm=local_norm, mlp=mlp, mlp_bda=add),
            moe_layer=layer(MoETransformerLayer, pre_mlp_layernorm=local_norm, mlp=experts, mlp_bda=add),
        ),
    )
