"""A CPU worker of vLLM whose weights can be replaced; vLLM imports it by name (`worker_cls`)."""

import os
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from vllm import _custom_ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms.interface import PlatformEnum
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.worker.cpu_worker import CPUWorker

from nemo_offload_rl.generation.vllm.fp8_loading import BLOCK

_attention, _rotate = _custom_ops.cpu_attention_with_kv_cache, RotaryEmbedding.forward_cpu
_choose, _compute_experts = cpu_fused_moe.select_experts, cpu_fused_moe.CPUFusedMOE.forward_torch
_prepare = cpu_fused_moe.CPUFusedMOE.init_moe_torch


class RefitCpuWorker(CPUWorker):
    """Keeps weights as plain parameters.

    By default vLLM 0.25.1 packs linear weights for oneDNN after loading and leaves `layer.weight` empty. Then
    `load_weights` fails for linear layers and silently skips the output head. vLLM also packs experts in place. Without
    packing it uses `F.linear` on the parameters, at the same speed for sizes that run on a CPU.

    8-bit weights are multiplied in the type of the inputs; vLLM's kernels need AMX, and pack them.

    vLLM's choice of experts takes sigmoid scores and biases of experts only with groups of experts; models without
    groups (MiniMax-M2) get one. Its attention kernel takes sinks (gpt-oss) in bfloat16 only, so they are rounded. Its
    rotary kernel rotates only one head of queries of shape [tokens, heads, size] (DeepSeek-V3), so these use the native
    implementation. Its gated delta nets take bfloat16 only (Qwen3-Next, Qwen3.5) or a GPU (OLMo Hybrid), so
    transformers' functions replace them. Its mixtures do not report the experts that they choose for a token, so
    replacements do.
    """

    def init_device(self) -> None:
        """Start as vLLM does, and unlink the shared memory of its groups once all workers have mapped it.

        vLLM 0.25.1 leaves a killed engine's files in /dev/shm, named by a port; an engine that gets the same port later
        cannot start.
        """
        super().init_device()
        dist.barrier()
        for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*-cpushm_*"):
            path.unlink(missing_ok=True)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does; from now on this process packs no weights."""
        _custom_ops._supports_onednn = False
        _custom_ops.cpu_attention_with_kv_cache = _attention_with_rounded_sinks
        cpu_fused_moe.CPUFusedMOE.check_grouped_gemm = _no_grouped_gemm
        cpu_fused_moe.CPUFusedMOE.init_moe_torch = _prepare_experts
        cpu_fused_moe.select_experts = _experts_of_one_group
        RotaryEmbedding.forward_cpu = _rotated
        gdn_attention.cpu_gdn_attention_core = _delta_net
        of_olmo: Any = olmo
        of_olmo.OlmoHybridGatedDeltaNetAttention._forward_core = _compute_delta_net
        of_olmo.set_triton_allocator = _no_allocator
        torch.cpu._is_amx_tile_supported = _no_amx
        _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [PlainFp8Kernel]
        cpu_moe.prepare_fp8_moe_layer_for_cpu = _as_they_are
        CPUExpertsFp8.apply = _plain_experts
        experts: Any = cpu_fused_moe.CPUFusedMOE
        experts.forward_torch = _told_experts
        super().load_model(load_dummy_weights=load_dummy_weights)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Start as vLLM does, and have experts report to vLLM's record of routing, if there is one."""
        super().initialize_from_config(kv_cache_config)
        for module in self.vllm_config.compilation_config.static_forward_context.values():
            if isinstance(module, MoERunner):
                of_router: Any = module.router
                module.routed_experts.told = of_router.capture_fn


def _no_grouped_gemm(self: object, layer: object) -> tuple[bool, str]:
    return False, "none"


def _told_experts(self: Any, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *rest: Any) -> Tensor:
    if (tell := getattr(layer, "told", None)) is not None:
        tell(topk_ids)
    return _compute_experts(self, layer, x, topk_weights, topk_ids, *rest)


def _prepare_experts(self: Any, layer: Any) -> None:
    """Prepare this worker's experts, and zeros for others: vLLM 0.25.1 indexes by an expert's number among all."""
    _prepare(self, layer)
    if layer.expert_map is None:
        return
    for name, rows in (("gate_up_linear", layer.w13_weight.shape[1]), ("down_linear", layer.w2_weight.shape[1])):
        own, of_others = getattr(layer, name), partial(_zeros, rows)
        setattr(layer, name, [own[place] if place >= 0 else of_others for place in layer.expert_map.tolist()])


def _zeros(width: int, x: Tensor) -> Tensor:
    return x.new_zeros(len(x), width)


def _no_allocator(device: torch.device) -> None:
    """Leave out what Triton's kernels need."""


def _no_amx() -> bool:
    """Keep vLLM from packing the weights of convolutions, where the processor has AMX."""
    return False


