"""Which transport a rank of the policy sends over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nemo_offload_rl.weight_sync.cuda_ipc import CudaIpcSender
from nemo_offload_rl.weight_sync.nccl import NcclGroup, NcclSender
from nemo_offload_rl.weight_sync.sender import BucketSender, DiscardingSender
from nemo_offload_rl.weight_sync.shared_memory import SharedMemorySender

if TYPE_CHECKING:
    from nemo_offload_rl.protocols.backend import WeightSpec


def make_sender(
    specs: Sequence[WeightSpec],
    buffer_bytes: int,
    device: torch.device,
    rank: int,
    group: NcclGroup | None,
    *,
    to_other_devices: bool,
) -> BucketSender:
    """Every rank sends on its own GPU. To other devices, and on CPU, rank 0 sends for all.

    Args:
        specs: What every refit sends, in order.
        buffer_bytes: Most bytes of a bucket, unless a tensor is larger.
        device: This rank's device.
        rank: This rank.
        group: The communicator with engines on other devices, on the rank that sends to them.
        to_other_devices: The engines are on other devices.
    """
    if group is not None:
        return NcclSender(specs, buffer_bytes, group)
    if device.type == "cuda" and not to_other_devices:
        return CudaIpcSender(specs, buffer_bytes, device)
    return (SharedMemorySender if rank == 0 else DiscardingSender)(specs, buffer_bytes)
