"""Interfaces between backends and readers of hidden states.

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
"""Maps hidden states of some positions to logits of this rank's vocabulary columns."""


@dataclass(frozen=True)
class Head:
    """Settings for reading logits.

    Attributes:
        temperature: Divisor of the logits.
        chunk_size: Positions whose logits exist at once; None for all.
        shard: This rank's columns.
        softcap: Cap that was already applied to the logits by `capped`.
        kept: Filter of the tokens that are drawn; None for all.
    """

    temperature: float
    chunk_size: int | None
    shard: VocabShard
    softcap: float | None = None
    kept: TokenFilter | None = None


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Cap logits softly between -c and c: c tanh(logits / c), as in Gemma 2 (arXiv 2408.00118)."""
    return logits if softcap is None else (logits / softcap).tanh_() * softcap


@dataclass(frozen=True)
class Positions:
    """Tokens to score.

    Attributes:
        hidden: [N, ...] last hidden states, from which each token is predicted.
        targets: [N, ...] int64 ids of the tokens.
        places: [N, ...] int64 indices of the tokens in the flattened rows of the micro-batch.
    """

    hidden: Tensor
    targets: Tensor
    places: Tensor

    def split(self, chunk_size: int | None) -> list[Positions]:
        """Split into chunks of at most `chunk_size` positions."""
        if chunk_size is None:
            return [self]
        pieces = [torch.split(value, chunk_size) for value in (self.hidden, self.targets, self.places)]
        return [Positions(*piece) for piece in zip(*pieces, strict=True)]


class Reader(Protocol):
    """A function of a model's last hidden states, such as scores of tokens."""

    def __call__(self, output_layer: OutputLayer, positions: Positions, head: Head) -> Any:
        """Return a NamedTuple of tensors whose shapes begin with that of `positions.targets`."""
        ...


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's output layer on the ranks that train the student.

    Attributes:
        weight: [V, H] rows of the student's vocabulary shard, in the teacher's compute type.
        temperature: Divisor of the teacher's logits.
        softcap: Cap for `capped`; None for no cap.
    """

    weight: Tensor
    temperature: float
    softcap: float | None = None
