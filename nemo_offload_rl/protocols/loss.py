"""What the driver, the workers, the losses and the backends agree on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Concatenate, NamedTuple, Protocol

from torch import Tensor

from nemo_offload_rl.data.batch import LossNorm, TrainBatch


class TokenStat(Enum):
    """What can be measured of the distribution at a token; the value is the metric's name.

    Attributes:
        ACCURACY: 1 where no logit is above the token's own, so that a tie for the first place counts; 0 elsewhere.
        ENTROPY: In nats, of the distribution that the logprobs are of.
    """

    ACCURACY = "token_accuracy"
    ENTROPY = "entropy"


class LossFn(Protocol):
    """A loss on one micro-batch, already divided by the global batch's counts.

    Summing the returned loss over all micro-batches and data-parallel ranks gives the loss of the global batch, so
    gradients are summed, never averaged. Instances are picklable and hold no tensors.
    """

    @property
    def token_stat(self) -> TokenStat | None:
        """What the backend measures beside this loss, as a mean over the counted tokens; None for nothing.

        Losses see logprobs only, and this needs the logits.
        """
        ...

    def __call__(
        self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss and metrics of one micro-batch.

        Args:
            logprobs_BS: [B, S] float32 logprobs of `batch.input_ids` with gradient where `batch.is_scored()`, which is
                where the loss mask is not 0; 0 elsewhere, as no logits are computed there. They are over the tokens
                that rollouts are drawn from (temperature, `top_p`, `top_k`); -inf for a token that is not among them.
            batch: The micro-batch, on the same device.
            norm: Counts of the global batch.

        Returns:
            A scalar, and detached scalar metrics. Metrics whose name ends in `_min` or `_max` are reduced so;
            all others are shares that sum to the global value.
        """
        ...


class ReferenceLoss(ABC):
    """A `LossFn` that compares with a reference policy, whose logprobs are over the whole vocabulary.

    Where tokens are drawn from some of it (`top_p`, `top_k`), the policy's logprobs are not.
    """

    @property
    @abstractmethod
    def token_stat(self) -> TokenStat | None:
        """See `LossFn`."""

    @property
    @abstractmethod
    def reads_whole(self) -> bool:
        """Whether it compares at all."""

    @abstractmethod
    def __call__(
        self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm, whole_logprobs_BS: Tensor | None = None, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """As `LossFn`.

        Args:
            logprobs_BS: As for `LossFn`.
            batch: As for `LossFn`.
            norm: As for `LossFn`.
            whole_logprobs_BS: The same over the whole vocabulary, with gradient; None where `logprobs_BS` are that.
        """


@dataclass(frozen=True)
class Divergence:
    """How a student's distribution is compared with a teacher's (`backends/scoring/divergence.py` has the formulas).

    Attributes:
        forward_weight: Weight of KL(teacher || student), 0..1; KL(student || teacher) has the rest.
        zero_outside_topk: The teacher's probability is 0 outside of its top-k; else both are renormalized over it.
    """

    forward_weight: float
    zero_outside_topk: bool


class DivergenceScores(NamedTuple):
    """What is known of tokens that are distilled, in float32 tensors of one shape; 0 where nothing is scored.

    Attributes:
        divergence: Between student and teacher before the token, with gradient.
        logprobs: Of the tokens themselves under the student, without gradient.
        teacher_mass: Of the teacher's top-k, in its own distribution; 1 where all of that is known.
    """

    divergence: Tensor
    logprobs: Tensor
    teacher_mass: Tensor


class DivergenceLoss(ABC):
    """A `LossFn` on divergences from a teacher: its first argument has them in place of logprobs.

    Its batches are of the class `SampledBatch`.
    """

    token_stat: TokenStat | None = None

    @property
    @abstractmethod
    def divergence(self) -> Divergence:
        """Which divergence the backend computes."""

    @abstractmethod
    def __call__(self, divergence_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """As `LossFn`, of divergences [B, S]."""

    @abstractmethod
    def measure(self, scores_BS: DivergenceScores, batch: TrainBatch, norm: LossNorm) -> Mapping[str, Tensor]:
        """Further metrics, as `LossFn` gives them."""


@dataclass(frozen=True)
class TrainResult:
    """What one call of `train` gives back; one entry per optimizer step in each list.

    Attributes:
        loss: Of each global batch.
        grad_norm: Before clipping.
        learning_rate: Of each update.
        metrics: What the loss measured.
        is_skipped: The gradient norm was not finite, so that nothing was updated; empty where nothing was to be.
    """

    loss: list[float]
    grad_norm: list[float]
    learning_rate: list[float]
    metrics: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    is_skipped: list[bool] = field(default_factory=list[bool])


type Method[**P, R] = Callable[Concatenate[Any, P], R]
"""A method of a worker's class."""


class WorkerGroup(Protocol):
    """All ranks of one kind of worker, in this process or behind Ray.

    A method is given as that of the workers' class, such as `PolicyWorker.train`; workers of another class have one of
    the same name. Errors of a worker are raised in the caller; a worker that died raises `WorkerDiedError`.
    """

    @property
    def world_size(self) -> int:
        """Number of workers."""
        ...

    def run_all[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `method` with the same arguments on every rank and return the results by rank."""
        ...

    def run_each[*Args, R](self, method: Callable[[Any, *Args], R], per_rank_args: Sequence[tuple[*Args]]) -> list[R]:
        """Call `method` on rank i with `per_rank_args[i]` and return the results by rank."""
        ...

    def start_all[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> Callable[[], list[R]]:
        """Like `run_all` but returns at once: a function that waits for the results, to be called once or never."""
        ...

    def settle(self, timeout_s: float) -> bool:
        """Wait until no worker runs a call that failed or was broken off; whether all can take further calls.

        False if a worker still runs one after `timeout_s`.
        """
        ...

    def pids(self) -> list[int]:
        """Process ids by rank, each on its own host."""
        ...

    def local_pids(self) -> list[int]:
        """Process ids of the workers on the driver's host."""
        ...

    def shutdown(self) -> None:
        """End every worker process; safe to call twice."""
        ...
