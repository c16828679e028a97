"""The protocol behind which a training backend stands. The phase verbs are not here: the worker has them, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import LossNorm, TokenBatch, TrainBatch
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.protocols.loss import LossFn
from nemo_offload_rl.protocols.saving import StagedSave, StateReader
from nemo_offload_rl.protocols.scoring import Reader, TeacherHead
from nemo_offload_rl.protocols.vocab import VocabShard
from nemo_offload_rl.residency import PassingParts, StateGroup

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype:
    """The type of `policy.precision`.

    Raises:
        ConfigError: There is none of that name.
    """
    if precision not in COMPUTE_DTYPES:
        raise ConfigError(f"policy.precision={precision} is unknown; use one of {', '.join(COMPUTE_DTYPES)}.")
    return COMPUTE_DTYPES[precision]


@dataclass(frozen=True)
class RankInfo:
    """Where this process stands. Ranks that share `dp_rank` get the same data."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """How this process joins the others.

    Attributes:
        rank: This process, 0..world_size-1; rank = dp_rank * tensor_parallel_size + tp_rank.
        world_size: All processes of the policy.
        init_method: What `torch.distributed.init_process_group` takes, e.g. "env://" where MASTER_ADDR and MASTER_PORT
            are set; unused where the process group exists already or `world_size` is 1.
        device: This rank's torch device, e.g. "cpu" or "cuda:0".
        workers_per_host: Processes of the policy on this rank's host.
        collective_timeout_s: Seconds that a rank waits for the others in a collective; None for no limit.
    """

    rank: int
    world_size: int
    init_method: str
    device: str
    workers_per_host: int = 1
    collective_timeout_s: float | None = None


@dataclass(frozen=True)
class ExpectedBytes:
    """What a rank will take of host memory, known before it has read a weight.

    Attributes:
        state: Bytes by row of the residency plan; empty where only the backend knows.
        loading: Bytes that loading takes beside the state, for as long as it lasts.
        reference: Bytes of a frozen copy of the parameters, if one is to be kept.
        activations: Bytes that offloaded activations take at most.
        reference_is_cast: The copy is in a narrower type than the parameters.
    """

    state: dict[str, int]
    loading: int
    reference: int
    activations: int = 0
    reference_is_cast: bool = False


@dataclass(frozen=True)
class StepResult:
    """One optimizer step.

    Attributes:
        grad_norm: Norm of all gradients before clipping.
        learning_rate: What the update was scheduled with.
        is_skipped: The norm was not finite, so parameters, optimizer states and the schedule are as they were.
        lowers_loss_scale: It was skipped because float16 gradients overflowed, and the next loss is scaled less.
    """

    grad_norm: float
    learning_rate: float
    is_skipped: bool = False
    lowers_loss_scale: bool = False


@dataclass(frozen=True)
class WeightSpec:
    """One tensor of the Hugging Face state dict, as a refit sends it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize


