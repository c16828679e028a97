"""Counts the bytes of each rank's state groups, from sizes of the model and the layout of ranks.

Not counted: norms and routers a second time on tensor-parallel ranks that each hold all of them, and the padding of
flat buffers and of shards. Both are small in models of real size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from nemo_offload_rl.backends.dtensor import torch_optim
from nemo_offload_rl.backends.megatron import optimizer_spec
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.policy import TrainedPolicyConfig
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES
from nemo_offload_rl.residency import BASE, GRADS, OPTIMIZER, OPTIMIZER_PART, PARAMS
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
        in_adapters: Those of adapters, which `total` does not include; 0 if unknown.
    """

    total: int
    in_experts: int | None
    in_embedding: int = 0
    is_tied: bool = False
    num_layers: int | None = None
    in_adapters: int = 0

    @classmethod
    def of(
        cls, total: int, sizes: ModelSizes | None, config: Mapping[str, object], policy: TrainedPolicyConfig
    ) -> ModelElements:
        """Count the elements of a model of `total` parameters, as far as its files' sizes and its config.json tell."""
        shape, adapters = ModelShape.of(config), adapter_elements(policy, config)
        in_embedding = (shape.vocab_size or 0) * (shape.hidden_size or 0)
        if sizes is None:
            is_tied = bool(config.get("tie_word_embeddings"))
            return cls(total, None, in_embedding, is_tied, shape.num_layers, adapters)
        return cls(total, sizes.num_in_experts, in_embedding, sizes.ties_embeddings, sizes.num_layers, adapters)


@dataclass(frozen=True)
class Held:
    """Parameters that a rank holds, and the ranks that hold the same ones.

    Attributes:
        dense: All but the experts'.
        experts: The experts'.
        copies: Ranks with the same dense parameters.
        expert_copies: Ranks with the same experts.
        adapters: Parameters of adapters.
    """

    dense: int
    experts: int
    copies: int
    expert_copies: int
    adapters: int = 0

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
        return (Held(model.total // world_size, 0, 1, 1, model.in_adapters // world_size),)
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
            adapters=model.in_adapters * num // of // tensor,
        )
        for num, of, ends in parts
    )


def has_adapters(policy: TrainedPolicyConfig) -> bool:
    """Tell whether adapters are trained and the model is frozen."""
    megatron = policy.backend
    return megatron.peft.enabled if isinstance(megatron, MegatronConfig) else policy.dtensor_cfg.lora_cfg.enabled


def adapter_elements(policy: TrainedPolicyConfig, config: Mapping[str, object]) -> int:
    """Count the parameters of adapters on the layers of attention and of dense MLPs; 0 if config.json lacks sizes.

    An adapter of a layer from m to n features has as many parameters as its rank times m + n. Not counted: adapters of
    the output layer, of shared experts, and of layers that only some families have.
    """
    shape, megatron = ModelShape.of(config), policy.backend
    on_megatron = isinstance(megatron, MegatronConfig)
    if not (has_adapters(policy) and shape.num_layers and shape.hidden_size and shape.num_heads and shape.head_dim):
        return 0
    hidden, inner = shape.hidden_size, 0 if shape.num_experts else (shape.intermediate_size or 0)
    queries, keys = shape.num_heads * shape.head_dim, (shape.num_kv_heads or shape.num_heads) * shape.head_dim
    if on_megatron:
        lora, path, every = megatron.peft, "decoder.layers.{}.{}", not megatron.peft.target_modules
        sizes = {
            "self_attention.linear_qkv": hidden + queries + 2 * keys,
            "self_attention.linear_proj": hidden + queries,
        }
        of_mlp = {"mlp.linear_fc1": hidden + (1 + shape.has_gate) * inner, "mlp.linear_fc2": hidden + inner}
    else:
        lora, path = policy.dtensor_cfg.lora_cfg, "model.layers.{}.{}"
        every = lora.match_all_linear
        sizes = {
            **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), hidden + queries),
            **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), hidden + keys),
        }
        products = [*(["mlp.gate_proj"] if shape.has_gate else []), "mlp.up_proj", "mlp.down_proj"]
        of_mlp = dict.fromkeys(products, hidden + inner)
    sizes |= of_mlp if inner else {}
    # A layer of Nemotron-H is one of attention, of an MLP or of states.
    kinds = config.get("layers_block_type")
    kinds = map(str, kinds) if isinstance(kinds, list) else ("attention mlp",) * shape.num_layers
    names = (
        (path.format(layer, name), size)
        for layer, kind in enumerate(kinds)
        for name, size in sizes.items()
        if ("mlp" if name in of_mlp else "attention") in kind
    )
    return lora.dim * sum(
        size
        for name, size in names
        if (every or _is_named(name, lora.target_modules)) and not _is_named(name, lora.exclude_modules)
    )


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatchcase(name, pattern) if "*" in pattern else f".{name}".endswith(f".{pattern}") for pattern in patterns
    )


