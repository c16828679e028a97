"""What backends and the reading of hidden states agree on.

Shape suffixes: N positions, V this rank's part of the vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_offload_rl.keys.worker import TokenFilter
from nemo_offload_rl.protocols.vocab import VocabShard

type OutputLayer = Callable[[Tensor], Tensor]
"""Hidden states of some positions to logits of this rank's vocabulary columns."""


@dataclass(frozen=True)
class Head:
    """How logits are read.

    Attributes:
        temperature: What they are divided by.
        chunk_size: Positions whose logits exist at once; None for all.
        shard: This rank's columns.
        softcap: What `capped` has been given for them.
        kept: Which tokens are drawn; None for all.
    """

    temperature: float
    chunk_size: int | None
    shard: VocabShard
    softcap: float | None = None
    kept: TokenFilter | None = None


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits that stay between -c and c: c tanh(logits / c), as Gemma 2 has them (arXiv 2408.00118)."""
    return logits if softcap is None else (logits / softcap).tanh_() * softcap


@dataclass(frozen=True)
class Positions:
    """Where the tokens to score come from.

    Attributes:
        hidden: [N, ...] last hidden states before them.
        targets: [N, ...] int64 their ids.
        places: [N, ...] int64 their places in the flattened rows of the micro-batch.
    """

    hidden: Tensor
    targets: Tensor
    places: Tensor

    def split(self, chunk_size: int | None) -> list[Positions]:
        """In chunks of at most so many."""
        if chunk_size is None:
            return [self]
        pieces = [torch.split(value, chunk_size) for value in (self.hidden, self.targets, self.places)]
        return [Positions(*piece) for piece in zip(*pieces, strict=True)]


class Reader(Protocol):
    """Reads a model's last hidden states."""

    def __call__(self, output_layer: OutputLayer, positions: Positions, head: Head) -> Any:
        """A NamedTuple of tensors that begin with the shape of `positions.targets`."""
        ...


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's output layer where the student is trained.

    Attributes:
        weight: [V, H] rows of the student's vocabulary shard, in the teacher's compute type.
        temperature: What its logits are divided by.
        softcap: What `capped` is given for them.
    """

    weight: Tensor
    temperature: float
    softcap: float | None = None