def _experts_of_one_group(*, use_grouped_topk: bool, custom_routing_function: Any, **kwargs: Any) -> Any:
    needs_group = kwargs["scoring_func"] != "softmax" or kwargs["e_score_correction_bias"] is not None
    if needs_group and not use_grouped_topk and custom_routing_function is None:
        use_grouped_topk, kwargs = True, {**kwargs, "num_expert_group": 1, "topk_group": 1}
    return _choose(use_grouped_topk=use_grouped_topk, custom_routing_function=custom_routing_function, **kwargs)


def _attention_with_rounded_sinks(*args: Any, s_aux: Tensor | None = None, **kwargs: Any) -> None:
    _attention(*args, s_aux=None if s_aux is None else s_aux.to(torch.bfloat16), **kwargs)


def _rotated(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return (_rotate if query.dim() == 2 else type(self).forward_native)(self, positions, query, key)


def _delta_net(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    """Compute gated delta nets of Qwen's families; see vLLM's function."""
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    _compute_delta_net(layer, mixed_qkv, b, a, core_attn_out)


def _compute_delta_net(layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    """Compute a gated delta net of each sequence, from its states in the cache, in float32."""
    of_layers = get_forward_context().attn_metadata
    if not isinstance(of_layers, dict):  # vLLM measures memory
        return
    metadata: Any = of_layers[layer.prefix]
    num_decodes, num_sequences = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
    bounds = metadata.non_spec_query_start_loc[: num_sequences + 1].tolist()
    slots = metadata.non_spec_state_indices_tensor[:num_sequences].tolist()
    convolved, states = layer.kv_cache
    if not is_conv_state_dim_first():
        convolved = convolved.transpose(-1, -2)
    states = states.view(*states.shape[:2], *states.shape[:1:-1])  # keys by values, as `torch_chunk_gated_delta_rule`
    for index, (slot, (start, end)) in enumerate(zip(slots, pairwise(bounds), strict=True)):
        has_state = index < num_decodes or bool(metadata.has_initial_state[index])
        before = convolved[slot] if has_state else torch.zeros_like(convolved[slot])
        given = torch.cat([before, mixed_qkv[start:end].T], dim=1).float()
        convolved[slot] = given[:, -before.shape[1] :]
        weight = layer.conv1d.weight.float().view(len(given), 1, -1)
        mixed = nn.functional.silu(nn.functional.conv1d(given.unsqueeze(0), weight, groups=len(given)))
        query, key, value = layer.rearrange_mixed_qkv(mixed[0].T)
        query, key = (it.repeat_interleave(value.shape[2] // it.shape[2], dim=2) for it in (query, key))
        decay = -layer.A_log.float().exp() * nn.functional.softplus(a[start:end].float() + layer.dt_bias.float())
        largest = 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0
        rule = torch_recurrent_gated_delta_rule if end - start == 1 else torch_chunk_gated_delta_rule
        found, state = cast(Any, rule)(
            query,
            key,
            value,
            g=decay.unsqueeze(0),
            beta=largest * b[start:end].float().sigmoid().unsqueeze(0),
            initial_state=states[slot : slot + 1].float() if has_state else None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        states[slot] = state[0].to(states.dtype)
        core_attn_out[start:end] = found[0].to(core_attn_out.dtype)


class PlainFp8Kernel(CPUFp8BlockScaledMMKernel):
    """Multiplies by the weights that 8-bit blocks and their scales stand for."""

    keeps_weights = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """See vLLM's class."""
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave weights as they are."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        """See vLLM's class."""
        return nn.functional.linear(x, _plain(layer.weight, layer.weight_scale_inv, x.dtype), bias)


def _plain(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply 8-bit matrices [..., rows, columns] by their scales."""
    each = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return (weight.float() * each[..., : weight.shape[-2], : weight.shape[-1]]).to(dtype)


def _as_they_are(w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    return w13, w2


def _plain_experts(
    self: Any, hidden_states: Tensor, w1: Tensor, w2: Tensor, router_logits: Tensor, *_: Any, **_kwargs: Any
) -> Tensor:
    """Add up the experts of each token, chosen by softmax."""
    moe = self.moe_config
    weights, chosen = router_logits.float().softmax(-1).topk(moe.experts_per_token)
    if moe.routing_method in (RoutingMethodType.Renormalize, RoutingMethodType.RenormalizeNaive):
        weights = weights / weights.sum(-1, keepdim=True)
    result = torch.zeros_like(hidden_states)
    first = moe.moe_parallel_config.ep_rank * len(w1)  # number of this worker's first expert
    for expert in range(len(w1)):
        tokens, places = (chosen == first + expert).nonzero(as_tuple=True)
        gate, up = nn.functional.linear(
            hidden_states[tokens], _plain(w1[expert], self.w1_scale[expert], hidden_states.dtype)
        ).chunk(2, -1)
        inner = nn.functional.silu(gate) * up
        outer = nn.functional.linear(inner, _plain(w2[expert], self.w2_scale[expert], hidden_states.dtype))
        result.index_add_(0, tokens, outer * weights[tokens, places, None].to(outer.dtype))
    return result
