"""What megatron-core's own modules keep for a backward pass, beside the plan's formulas."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from megatron_cpu_shim import megatron_on_cpu

from nemo_offload_rl.memory.megatron_activations import latent_attention
from nemo_offload_rl.models.shape import ModelShape

sys.path.insert(0, str(Path(__file__).parent))
from tiny_gpt import process_group


class _Fused(torch.autograd.Function):
    """A fused kernel, in what it keeps: all inputs, and with `keeps_output` its output; no statistics."""

    @staticmethod
    def forward(ctx, keeps_output, *inputs):
        output = torch.empty_like(inputs[-1])
        ctx.save_for_backward(*inputs, *([output] if keeps_output else []))
        ctx.count = len(inputs)
        return output

    @staticmethod
    def backward(ctx, _grad):
        return None, *(torch.zeros_like(it) for it in ctx.saved_tensors[: ctx.count])


class Attention(torch.nn.Module):
    """Takes the place of Transformer Engine's attention."""

    def __init__(self, **_options):
        super().__init__()

    def forward(self, query, key, value, *_args, **_options):
        return _Fused.apply(True, query, key, value).flatten(-2)


def put_norm_inside(product: torch.nn.Module) -> None:
    """Let a product begin with a norm, as Transformer Engine's do, which keep the norm's input and its output."""
    product.register_forward_pre_hook(lambda _product, args: (_Fused.apply(False, args[0]), *args[1:]))


def kept_by_latent_attention(sizes: dict, lengths: list[int], recomputed: list[str], *, is_packed: bool) -> int:
    """Run megatron-core's latent attention; return the bytes of 16-bit tensors that its backward pass needs."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from nemo_offload_rl.backends.megatron.upstream.bridge import PlainQueries

    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=sizes["hidden_size"],
        num_attention_heads=sizes["num_attention_heads"],
        q_lora_rank=sizes.get("q_lora_rank"),
        kv_lora_rank=sizes["kv_lora_rank"],
        qk_head_dim=sizes["qk_nope_head_dim"],
        qk_pos_emb_head_dim=sizes["qk_rope_head_dim"],
        v_head_dim=sizes["v_head_dim"],
        qk_layernorm=True,
        rope_type="rope",
        normalization="RMSNorm",
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **({"recompute_granularity": "selective", "recompute_modules": recomputed} if recomputed else {}),
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=True).submodules.self_attention
    spec.submodules.core_attention = Attention
    if config.q_lora_rank is None:
        spec.module = PlainQueries
    attention = build_module(spec, config=config, layer_number=1)
    for name in ("q", "kv") if config.q_lora_rank else ("kv",):
        setattr(attention, f"{name}_layernorm", torch.nn.Identity())
        put_norm_inside(getattr(attention, f"linear_{name}_up_proj"))
    hidden = torch.randn(sum(lengths), 1, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    bounds, packed = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32), None
    if is_packed:
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    own = {it.untyped_storage()._cdata for it in attention.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.dtype is torch.bfloat16 and tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        output, _ = attention(hidden, None, packed_seq_params=packed)
    assert output.shape == hidden.shape
    return sum(it.untyped_storage().nbytes() for it in kept.values())


LATENT = {"hidden_size": 512, "num_attention_heads": 8, "kv_lora_rank": 96, "qk_nope_head_dim": 64}
LATENT |= {"qk_rope_head_dim": 32, "v_head_dim": 64, "num_hidden_layers": 2, "vocab_size": 1024}
LATENT_MODELS = {
    "DeepSeek-V3": {"q_lora_rank": 160},
    "Moonlight": {},
    "GLM-4.7-Flash": {"q_lora_rank": 128, "v_head_dim": 96},
}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("recomputed", [[], ["mla_up_proj"]])
@pytest.mark.parametrize("model", LATENT_MODELS)
def test_latent_attention_is_planned_to_keep_what_megatron_s_module_keeps(model, recomputed, is_packed):
    sizes, lengths = LATENT | LATENT_MODELS[model], [120, 93]
    with megatron_on_cpu(), process_group():
        seen = kept_by_latent_attention(sizes, lengths, recomputed, is_packed=is_packed)
    of = latent_attention(sizes, ModelShape.of(sizes), 2, 1, num_parts=1, is_packed=is_packed)
    planned = of.kept + 2 * sizes["hidden_size"] - sum(of.recomputed[name] for name in recomputed)
    assert planned * sum(lengths) == seen
