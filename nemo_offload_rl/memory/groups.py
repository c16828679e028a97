"""Counts the bytes of each rank's state groups, from sizes of the model and the layout of ranks.

Not counted: norms and routers a second time on tensor-parallel ranks that each hold all of them, and the padding of
flat buffers and of shards. Both are small in models of real size.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from nemo_offload_rl.backends.dtensor import torch_optim
from nemo_offload_rl.backends.megatron import optimizer_spec
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.policy import TrainedPolicyConfig
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES
from nemo_offload_rl.residency import GRADS, OPTIMIZER, OPTIMIZER_PART, PARAMS
from nemo_offload_rl.utils.flops import ModelSizes

_FP32_BYTES = 4


@dataclass(frozen=True)
class ModelElements:
    """Numbers of a model's parameters.

    Attributes:
        total: All of them.
        in_experts: Those of its experts; None, if unknown, divides all over expert-parallel ranks.
        in_embedding: Those of its embedding, and of its output layer; 0 if unknown.
        is_tied: Both are one matrix.
        num_layers: Layers; None, if unknown, divides all over pipeline stages.
    """

    total: int
    in_experts: int | None
    in_embedding: int = 0
    is_tied: bool = False
    num_layers: int | None = None

    @classmethod
    def of(cls, total: int, sizes: ModelSizes | None, config: Mapping[str, object]) -> ModelElements:
        """Count the elements of a model of `total` parameters, as far as its files' sizes and its config.json tell."""
        shape = ModelShape.of(config)
        in_embedding = (shape.vocab_size or 0) * (shape.hidden_size or 0)
        if sizes is None:
            return cls(total, None, in_embedding, bool(config.get("tie_word_embeddings")), shape.num_layers)
        return cls(total, sizes.num_in_experts, in_embedding, sizes.ties_embeddings, sizes.num_layers)


@dataclass(frozen=True)
class Held:
    """Parameters that a rank holds, and the ranks that hold the same ones.

    Attributes:
        dense: All but the experts'.
        experts: The experts'.
        copies: Ranks with the same dense parameters.
        expert_copies: Ranks with the same experts.
    """

    dense: int
    experts: int
    copies: int
    expert_copies: int

    @property
    def total(self) -> int:
        """All that the rank holds."""
        return self.dense + self.experts

    @property
    def share(self) -> int:
        """The rank's part if ranks that hold the same parameters divide them."""
        return self.dense // self.copies + self.experts // self.expert_copies


def held_by_stage(policy: TrainedPolicyConfig, world_size: int, model: ModelElements) -> tuple[Held, ...]:
    """Count what a rank of each pipeline stage holds, if its ranks share evenly; a single stage without a pipeline.

    The first stage has the embedding and the last the output layer. If these are tied, both hold the matrix.
    """
    megatron = policy.backend
    if not isinstance(megatron, MegatronConfig):
        return (Held(model.total // world_size, 0, 1, 1),)
    stages, tensor = megatron.pipeline_model_parallel_size, megatron.tensor_model_parallel_size
    expert_ranks = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    in_experts = model.in_experts
    if in_experts is None:
        in_experts, expert_ranks = model.total, tensor * megatron.expert_model_parallel_size
    dense, at_end = model.total - in_experts, model.in_embedding
    outside = at_end if model.is_tied else 2 * at_end
    if stages == 1 or model.num_layers is None or not 0 < outside <= dense:
        parts = [(1, stages, 0)] * stages
    else:
        dense -= outside
        num_layers = megatron.layers_of_stages(model.num_layers)
        parts = [(num, model.num_layers, at_end if it in (0, stages - 1) else 0) for it, num in enumerate(num_layers)]
    ranks = max(1, world_size // stages)
    return tuple(
        Held(
            (dense * num // of + ends) // tensor,
            in_experts * num // of // expert_ranks,
            copies=max(1, ranks // tensor),
            expert_copies=max(1, ranks // expert_ranks),
        )
        for num, of, ends in parts
    )


def group_bytes(policy: TrainedPolicyConfig, held: Held, *, on_gpu: bool) -> dict[str, int]:
    """Count the bytes of a rank's `params`, `grads`, `optimizer` and `optimizer/part`.

    With adapters the frozen model has neither gradients nor optimizer states, and those of the adapters are small.

    Args:
        policy: The policy's keys.
        held: What the rank holds.
        on_gpu: Workers train on GPUs.
    """
    backend = policy.backend
    on_megatron = isinstance(backend, MegatronConfig)
    groups = _on_megatron(policy, backend, held) if on_megatron else _on_dtensor(policy, held, on_gpu=on_gpu)
    streamed_bytes = int(backend.streamed_share * groups[OPTIMIZER])
    return {**groups, OPTIMIZER: groups[OPTIMIZER] - streamed_bytes, OPTIMIZER_PART: streamed_bytes}


def _on_dtensor(policy: TrainedPolicyConfig, held: Held, *, on_gpu: bool) -> dict[str, int]:
    """Count everything in float32."""
    num_trained = 0 if policy.dtensor_cfg.lora_cfg.enabled else held.total
    optimizer_bytes = 0
    if policy.optimizer is not None:
        with suppress(ConfigError):  # another rule refuses this optimizer
            spec = torch_optim.optimizer_spec(policy.optimizer, on_gpu=on_gpu)
            optimizer_bytes = spec.bytes_per_element(torch.float32) * num_trained
    return {PARAMS: _FP32_BYTES * held.total, GRADS: _FP32_BYTES * num_trained, OPTIMIZER: optimizer_bytes}


def _on_megatron(policy: TrainedPolicyConfig, megatron: MegatronConfig, held: Held) -> dict[str, int]:
    """Count parameters in the compute type, and the optimizer's part of a rank, or all that it holds."""
    optimizer, is_trained = megatron.optimizer, not megatron.peft.enabled
    num_updated = (held.share if optimizer.use_distributed_optimizer else held.total) if is_trained else 0
    if optimizer.optimizer_cpu_offload:
        num_updated = int((1 - optimizer.optimizer_offload_fraction) * num_updated)
    dtype = COMPUTE_DTYPES[policy.precision]
    grad_bytes = _FP32_BYTES if megatron.distributed_data_parallel_config.grad_reduce_in_fp32 else dtype.itemsize
    return {
        PARAMS: dtype.itemsize * held.total,
        GRADS: grad_bytes * held.total if is_trained else 0,
        OPTIMIZER: optimizer_spec.optimizer_spec(optimizer).bytes_per_element(dtype) * num_updated,
    }
