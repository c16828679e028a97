"""Which optimizer states stream, and the global gradient norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_offload_rl.policy.backends.dtensor.config import DTensorConfig
from nemo_offload_rl.policy.backends.dtensor.parallel import TP
from nemo_offload_rl.policy.backends.optimizer_spec import OptimizerSpec
from nemo_offload_rl.residency import OptimizerParts, divide_optimizer, local_tensor


def divide(
    parameters: Sequence[tuple[str, nn.Parameter]], spec: OptimizerSpec, settings: DTensorConfig
) -> OptimizerParts:
    """Which optimizer states stream around the step, and in which parts."""
    chunk_mib = settings.offload_optimizer_states_chunk_mib
    return divide_optimizer(
        parameters,
        lambda parameter: spec.bytes_per_element(parameter.dtype) * local_tensor(parameter).numel(),
        1.0 if settings.offload_optimizer_states else 0.0,
        None if chunk_mib is None else int(chunk_mib * 2**20),
    )


def _is_split_over_tp(gradient: Tensor) -> bool:
    if not isinstance(gradient, DTensor):
        return False
    names = gradient.device_mesh.mesh_dim_names or ()
    return TP in names and gradient.placements[names.index(TP)].is_shard()


def global_grad_norm(parameters: Iterable[nn.Parameter], tp_rank: int, device: torch.device) -> Tensor:
    """L2 norm of the gradients of all ranks, each element counted once; a 0-dim float64, equal on all ranks."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    mine = [local_tensor(grad) for grad in gradients if tp_rank == 0 or _is_split_over_tp(grad)]
    norm = torch.nn.utils.get_total_norm(mine) if mine else torch.zeros(())
    square = norm.to(device=device, dtype=torch.float64) ** 2
    dist.all_reduce(square)
    return square.sqrt()


def scale_grads(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by a 0-dim factor."""
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))  # pyright: ignore[reportPrivateImportUsage]
