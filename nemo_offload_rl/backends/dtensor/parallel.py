"""Meshes and FSDP2 wrapping.

The mesh is (dp, tp), row-major; ranks of one `tp` group get the same data. Every parameter becomes a DTensor on the
whole mesh. With context parallelism the mesh is (dp, cp, tp): ranks of one `cp` group share the same rows, and
parameters are sharded over `dp` and `cp`, whose ranks all have different tokens. With expert parallelism `dp` is
(dp_shard, ep): ranks of one `ep` group divide each layer's experts, which FSDP shards further over `dp_shard`; all else
is sharded over `dp`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _cast_fp_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors

from nemo_offload_rl.backends.dtensor.experts import expert_modules
from nemo_offload_rl.backends.dtensor.one_rank import use_one_rank
from nemo_offload_rl.backends.dtensor.supported import (
    context_problem,
    experts_problem,
    sequence_problem,
    sizes_problem,
    split_problem,
    unsupported,
)
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.dtensor import DTensorConfig
from nemo_offload_rl.protocols.backend import HostView
from nemo_offload_rl.residency import local_tensor

DP, CP, TP = "dp", "cp", "tp"
DP_SHARD, EP = "dp_shard", "ep"
_DP_CP = "dp_cp"


@dataclass(frozen=True)
class Meshes:
    """The 1-D meshes of this rank.

    Attributes:
        dp: Ranks with different data.
        tp: Ranks that share each layer.
        fsdp: Ranks with different tokens (`dp` and `cp`), over which parameters are sharded.
        cp: Ranks that share each row; None without context parallelism.
        dp_shard: Ranks that shard the same experts; None without expert parallelism.
        ep: Ranks with different experts; None without expert parallelism.
    """

    dp: DeviceMesh
    tp: DeviceMesh
    fsdp: DeviceMesh
    cp: DeviceMesh | None = None
    dp_shard: DeviceMesh | None = None
    ep: DeviceMesh | None = None

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the process group of each mesh, without those that are the same."""
        meshes = (self.tp, self.cp, self.ep, self.dp_shard, self.fsdp, self.dp)
        return list(dict.fromkeys(mesh.get_group() for mesh in meshes if mesh is not None))


