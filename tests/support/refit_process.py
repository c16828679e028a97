"""The sending side of a refit in a process of its own, for tests of the receiving side."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from nemo_offload_rl.protocols.backend import WeightSpec
from nemo_offload_rl.protocols.refit import WeightBucket
from nemo_offload_rl.weight_sync.sender import DiscardingSender
from nemo_offload_rl.weight_sync.shared_memory import SharedMemorySender


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(70, 9, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "empty": torch.empty(0, 5),
        "ids": torch.randint(0, 9, (3, 2, 2), generator=generator),
        "transposed": torch.randn(8, 40, generator=generator).t(),
    }


def specs_of(tensors: dict[str, Tensor]) -> list[WeightSpec]:
    return [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def buckets_of(sender: SharedMemorySender | DiscardingSender) -> Iterator[WeightBucket]:
    while (bucket := sender.next_bucket()) is not None:
        yield bucket


def send_until_told(pipe: Connection) -> None:
    """For each (buffer size, seeds) received: one sender, one refit for each seed; None ends the process."""
    while (order := pipe.recv()) is not None:
        buffer_bytes, seeds = order
        sender = SharedMemorySender(specs_of(weights(0)), buffer_bytes)
        for seed in seeds:
            sender.start(iter(weights(seed).items()))
            for bucket in buckets_of(sender):
                pipe.send(bucket)
                pipe.recv()
            pipe.send(None)
        sender.close()