class PolicyBackend(Protocol):
    """Model and optimizer of one rank."""

    @property
    def rank_info(self) -> RankInfo:
        """Where this process stands."""
        ...

    @property
    def device(self) -> torch.device:
        """Where parameters are while they are not offloaded."""
        ...

    def state_groups(self) -> Sequence[StateGroup]:
        """Every byte that this rank keeps on the device between calls: `params`, `grads`, `optimizer`."""
        ...

    def expected_bytes(self) -> dict[str, int]:
        """Host bytes, alignment included, of each row of the plan whose groups may leave, optimizer states included.

        Optimizer states appear in the first step only; this says what they will take.
        """
        ...

    def activation_host_bytes(self) -> int:
        """Host bytes that activations can take at most, beside the state."""
        ...

    def forward_backward(
        self,
        micro_batches: Sequence[TrainBatch],
        loss_fn: LossFn,
        norm: LossNorm,
        before_micro_batch: Callable[[int], None],
    ) -> tuple[float, dict[str, float]]:
        """Accumulate gradients over all micro-batches; loss and metrics are reduced over data-parallel ranks.

        Args:
            micro_batches: Of one global batch; this rank's rows.
            loss_fn: See `LossFn`.
            norm: What the loss is divided by, of the global batch.
            before_micro_batch: Called with the index of each micro-batch in turn, once the one before it has been
                handed to the device: copies that are started there run beside its work.
        """
        ...

    def evaluate(
        self, micro_batches: Sequence[TrainBatch], loss_fn: LossFn, norm: LossNorm
    ) -> tuple[float, dict[str, float]]:
        """The loss and metrics of `forward_backward` without gradients, dropout off."""
        ...

    def use_parts(self, passing: PassingParts) -> None:
        """Have passes bring the groups `params/part.<i>` and `grads/part.<i>`, if `state_groups` has any; called once.

        Their parameters are filled here: they have no memory before.
        """
        ...

    def drop_grads(self) -> None:
        """Forget accumulated gradients, and what a pass that raised left behind."""
        ...

    def optim_step(self, streamed: Iterable[str] = ()) -> StepResult:
        """Clip, update and drop the gradients.

        If the norm of the gradients is not finite, every rank skips the update: gradients are dropped, nothing else
        changes, and nothing of `streamed` is asked for.

        Args:
            streamed: Yields the name of each `optimizer/part.<i>` group once its states are on the device, with
                parameters and gradients of the same part where these are groups.
        """
        ...

    def advance_schedule(self) -> None:
        """One tick of the schedule of the learning rate: after the updates of a step of the run."""
        ...

    def logprobs(self, micro_batches: Sequence[TokenBatch], *, whole: bool = False) -> list[Tensor]:
        """[B, S] float32 logprobs on the CPU for each micro-batch, without gradient, dropout off.

        Of the tokens that `is_scored` names; 0 elsewhere.

        Args:
            micro_batches: This rank's rows.
            whole: Over the whole vocabulary, whatever part of it tokens are drawn from.
        """
        ...

    @property
    def vocab_size(self) -> int:
        """Columns of the logits on all ranks."""
        ...

    @property
    def vocab_shard(self) -> VocabShard:
        """Which columns of the logits this rank computes."""
        ...

    def use_teacher_head(self, head: TeacherHead) -> None:
        """Have losses that compare with a teacher's hidden states read this output layer."""
        ...

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the data-parallel ranks."""
        ...

    def all_reduce_max(self, value: int) -> int:
        """The largest value over the data-parallel ranks."""
        ...

    def clear_caches(self) -> None:
        """A refit comes next: free what the last passes left behind on the device, where the settings ask for it."""
        ...

    def weight_specs(self) -> list[WeightSpec]:
        """What `named_weights` yields, in the same order; called with the parameters on the device, by every rank."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under the names of the family's checkpoints, one at a time; a collective over all ranks.

        Experts of a layer may be stacked (`generation/vllm/stacked_experts.py` has the form). A tensor may share memory
        with the parameter: copy it before the next optimizer step. It has the announced type, or is float32 still where
        a rounded copy beside it might not fit the device; whoever copies it rounds it.
        """
        ...

    def stage_save(self, folder: Path, reader: StateReader) -> StagedSave:
        """Begin to save model, optimizer, scheduler and RNG; every rank calls it.

        What must not change until it is written is fetched with `reader` here; nothing of the state is kept alive.

        Args:
            folder: Exists already, empty; not yet under its name.
            reader: Reads tensors wherever residency keeps them, and copies them for a save in the background.
        """
        ...

    def load(self, path: Path, streamed: Iterable[str] = ()) -> None:
        """Read what `stage_save` wrote, with parameters and the optimizer's group on the device; every rank calls it.

        Args:
            path: The folder.
            streamed: Yields the name of each `optimizer/part.<i>` group once its states are on the device.

        Raises:
            CheckpointError: `path` holds no checkpoint, a damaged one, or one of another model or optimizer.
        """
        ...

    def export_hf(self, path: Path) -> None:
        """Write a folder that `transformers` and vLLM load; every rank calls it, rank 0 writes."""
        ...

    def close(self) -> None:
        """Leave the process group, if this backend made it."""
        ...


class FrozenModel(Protocol):
    """A model of one rank that is only read: a teacher."""

    @property
    def rank_info(self) -> RankInfo:
        """Where this process stands, as this model is spread over the ranks."""
        ...

    @property
    def temperature(self) -> float:
        """What the output layer's logits are divided by."""
        ...

    @property
    def softcap(self) -> float | None:
        """What they are soft-capped at before."""
        ...

    def state_groups(self) -> Sequence[StateGroup]:
        """Every byte that it keeps on the device between calls: `teacher`."""
        ...

    def read(self, micro_batches: Sequence[TokenBatch], reader: Reader) -> list[Any]:
        """What a reader gives of each micro-batch, [B, S, ...] tensors on the CPU; 0 where nothing is scored."""
        ...

    def use_stream(self, streamed_layers: Callable[[], Iterator[str]]) -> None:
        """Have each pass ask this for its layers, where they are groups of their own (`teacher/layer.<index>`)."""
        ...

    def output_rows(self, first: int, count: int) -> Tensor:
        """[count, H] rows of the output layer in the compute type, a new tensor; a collective over all ranks."""
        ...

    def all_reduce_max(self, value: int) -> int:
        """The largest value over the data-parallel ranks."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...
