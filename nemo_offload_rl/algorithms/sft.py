"""Supervised fine-tuning: the policy imitates demonstrations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nemo_offload_rl.algorithms.losses.nll import NLLLoss
from nemo_offload_rl.data.batch import TrainBatch
from nemo_offload_rl.data.collate import collate_demonstrations
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.data.records import Demonstration
from nemo_offload_rl.policy.interfaces import LossFn, TrainResult

logger = logging.getLogger(__name__)


class TrainablePolicy(Protocol):
    """The part of the policy facade that SFT uses."""

    def prepare_for_training(self) -> object:
        """Bring parameters and optimizer to the device."""
        ...

    def train(self, batch: TrainBatch, loss_fn: LossFn) -> TrainResult:
        """Run the optimizer steps of one batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class CollateSettings:
    """How demonstrations become tensors: padding token, multiple of the width, longest sequence in tokens."""

    pad_id: int
    multiple: int
    max_length: int


def sft_train(
    policy: TrainablePolicy,
    loader: ShuffledLoader[Demonstration],
    *,
    num_steps: int,
    collate: CollateSettings,
    on_step: Callable[[int, TrainResult], None] | None = None,
) -> list[float]:
    """Train for `num_steps` batches of the loader and return each batch's mean loss per response token.

    Args:
        policy: What is trained. The loader's batch size should be its global batch size, for one update a step.
        loader: Gives the demonstrations.
        num_steps: Batches to train on.
        collate: Padding.
        on_step: Called after each batch with its number, from 1, and what training returned.
    """
    policy.prepare_for_training()
    losses: list[float] = []
    for step in range(1, num_steps + 1):
        batch = collate_demonstrations(
            next(loader), pad_id=collate.pad_id, multiple=collate.multiple, max_length=collate.max_length
        )
        result = policy.train(batch, NLLLoss())
        losses.append(sum(result.loss) / len(result.loss))
        logger.debug("sft step %d: loss %.4f", step, losses[-1])
        if on_step is not None:
            on_step(step, result)
    return losses
