"""Division of optimizer states into streamed parts, and gradient norms."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_offload_rl.backends.dtensor.built import Part
from nemo_offload_rl.backends.dtensor.parallel import TP
from nemo_offload_rl.backends.optimizer_parts import OptimizerParts, divide_optimizer, num_streamed
from nemo_offload_rl.backends.ranks import all_reduce
from nemo_offload_rl.keys.dtensor import DTensorConfig
from nemo_offload_rl.protocols.optimizer import OptimizerSpec
from nemo_offload_rl.residency import OPTIMIZER_PART, local_tensor


def divide(
    parameters: Sequence[tuple[str, nn.Parameter]], spec: OptimizerSpec, settings: DTensorConfig, parts: Sequence[Part]
) -> OptimizerParts:
    """Divide optimizer states into parts that stream during the step, and the rest; uses the model's parts if any."""
    if parts:
        in_parts = {parameter for part in parts for _, parameter in part.parameters}
        rest = [(name, parameter) for name, parameter in parameters if parameter not in in_parts]
        return OptimizerParts(rest, {f"{OPTIMIZER_PART}.{i}": part.parameters for i, part in enumerate(parts)})
    chunk_mib = settings.offload_optimizer_states_chunk_mib
    return divide_optimizer(
        parameters,
        lambda parameter: spec.bytes_per_element(parameter.dtype) * local_tensor(parameter).numel(),
        num_streamed([parameter.numel() for _, parameter in parameters], settings.streamed_share),
        None if chunk_mib is None else int(chunk_mib * 2**20),
    )


def _is_split_over_tp(gradient: Tensor) -> bool:
    if not isinstance(gradient, DTensor):
        return False
    names = gradient.device_mesh.mesh_dim_names or ()
    return TP in names and gradient.placements[names.index(TP)].is_shard()


def gradient_norms(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return 0-dim L2 norms of this rank's part of each gradient; they do not depend on how gradients are batched."""
    with_gradient = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    if not with_gradient:
        return {}
    norms = torch._foreach_norm([local_tensor(grad) for grad in with_gradient.values()])  # pyright: ignore[reportPrivateImportUsage]
    return dict(zip(with_gradient, norms, strict=True))


def global_grad_norm(
    parameters: Iterable[nn.Parameter],
    tp_rank: int,
    device: torch.device,
    known: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
) -> Tensor:
    """Compute the L2 norm of all ranks' gradients, each element counted once; a 0-dim float64, equal on all ranks.

    Args:
        parameters: Parameters; those without a gradient are ignored.
        tp_rank: This rank's tensor-parallel rank.
        device: This rank's device.
        known: Result of `gradient_norms` for gradients that are not on the device now.
    """
    mine = [p for p in parameters if p.grad is not None and (tp_rank == 0 or _is_split_over_tp(p.grad))]
    norms = {**known, **gradient_norms(parameter for parameter in mine if parameter not in known)}
    in_order = [norms[parameter] for parameter in mine]
    norm = torch.linalg.vector_norm(torch.stack(in_order)) if in_order else torch.zeros(())
    square = norm.to(device=device, dtype=torch.float64) ** 2
    all_reduce(square)
    return square.sqrt()


def scale_grads(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply every gradient by a 0-dim factor."""
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))  # pyright: ignore[reportPrivateImportUsage]
