"""A CPU worker of vLLM whose weights can be replaced; vLLM imports it by name (`worker_cls`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.worker.cpu_worker import CPUWorker

_attention, _rotate = _custom_ops.cpu_attention_with_kv_cache, RotaryEmbedding.forward_cpu
_choose = cpu_fused_moe.select_experts


class RefitCpuWorker(CPUWorker):
    """Keeps weights as plain parameters.

    By default vLLM 0.25.1 packs linear weights for oneDNN after loading and leaves `layer.weight` empty. Then
    `load_weights` fails for linear layers and silently skips the output head. vLLM also packs experts in place. Without
    packing it uses `F.linear` on the parameters, at the same speed for sizes that run on a CPU.

    vLLM's choice of experts takes sigmoid scores and biases of experts only with groups of experts; models without
    groups (MiniMax-M2) get one. Its attention kernel takes sinks (gpt-oss) in bfloat16 only, so they are rounded. Its
    rotary kernel rotates only one head of queries of shape [tokens, heads, size] (DeepSeek-V3), so these use the native
    implementation.
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
        cpu_fused_moe.select_experts = _experts_of_one_group
        RotaryEmbedding.forward_cpu = _rotated
        super().load_model(load_dummy_weights=load_dummy_weights)


def _no_grouped_gemm(self: object, layer: object) -> tuple[bool, str]:
    return False, "none"


def _experts_of_one_group(*, use_grouped_topk: bool, custom_routing_function: Any, **kwargs: Any) -> Any:
    needs_group = kwargs["scoring_func"] != "softmax" or kwargs["e_score_correction_bias"] is not None
    if needs_group and not use_grouped_topk and custom_routing_function is None:
        use_grouped_topk, kwargs = True, {**kwargs, "num_expert_group": 1, "topk_group": 1}
    return _choose(use_grouped_topk=use_grouped_topk, custom_routing_function=custom_routing_function, **kwargs)


def _attention_with_rounded_sinks(*args: Any, s_aux: Tensor | None = None, **kwargs: Any) -> None:
    _attention(*args, s_aux=None if s_aux is None else s_aux.to(torch.bfloat16), **kwargs)


def _rotated(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return (_rotate if query.dim() == 2 else type(self).forward_native)(self, positions, query, key)
