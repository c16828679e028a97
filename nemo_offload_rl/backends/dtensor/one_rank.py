"""FSDP units of a single rank: nothing is gathered or reduced, so parameters and gradients are cast in one call each.

FSDP casts every parameter, copies the result and adds up gradients tensor by tensor, twice a layer and micro-batch. On
hosts with slow cores these launches set the pace of a pass.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor


def use_one_rank(units: list[FSDPModule], *, is_empty: bool = False) -> None:
    """Replace the work of FSDP units whose parameters are on one rank; FSDP's hooks and states stay.

    With `is_empty` the parameters have no memory: passes compute with zeros, and drop gradients.

    Results are the same bits. Gradients are added to the float32 ones after each backward pass of a unit. A frozen
    parameter in the compute type is read where it is, without a copy.
    """
    for unit in units:
        group = unit._get_fsdp_state()._fsdp_param_group
        if group is not None:
            group.__class__ = _EmptyGroup if is_empty else _OneRankGroup


@torch.no_grad()
def add_gradients(unit: FSDPModule) -> None:
    """Add autograd's gradients, in the compute type, to the float32 gradients of a unit's parameters.

    New gradients share one storage, as with FSDP. Unlike FSDP's reduction this takes no further memory.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None:
        cast(_OneRankGroup, group).add_gradients()


def _add_gradients(group: FSDPParamGroup) -> None:
    ready = [it for it in group.fsdp_params if hasattr(it, "_unsharded_param") and it.unsharded_param.grad is not None]
    new = [it for it in ready if it.sharded_param.grad is None]
    added = [it for it in ready if it.sharded_param.grad is not None]
    if new:
        sizes = [it.unsharded_grad_data.numel() for it in new]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=group.device)
        pieces = [piece.view(it.sharded_size) for piece, it in zip(flat.split(sizes), new, strict=True)]
        torch._foreach_copy_(pieces, [it.unsharded_grad_data for it in new])  # pyright: ignore[reportPrivateImportUsage]
        for it, piece in zip(new, pieces, strict=True):
            it.sharded_param.grad = it.to_sharded_dtensor(piece)
    if added:
        sums = [cast(DTensor, it.sharded_param.grad)._local_tensor for it in added]
        torch._foreach_add_(sums, [it.unsharded_grad_data for it in added])  # pyright: ignore[reportPrivateImportUsage]
    for it in ready:
        it.unsharded_param.grad = None


class _OneRankGroup(FSDPParamGroup):
    """The parameters of a unit."""

    _reads_in_place = True

    def unshard(self, async_op: bool = False) -> None:
        """Do nothing: `wait_for_unshard` casts, on the current stream."""

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Cast the parameters to the compute type, unless they are cast."""
        if self.is_unsharded:
            return
        for it in self.fsdp_params:
            if not hasattr(it, "_unsharded_param"):
                self._init_output(it)
        cast_params = [it for it in self.fsdp_params if it.all_gather_outputs]
        outputs = tuple(it.all_gather_outputs[0] for it in cast_params)
        for output in outputs:
            alloc_storage(output)
        if outputs:
            with torch.autograd._unsafe_preserve_version_counter(outputs):  # pyright: ignore[reportPrivateImportUsage]
                self._fill(outputs, [it._sharded_param_data for it in cast_params])
        self._to_unsharded()

    def _fill(self, outputs: tuple[Tensor, ...], sources: list[Tensor]) -> None:
        torch._foreach_copy_(outputs, sources)  # pyright: ignore[reportPrivateImportUsage]

    def _init_output(self, parameter: FSDPParam) -> None:
        source = parameter._sharded_param_data
        if self._reads_in_place and parameter.param_dtype is None and not parameter.sharded_param.requires_grad:
            parameter.all_gather_outputs = [source]
            parameter.init_unsharded_param()
            parameter.all_gather_outputs = []  # FSDP would free the memory of tensors listed here
            return
        parameter.init_all_gather_outputs(
            [source.numel()], [parameter.param_dtype or source.dtype], 1, self.device, force_recreate=False
        )
        parameter.init_unsharded_param()

    def post_backward(self, *unused: Any) -> None:
        """Add the gradients, and free the cast parameters."""
        self._training_state = TrainingState.POST_BACKWARD
        with torch.no_grad():
            self.add_gradients()
        self.reshard()

    def add_gradients(self) -> None:
        """Add autograd's gradients to the float32 ones."""
        _add_gradients(self)

    def _record_post_forward(self) -> None:
        """Do nothing: no other group is prefetched."""

    def _backward_prefetch(self) -> None:
        """Do nothing; see `unshard`."""


class _EmptyGroup(_OneRankGroup):
    """Parameters without memory; only the gathered ones have any."""

    _reads_in_place = False

    def _fill(self, outputs: tuple[Tensor, ...], sources: list[Tensor]) -> None:
        torch._foreach_zero_(outputs)  # pyright: ignore[reportPrivateImportUsage]

    def add_gradients(self) -> None:
        """Drop autograd's gradients."""
        for it in self.fsdp_params:
            if hasattr(it, "_unsharded_param"):
                it.unsharded_param.grad = None
