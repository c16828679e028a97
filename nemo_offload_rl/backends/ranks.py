"""The process group of a backend, and sums over its data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
