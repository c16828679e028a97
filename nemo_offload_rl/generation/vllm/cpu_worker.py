"""A CPU worker of vLLM whose weights can be replaced; vLLM imports it by name (`worker_cls`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.worker.cpu_worker import CPUWorker

_attention, _rotate = _custom_ops.cpu_attention_with_kv_cache, RotaryEmbedding.forward_cpu


class RefitCpuWorker(CPUWorker):
    """Keeps weights as plain parameters.

    By default vLLM packs linear weights for oneDNN after loading and leaves `layer.weight` empty, so that
    `load_weights` fails for linear layers and is silently without effect for the output head; experts it packs in
    place, for what the CPU has (vLLM 0.25.1). Without either it uses `F.linear` on the parameters, at the same speed
    for the sizes that run on a CPU.

    Attention sinks (gpt-oss) may be of any type, where vLLM's kernel takes bfloat16 alone: it gets them rounded. Rotary
    embeddings reach every head of queries that come as [tokens, heads, size] (DeepSeek-V3), where its kernel sees one.
    """

    def init_device(self) -> None:
        """Start as vLLM does, and unlink the shared memory of its groups once all workers have mapped it.

        vLLM itself leaves the files of a killed engine in /dev/shm, named by a port. An engine that gets the same port
        later cannot start (vLLM 0.25.1).
        """
        super().init_device()
        dist.barrier()
        for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*-cpushm_*"):
            path.unlink(missing_ok=True)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does, with packed weights off in this process from here on."""
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

        _custom_ops._supports_onednn = False
        _custom_ops.cpu_attention_with_kv_cache = _attention_with_rounded_sinks
        CPUFusedMOE.check_grouped_gemm = _no_grouped_gemm
        RotaryEmbedding.forward_cpu = _rotated
        super().load_model(load_dummy_weights=load_dummy_weights)


def _no_grouped_gemm(self: object, layer: object) -> tuple[bool, str]:
    return False, "none"


def _attention_with_rounded_sinks(*args: Any, s_aux: Tensor | None = None, **kwargs: Any) -> None:
    _attention(*args, s_aux=None if s_aux is None else s_aux.to(torch.bfloat16), **kwargs)


def _rotated(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return (_rotate if query.dim() == 2 else type(self).forward_native)(self, positions, query, key)
