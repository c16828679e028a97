"""The process group of a backend, sums over its ranks, and collectives with gradients."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.protocols.backend import ProcessInfo

_NO_LIMIT = timedelta(days=365)


def join_process_group(process: ProcessInfo, ends: ExitStack | None = None) -> None:
    """Make the default process group unless it exists; a group that is made here is destroyed by `ends`.

    CPU tensors, such as those of checkpoints and counters, go through gloo on a GPU machine too.
    """
    if dist.is_initialized():
        return
    device = torch.device(process.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = _timeout(process)
    kwargs: dict[str, Any] = {"timeout": timeout, "backend": "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"}
    if process.world_size == 1:
        # No port: a run on one device must not fail because another run listens on the same one.
        kwargs["store"] = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    else:
        kwargs["init_method"] = process.init_method
    dist.init_process_group(rank=process.rank, world_size=process.world_size, **kwargs)
    if ends is not None:
        ends.callback(dist.destroy_process_group)


def limit_collectives(process: ProcessInfo) -> None:
    """Set `process.collective_timeout_s` for all process groups; torch's default is 10 minutes for NCCL."""
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_rank(group) >= 0:
            dist.distributed_c10d._set_pg_timeout(_timeout(process), group)


def _timeout(process: ProcessInfo) -> timedelta:
    limit_s = process.collective_timeout_s
    return _NO_LIMIT if limit_s is None else timedelta(seconds=limit_s)


def all_reduce(
    value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> None:
    """Call `dist.all_reduce` unless the group has one rank: its NCCL communicator would take GPU memory."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(value, op=op, group=group)


def sum_over_ranks(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Sum each value over a group's ranks, through `device`; with one rank the device is not used."""
    if group.size() == 1:
        return [float(value) for value in values]
    total = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return total.tolist()


def max_over_ranks(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the largest value over a group's ranks, through `device`; with one rank the device is not used."""
    if group.size() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)


def max_over_all_ranks(value: int) -> int:
    """Return the largest value over all ranks; through the host, so that no work of a device is waited for."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


@contextmanager
def failing_together(kind: type[UserError]) -> Iterator[None]:
    """Raise one rank's `kind` of error on every rank; a collective at the end of the context.

    A rank that failed raises its own error, the others that of the first rank that failed.
    """
    failure: UserError | None = None
    try:
        yield
    except kind as error:
        failure = error
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if (first := next((text for text in texts if text is not None), None)) is not None:
        raise kind(first)


class Totals:
    """Sums loss and metrics of one step's micro-batches; reads nothing from the device until `reduce`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: dict[str, Tensor] = {"loss": torch.zeros((), dtype=torch.float64, device=device)}

    @staticmethod
    def _op(name: str) -> dist.ReduceOp.RedOpType:
        if name.endswith("_min"):
            return dist.ReduceOp.MIN
        return dist.ReduceOp.MAX if name.endswith("_max") else dist.ReduceOp.SUM

    def add(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        for name, value in {**metrics, "loss": loss}.items():
            value = torch.as_tensor(value, device=self._device).detach().double()
            if name not in self._values:
                self._values[name] = value
                continue
            combine = {dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum}
            self._values[name] = combine.get(self._op(name), torch.add)(self._values[name], value)

    def reduce(self, group: dist.ProcessGroup) -> tuple[float, dict[str, float]]:
        """Return loss and metrics reduced over the data-parallel ranks; metric names must be equal on all ranks."""
        reduced = {}
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            names = sorted(name for name in self._values if self._op(name) == op)
            if names:
                packed = torch.stack([self._values[name] for name in names])
                all_reduce(packed, op, group)
                reduced |= dict(zip(names, packed.tolist(), strict=True))
        return reduced.pop("loss"), reduced


def sum_over(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce sum; backward returns the gradient unchanged, since every rank uses the same result."""
    return _Sum.apply(value, group)  # type: ignore[no-any-return]


def gathered(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather tensors of equal shape to [ranks, ...]; backward sums all ranks' gradients of each tensor."""
    return _Gather.apply(value, group)  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        found = value.new_empty(group.size() * len(value), *value.shape[1:])  # the only form that gloo supports
        dist.all_gather_into_tensor(found, value.contiguous(), group=group)
        return found.unflatten(0, (group.size(), len(value)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        grad = grad_outputs[0].contiguous()
        mine = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(mine, grad.flatten(0, 1), group=ctx.group)
        return mine, None
