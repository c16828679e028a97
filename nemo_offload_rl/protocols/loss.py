"""Interfaces of losses and worker groups, shared by the driver, the workers and the backends."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Concatenate, NamedTuple, Protocol

from torch import Tensor

from nemo_offload_rl.data.batch import LossNorm, TrainBatch


class TokenStat(Enum):
    """A measure of the distribution at a token; the value is the metric's name.

    Attributes:
        ACCURACY: 1 if no logit is above the token's own (a tie for first place counts), else 0.
        ENTROPY: Entropy in nats of the distribution that gives the logprobs.
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
        """Measure that the backend reports with this loss, as a mean over the counted tokens; None for none.

        The backend computes it because it needs the logits, and losses see logprobs only.
        """
        ...

    def __call__(
        self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return loss and metrics of one micro-batch.

        Args:
            logprobs_BS: [B, S] float32 logprobs of `batch.input_ids`, with gradient where `batch.is_scored()` (the loss
                mask is not 0); 0 elsewhere, since no logits are computed there. Their distribution is the one that
                rollouts are drawn from (temperature, `top_p`, `top_k`); a token outside of it has -inf.
            batch: The micro-batch, on the same device.
            norm: Counts of the global batch.

        Returns:
            A scalar, and detached scalar metrics. Metrics whose name ends in `_min` or `_max` are reduced by minimum or
            maximum; all others are shares that sum to the global value.
        """
        ...


class ReferenceLoss(ABC):
    """A `LossFn` that compares with a reference policy, whose logprobs are over the whole vocabulary.

    With `top_p` or `top_k` the policy's own logprobs are not, so it gets a second set that is.
    """

    @property
    @abstractmethod
    def token_stat(self) -> TokenStat | None:
        """See `LossFn`."""

    @property
    @abstractmethod
    def reads_whole(self) -> bool:
        """True if the loss reads `whole_logprobs_BS`."""

    @abstractmethod
    def __call__(
        self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm, whole_logprobs_BS: Tensor | None = None, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return loss and metrics of one micro-batch, as `LossFn` does.

        Args:
            logprobs_BS: As for `LossFn`.
            batch: As for `LossFn`.
            norm: As for `LossFn`.
            whole_logprobs_BS: Logprobs over the whole vocabulary, with gradient; None if `logprobs_BS` are over it.
        """


@dataclass(frozen=True)
class Divergence:
    """Settings that compare a student's distribution with a teacher's (formulas in `backends/scoring/divergence.py`).

    Attributes:
        forward_weight: Weight w of KL(teacher || student), 0..1; KL(student || teacher) has 1 - w.
        zero_outside_topk: Set the teacher's probability to 0 outside of its top-k; else renormalize both over it.
    """

    forward_weight: float
    zero_outside_topk: bool


class DivergenceScores(NamedTuple):
    """Scores of distilled tokens, in float32 tensors of one shape; 0 where nothing is scored.

    Attributes:
        divergence: Divergence between student and teacher at each token, with gradient.
        logprobs: Logprobs of the tokens under the student, without gradient.
        teacher_mass: Probability that the teacher gives to its top-k; 1 if its whole distribution is known.
    """

    divergence: Tensor
    logprobs: Tensor
    teacher_mass: Tensor


class DivergenceLoss(ABC):
    """A `LossFn` whose first argument is divergences from a teacher in place of logprobs.

    Its batches are of the class `SampledBatch`.
    """

    token_stat: TokenStat | None = None

    @property
    @abstractmethod
    def divergence(self) -> Divergence:
        """The divergence that the backend computes."""

    @abstractmethod
    def __call__(self, divergence_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return loss and metrics of one micro-batch, as `LossFn` does, from divergences [B, S]."""

    @abstractmethod
    def measure(self, scores_BS: DivergenceScores, batch: TrainBatch, norm: LossNorm) -> Mapping[str, Tensor]:
        """Return further metrics, reduced as those of `LossFn`."""


@dataclass(frozen=True)
class TrainResult:
    """Result of one call of `train`; each list has one entry per optimizer step.

    Attributes:
        loss: Loss of the global batch.
        grad_norm: Gradient norm before clipping.
        learning_rate: Learning rate of the update.
        metrics: Metrics of the loss, by name.
        is_skipped: The gradient norm was not finite, so nothing was updated; empty if no update was due.
        oom_splits: Number of micro-batches that were cut in two for lack of device memory, in this and in other passes
            since the last call.
    """

    loss: list[float]
    grad_norm: list[float]
    learning_rate: list[float]
    metrics: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    is_skipped: list[bool] = field(default_factory=list[bool])
    oom_splits: int = 0


type Method[**P, R] = Callable[Concatenate[Any, P], R]
"""A method of a worker's class."""


class WorkerGroup(Protocol):
    """All ranks of one kind of worker, in this process or behind Ray.

    Methods are passed unbound, such as `PolicyWorker.train`, and called by name, so a worker of another class needs
    only a method of that name. A worker's error is raised in the caller; a worker that died raises `WorkerDiedError`.
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
        """Like `run_all`, but return at once a function that waits for the results; call it once or never."""
        ...

    def settle(self, timeout_s: float) -> bool:
        """Wait until no worker runs a failed or aborted call; return whether all can take further calls.

        False if a worker still runs one after `timeout_s`.
        """
        ...

    def pids(self) -> list[int]:
        """Return process ids by rank, each valid on its worker's host."""
        ...

    def local_pids(self) -> list[int]:
        """Return process ids of the workers on the driver's host."""
        ...

    def shutdown(self) -> None:
        """End every worker process; safe to call twice."""
        ...
