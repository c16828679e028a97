"""Meshes, the tensor-parallel plan of the Llama and Qwen families, and FSDP2 wrapping.

The mesh is (dp, tp), row-major: ranks that are neighbours in `tp` share the same data. Every parameter ends up a
DTensor on the whole mesh, so that optimizers see one kind of parameter.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.backends.dtensor.supported import unsupported

DP, TP = "dp", "tp"


def build_mesh(device: torch.device, world_size: int, tensor_parallel_size: int) -> DeviceMesh:
    """The (dp, tp) mesh over all ranks.

    Raises:
        ConfigError: The ranks do not divide by the tensor-parallel size.
    """
    if world_size % tensor_parallel_size:
        raise ConfigError(
            f"policy.dtensor_cfg.tensor_parallel_size={tensor_parallel_size} does not divide the {world_size} policy "
            "workers; change it or the number of devices."
        )
    shape = (world_size // tensor_parallel_size, tensor_parallel_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=(DP, TP))


def check_model(config: Any, tensor_parallel_size: int) -> None:
    """Refuse models that the backend does not train, and sizes that tensor parallelism cannot divide.

    Raises:
        ConfigError: Names what of the config is in the way, or the size and the key to change.
    """
    if (reason := unsupported(config.to_dict())) is not None:
        raise ConfigError(f"policy.dtensor_cfg.enabled is true, but the model has {reason}; use another model")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        size = getattr(config, name)
        if size % tensor_parallel_size:
            raise ConfigError(
                f"policy.dtensor_cfg.tensor_parallel_size={tensor_parallel_size} does not divide the model's "
                f"{name}={size}; choose a divisor of it."
            )


class _WholeParameters(ParallelStyle):
    """Every rank has the whole parameters as DTensors; inputs and outputs stay plain tensors.

    `input_placement` says what the plain input is: the same everywhere, or this rank's heads. In the second case the
    parameters' gradients are partial sums, which FSDP adds up over the tensor-parallel ranks.
    """

    def __init__(self, input_placement: Placement) -> None:
        super().__init__()
        self.input_placement = input_placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(submodule.named_parameters(recurse=False)):
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                submodule.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        def to_dtensor(placement: Placement, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, [placement], run_check=False), *inputs[1:])

        def to_local(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.to_local()

        return distribute_module(module, device_mesh, partition, partial(to_dtensor, self.input_placement), to_local)


def _layer_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    attention: Any = layer.self_attn
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": _WholeParameters(Replicate()),
        "post_attention_layernorm": _WholeParameters(Replicate()),
        "mlp.down_proj": RowwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[name] = ColwiseParallel()
    heads_dim = 2  # [B, S, heads, head_dim]
    for name, _ in attention.named_children():
        if name in ("q_norm", "k_norm"):
            plan[f"self_attn.{name}"] = _WholeParameters(Shard(heads_dim))
    return plan


def apply_tensor_parallel(causal_lm: Any, mesh: DeviceMesh) -> None:
    """Split a Hugging Face Llama or Qwen model over `mesh` (1-D), in place; every rank holds the same weights before.

    Attention heads, the MLP's inner size and the vocabulary are split; the output layer gives this rank's columns.
    """
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "model.norm": _WholeParameters(Replicate()),
        "lm_head": ColwiseParallel(),
    }
    is_tied = causal_lm.lm_head.weight is causal_lm.model.embed_tokens.weight
    parallelize_module(causal_lm, mesh, plan, src_data_rank=None)
    if is_tied:  # each module got its own DTensor of the same rows
        causal_lm.lm_head.weight = causal_lm.model.embed_tokens.weight
    for layer in causal_lm.model.layers:
        parallelize_module(layer, mesh, _layer_plan(layer), src_data_rank=None)


def apply_fsdp(root: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, compute_dtype: torch.dtype) -> FSDPModule:
    """Shard parameters over `mesh` (1-D): one unit per layer, the rest in the root.

    Losses are divided by global counts already, so gradients are summed over the ranks in fp32.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The root's parameters are used last in forward and first in backward.
    wrapped = fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(wrapped):
        module.set_gradient_divide_factor(1.0)
        # Without it a factor means NCCL's pre-multiplied sum, which gloo does not have.
        module.set_force_sum_reduction_for_comms(True)
    return wrapped


def fsdp_modules(root: FSDPModule) -> list[FSDPModule]:
    """All FSDP units, the root first."""
    return [module for module in cast(nn.Module, root).modules() if isinstance(module, FSDPModule)]


def gather(layer: nn.Module) -> None:
    """Begin to gather the parameters of one FSDP unit, after what the current stream has been asked for.

    Its own pre-forward hook would use streams that do not wait for the current one; asynchronous gathers use that one.
    The hook waits for what was begun here.
    """
    cast(FSDPModule, layer).unshard(async_op=True)


def drop_unreduced_grads(root: FSDPModule) -> None:
    """Forget gradients that backward passes without reduction have left with the gathered parameters.

    FSDP has no call for it, and would add them to the next step's.
    """
    for module in fsdp_modules(root):
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else ():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def reshard_all(root: FSDPModule) -> None:
    """Free every gathered parameter, also where a forward or backward raised half-way.

    After a forward that raised, FSDP takes the root to be inside it still, and then `reshard` does nothing unless the
    root may be resharded in forward. The gathered copies would be used by the next forward, however old they are.
    """
    root.set_reshard_after_forward(True, recurse=False)
    for module in fsdp_modules(root):
        module.reshard()
    root.set_reshard_after_forward(False, recurse=False)