def build_meshes(
    device: torch.device,
    world_size: int,
    tensor_parallel_size: int,
    expert_parallel_size: int,
    context_parallel_size: int = 1,
) -> Meshes:
    """Build the meshes of all ranks; `check_model` has refused sizes that do not divide them."""
    dp_size = world_size // tensor_parallel_size
    if context_parallel_size > 1:
        shape = (dp_size // context_parallel_size, context_parallel_size, tensor_parallel_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=(DP, CP, TP))
        return Meshes(mesh[DP], mesh[TP], mesh[DP, CP]._flatten(_DP_CP), mesh[CP])
    if expert_parallel_size == 1:
        mesh = init_device_mesh(device.type, (dp_size, tensor_parallel_size), mesh_dim_names=(DP, TP))
        return Meshes(mesh[DP], mesh[TP], mesh[DP])
    shape = (dp_size // expert_parallel_size, expert_parallel_size, tensor_parallel_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=(DP_SHARD, EP, TP))
    dp = mesh[DP_SHARD, EP]._flatten(DP)
    return Meshes(dp, mesh[TP], dp, dp_shard=mesh[DP_SHARD], ep=mesh[EP])


def check_model(config: Any, settings: DTensorConfig, longest: int, num_workers: int) -> None:
    """Refuse a model that the backend does not train, or that the parallel sizes cannot split.

    Raises:
        ConfigError: Names the part of the config, or the size and the key to change.
    """
    contents = config.to_dict()
    if (reason := unsupported(contents)) is not None:
        raise ConfigError(f"policy.dtensor_cfg.enabled is true, but the model has {reason}; use another model")
    plan = config.base_model_tp_plan or {}
    tp_size = settings.tensor_parallel_size
    problem = split_problem(contents, plan, tp_size)
    problem = problem or (sequence_problem(contents, plan) if settings.sequence_parallel else None)
    problem = problem or context_problem(contents, settings.context_parallel_size, longest)
    problem = problem or experts_problem(contents, tp_size, settings.expert_parallel_size)
    problem = problem or sizes_problem(settings, num_workers)
    if problem is not None:
        raise ConfigError(problem)


def apply_fsdp(
    root: nn.Module,
    layers: Iterable[nn.Module],
    meshes: Meshes,
    compute_dtype: torch.dtype,
    more_units: Iterable[Sequence[nn.Module]] = (),
    *,
    is_empty: bool = False,
) -> FSDPModule:
    """Shard parameters over `fsdp`: a unit per layer, one for divided experts of a layer, and the root with the rest.

    Losses are divided by global counts already, so gradients are summed over the ranks in fp32.

    Args:
        root: The module to shard.
        layers: The decoder layers.
        meshes: Result of `build_meshes`.
        compute_dtype: Type to which parameters are cast when gathered.
        more_units: Groups of modules outside of the layers, one unit each; modules with shared parameters are in one.
        is_empty: See `use_one_rank`; for one rank only.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        if meshes.dp_shard is not None:
            # Inputs are not cast, as for experts inside the layer's unit.
            as_they_are = replace(policy, cast_forward_inputs=False)
            for experts in expert_modules(layer):
                fully_shard(experts, mesh=meshes.dp_shard, mp_policy=as_they_are)
        fully_shard(layer, mesh=meshes.fsdp, mp_policy=policy)
    taken: set[nn.Parameter] = set()
    for modules in more_units:
        fully_shard(list(modules), mesh=meshes.fsdp, mp_policy=policy)
        taken.update(parameter for module in modules for parameter in module.parameters())
    # The root's parameters are used last in forward and first in backward.
    wrapped = fully_shard(
        root, mesh=meshes.fsdp, mp_policy=policy, reshard_after_forward=False, ignored_params=taken or None
    )
    for module in fsdp_modules(wrapped):
        module.set_gradient_divide_factor(1.0)
        # Otherwise a factor selects NCCL's pre-multiplied sum, which gloo lacks.
        module.set_force_sum_reduction_for_comms(True)
    if meshes.fsdp.size() == 1:
        use_one_rank(fsdp_modules(wrapped), is_empty=is_empty)
    return wrapped


def fsdp_modules(root: FSDPModule) -> list[FSDPModule]:
    """Return all FSDP units inside a unit, itself first."""
    return [module for module in cast(nn.Module, root).modules() if isinstance(module, FSDPModule)]


def gather(layer: nn.Module) -> None:
    """Begin to gather a layer's parameters, after the work queued on the current stream.

    Asynchronous gathers run on the current stream; the layer's own pre-forward hook would use streams that do not wait
    for it. The hook then waits for this gather.
    """
    for module in fsdp_modules(cast(FSDPModule, layer)):
        module.unshard(async_op=True)


def drop_unreduced_grads(root: FSDPModule) -> None:
    """Drop unreduced gradients of gathered parameters, which FSDP would add to the next step's."""
    for module in fsdp_modules(root):
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else ():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def forget_pass(root: FSDPModule) -> None:
    """Reset FSDP, which has no call for it, after a pass that broke off; parameters are not gathered.

    After a failed backward FSDP still expects that pass's end, and would not reduce the root's gradients in the next
    pass. After a failed collective it would use that one's arbitrary result.
    """
    for module in fsdp_modules(root):
        state = module._get_fsdp_state()
        if state._is_root is None:
            continue  # no pass has begun yet
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
        group = state._fsdp_param_group
        if group is None:
            continue
        group._training_state = TrainingState.IDLE
        group._post_forward_indices.clear()
        if (gathering := group._all_gather_result) is not None and isinstance(gathering.all_gather_work, dist.Work):
            with suppress(RuntimeError):  # it may have failed
                gathering.all_gather_work.wait()
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._reshard_after_forward_event = group._partial_reduce_output = None


def reshard_all(root: FSDPModule) -> None:
    """Free every gathered parameter, even after a failed forward or backward.

    After a failed forward, FSDP believes the root still runs, and `reshard` does nothing unless the root may be
    resharded in forward. The next forward would then use outdated gathered copies.
    """
    root.set_reshard_after_forward(True, recurse=False)
    for module in fsdp_modules(root):
        module.reshard()
        module._get_fsdp_state()._modules_to_run_forward.clear()
    root.set_reshard_after_forward(False, recurse=False)


def prepare_when_computed_again(layer: nn.Module, dtype: torch.dtype) -> None:
    """Give a checkpointed layer inputs in its recomputation like those in its forward pass; FSDP's hook does not.

    FSDP casts inputs, which matters to OLMo 2 and ERNIE 4.5: their rotary angles are float32, whatever the type of
    hidden states. And it passes hidden states as a view, without which a compiled layer is compiled again.
    """

    def prepare(_layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        (hidden, *others), kwargs = cast_inputs((args, kwargs), dtype)
        if hidden.requires_grad and not hidden._is_view():
            hidden = hidden.view_as(hidden)
        return (hidden, *others), kwargs

    layer.register_forward_pre_hook(prepare, with_kwargs=True)


# -- a unit without its hooks, for one rank


@contextmanager
def gathered(unit: FSDPModule) -> Iterator[None]:
    """Gather a unit's parameters in the compute type, within the context, which must run no FSDP hooks."""
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def cast_inputs[Values](values: Values, dtype: torch.dtype) -> Values:
    """Cast all floating-point tensors in nested `values`, as FSDP casts a unit's inputs."""
    return _apply_to_tensors(partial(_cast_fp_tensor, dtype), values)


@torch.no_grad()
def brought(tensor: Tensor, host_view: HostView) -> Tensor:
    """Return the tensor itself, or a copy on its device if its contents are on the host, for the current stream."""
    view = host_view(tensor)
    if view is None:
        return tensor
    local = view.to(tensor.device, non_blocking=True)
    if not isinstance(tensor, DTensor):
        return local
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def full_tensor(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the whole tensor, cast to `dtype` before the gather to move fewer bytes; a collective for a DTensor."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.size() == 1:
        # The local tensor is whole; this skips DTensor's overhead for each of hundreds of tensors.
        parameter = local_tensor(parameter)
    value = parameter.detach().to(dtype)
    return value.full_tensor() if isinstance(value, DTensor) else value