def base_element_bytes(policy: TrainedPolicyConfig, config: Mapping[str, object]) -> int:
    """Return the bytes of an element of a model under adapters: of the compute type, unless DTensor must not round it.

    DTensor decides by the model's files. Here their type is what config.json says, or the compute type.
    """
    stored = str(config.get("dtype") or config.get("torch_dtype") or policy.precision).removeprefix("torch.")
    is_rounded = isinstance(policy.backend, MegatronConfig) or stored == policy.precision
    return COMPUTE_DTYPES[policy.precision].itemsize if is_rounded else _FP32_BYTES


def group_bytes(
    policy: TrainedPolicyConfig, held: Held, config: Mapping[str, object], *, on_gpu: bool
) -> dict[str, int]:
    """Count the bytes of a rank's `params`, `grads`, `optimizer` and `optimizer/part`, and with adapters of `base`.

    With adapters, only `base` is of the frozen model.

    Args:
        policy: The policy's keys.
        held: What the rank holds.
        config: Contents of the model's config.json; empty if it is unknown.
        on_gpu: Workers train on GPUs.
    """
    backend, frozen = policy.backend, has_adapters(policy)
    trained, trained_share = (held.adapters, held.adapters // held.copies) if frozen else (held.total, held.share)
    if isinstance(backend, MegatronConfig):
        groups = _on_megatron(policy, backend, trained, trained_share)
    else:
        groups = _on_dtensor(policy, trained, on_gpu=on_gpu)
    streamed_bytes = int(backend.streamed_share * groups[OPTIMIZER])
    groups |= {OPTIMIZER: groups[OPTIMIZER] - streamed_bytes, OPTIMIZER_PART: streamed_bytes}
    return {**groups, BASE: base_element_bytes(policy, config) * held.total} if frozen else groups


def _on_dtensor(policy: TrainedPolicyConfig, trained: int, *, on_gpu: bool) -> dict[str, int]:
    """Count everything in float32."""
    optimizer_bytes = 0
    if policy.optimizer is not None:
        with suppress(ConfigError):  # another rule refuses this optimizer
            spec = torch_optim.optimizer_spec(policy.optimizer, on_gpu=on_gpu)
            optimizer_bytes = spec.bytes_per_element(torch.float32) * trained
    return {PARAMS: _FP32_BYTES * trained, GRADS: _FP32_BYTES * trained, OPTIMIZER: optimizer_bytes}


def _on_megatron(policy: TrainedPolicyConfig, megatron: MegatronConfig, trained: int, share: int) -> dict[str, int]:
    """Count parameters in the compute type, and the optimizer's part of a rank, or all that it trains."""
    optimizer = megatron.optimizer
    num_updated = share if optimizer.use_distributed_optimizer else trained
    if optimizer.optimizer_cpu_offload:
        num_updated = int((1 - optimizer.optimizer_offload_fraction) * num_updated)
    dtype = COMPUTE_DTYPES[policy.precision]
    grad_bytes = _FP32_BYTES if megatron.distributed_data_parallel_config.grad_reduce_in_fp32 else dtype.itemsize
    return {
        PARAMS: dtype.itemsize * trained,
        GRADS: grad_bytes * trained,
        OPTIMIZER: optimizer_spec.optimizer_spec(optimizer).bytes_per_element(dtype) * num_updated,
    }
