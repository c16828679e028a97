"""The protocol that a training backend implements. The worker implements the phase verbs, once for all backends."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_offload_rl.data.batch import LossNorm, TokenBatch, TrainBatch
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.protocols.loss import LossFn
from nemo_offload_rl.protocols.saving import StagedSave, StateReader
from nemo_offload_rl.protocols.scoring import Reader, TeacherHead
from nemo_offload_rl.protocols.vocab import VocabShard
from nemo_offload_rl.residency import PassingParts, StateGroup

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


type HostView = Callable[[Tensor], Tensor | None]
"""Returns the host copy of a tensor, None if it is on the device (`ResidencyManager.host_view`)."""


def all_on_device(_tensor: Tensor) -> None:
    """Return None: the `HostView` of state that is all on the device."""


def compute_dtype(precision: str) -> torch.dtype:
    """Return the torch type that `policy.precision` names.

    Raises:
        ConfigError: No type has that name.
    """
    if precision not in COMPUTE_DTYPES:
        raise ConfigError(f"policy.precision={precision} is unknown; use one of {', '.join(COMPUTE_DTYPES)}.")
    return COMPUTE_DTYPES[precision]


@dataclass(frozen=True)
class RankInfo:
    """This process's rank. Ranks that share `dp_rank` get the same data."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """Settings with which this process joins the others.

    Attributes:
        rank: Rank of this process, 0..world_size-1; rank = dp_rank * tensor_parallel_size + tp_rank.
        world_size: Number of processes of the policy.
        init_method: Argument of `torch.distributed.init_process_group`, e.g. "env://" if MASTER_ADDR and MASTER_PORT
            are set; unused if the process group exists already or `world_size` is 1.
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
    """Host memory that a rank will take, known before it reads a weight.

    Attributes:
        state: Bytes by row of the residency plan; empty where only the backend knows.
        loading: Bytes that loading takes in addition to the state, while it runs.
        reference: Bytes of a frozen copy of the parameters; 0 if none is kept.
        activations: Most bytes that offloaded activations take.
        reference_is_cast: The frozen copy has a narrower type than the parameters.
    """

    state: dict[str, int]
    loading: int
    reference: int
    activations: int = 0
    reference_is_cast: bool = False


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Attributes:
        grad_norm: Norm of all gradients before clipping.
        learning_rate: Scheduled rate of the update.
        is_skipped: The norm was not finite, so parameters, optimizer states and the schedule did not change.
        lowers_loss_scale: The step was skipped because float16 gradients overflowed; the next loss is scaled less.
    """

    grad_norm: float
    learning_rate: float
    is_skipped: bool = False
    lowers_loss_scale: bool = False


@dataclass(frozen=True)
class WeightSpec:
    """Name, shape and type of one tensor of the Hugging Face state dict that a refit sends."""

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
        """This process's rank."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the parameters while they are not offloaded."""
        ...

    def pass_groups(self) -> Sequence[dist.ProcessGroup]:
        """Return the process groups that every training pass communicates in; kinds in one order on all ranks."""
        ...

    def state_groups(self) -> Sequence[StateGroup]:
        """Return groups of all state that this rank keeps on the device: `params`, `grads`, `optimizer`."""
        ...

    def expected_bytes(self) -> dict[str, int]:
        """Return host bytes, alignment included, of each row of the residency plan whose groups may leave the device.

        Optimizer states are counted before the first step, which creates them.
        """
        ...

    def activation_host_bytes(self) -> int:
        """Return the most host bytes that activations can take, in addition to the state."""
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
            micro_batches: This rank's rows of one global batch.
            loss_fn: See `LossFn`.
            norm: Counts of the global batch, which divide the loss.
            before_micro_batch: Called with the index of each micro-batch in turn, once the previous one has been
                queued on the device: copies that it starts overlap with that one's work.
        """
        ...

    def evaluate(
        self, micro_batches: Sequence[TrainBatch], loss_fn: LossFn, norm: LossNorm
    ) -> tuple[float, dict[str, float]]:
        """Return the loss and metrics of `forward_backward` without gradients, dropout off."""
        ...

    def use_parts(self, passing: PassingParts) -> None:
        """Make passes bring the groups `params/part.<i>` and `grads/part.<i>`, if `state_groups` has any; called once.

        The parameters of these groups get their memory and values here.
        """
        ...

    def drop_grads(self) -> None:
        """Drop accumulated gradients; after a pass that broke off, call `abandon_pass` first."""
        ...

    def abandon_pass(self) -> None:
        """Drop what a pass that broke off left, except gradients: gathered parameters, collectives, states of passes.

        No collective. The collectives under way have ended, and their results mean nothing.
        """
        ...

    def gather_again(self) -> None:
        """Gather parameters that a collective of an abandoned pass may have overwritten; a collective of all ranks."""
        ...

    def make_room(self) -> bool:
        """Let later passes take less device memory after one ran out of it; return False if there is no way to."""
        ...

    def optim_step(self, streamed: Iterable[str] = ()) -> StepResult:
        """Clip, update and drop the gradients.

        If the norm of the gradients is not finite, every rank skips the update: gradients are dropped, nothing else
        changes, and `streamed` is not iterated.

        Args:
            streamed: Yields the name of each `optimizer/part.<i>` group once its states are on the device. Parameters
                and gradients of that part come with them if they are groups.
        """
        ...

    def advance_schedule(self) -> None:
        """Advance the learning rate's schedule by one, after all updates of a step of the run."""
        ...

    def logprobs(self, micro_batches: Sequence[TokenBatch], *, whole: bool = False) -> list[Tensor]:
        """Return [B, S] float32 logprobs on the CPU for each micro-batch, without gradient, dropout off.

        Tokens that `is_scored` leaves out get 0.

        Args:
            micro_batches: This rank's rows.
            whole: Normalize over the whole vocabulary, even if tokens are drawn from a part of it.
        """
        ...

    @property
    def vocab_size(self) -> int:
        """Number of the logits' columns, over all ranks."""
        ...

    @property
    def vocab_shard(self) -> VocabShard:
        """Columns of the logits that this rank computes."""
        ...

    def use_teacher_head(self, head: TeacherHead) -> None:
        """Set the output layer that losses apply to a teacher's hidden states."""
        ...

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over the data-parallel ranks."""
        ...

    def all_reduce_max(self, value: int) -> int:
        """Return the largest value over the data-parallel ranks."""
        ...

    def clear_caches(self) -> None:
        """Free what the last passes left on the device, if the settings ask for it; called before a refit."""
        ...

    def weight_specs(self) -> list[WeightSpec]:
        """Describe what `named_weights` yields, in order; every rank calls this with the parameters on the device."""
        ...

    def named_weights(
        self, host_view: HostView = all_on_device, *, merges: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under the names of the family's checkpoints, one at a time; a collective over all ranks.

        Adapters are merged into their weights; without `merges` they are left out. With `host_view`, a frozen model
        under adapters may be on the host; DTensor then copies one tensor at a time.
        Experts of a layer may be stacked (`generation/vllm/stacked_experts.py` has the form). A tensor may share memory
        with the parameter: copy it before the next optimizer step. It has the announced type, or float32 if a rounded
        copy might not fit the device; the receiver then rounds it while copying.
        """
        ...

    def named_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters that are trained, in float32; a collective over all ranks.

        `LAYER.lora_A.weight` is [rank, in], and `LAYER.lora_B.weight`, times alpha / dim, [out, rank]. LAYER is the
        layer's name in the family's checkpoints.
        """
        ...

    def stage_save(self, folder: Path, reader: StateReader) -> StagedSave:
        """Begin to save model, optimizer, scheduler and RNG; every rank calls it.

        Fetches with `reader` everything that will be written, and keeps no tensor of the state alive.

        Args:
            folder: Existing empty folder, under a temporary name.
            reader: Reads tensors wherever residency keeps them, and copies them for a save in the background.
        """
        ...

    def load(self, path: Path, streamed: Iterable[str] = ()) -> None:
        """Read what `stage_save` wrote; every rank calls it with parameters and the optimizer's group on the device.

        Args:
            path: Folder of the checkpoint.
            streamed: Yields the name of each `optimizer/part.<i>` group once its states are on the device.

        Raises:
            CheckpointError: `path` holds no checkpoint, a damaged one, or one of another model or optimizer.
        """
        ...

    def export_hf(self, path: Path) -> None:
        """Write a folder that `transformers` and vLLM can load; every rank calls it, rank 0 writes.

        With low-rank adapters, their weights are merged, and the folder `adapter` in it has them alone, for `peft`.
        """
        ...

    def close(self) -> None:
        """Leave the process group, if this backend made it."""
        ...


class FrozenModel(Protocol):
    """A teacher: one rank's part of a model that is never trained."""

    @property
    def rank_info(self) -> RankInfo:
        """This process's rank, with the data-parallel ranks of this model."""
        ...

    @property
    def temperature(self) -> float:
        """Divisor of the output layer's logits."""
        ...

    @property
    def softcap(self) -> float | None:
        """Soft cap of the logits, applied before the temperature; None for no cap."""
        ...

    def state_groups(self) -> Sequence[StateGroup]:
        """Return groups of all state that it keeps on the device: `teacher`."""
        ...

    def read(self, micro_batches: Sequence[TokenBatch], reader: Reader) -> list[Any]:
        """Return the reader's results by micro-batch: [B, S, ...] tensors on the CPU, 0 where nothing is scored."""
        ...

    def abandon_pass(self) -> None:
        """Drop what a pass that broke off left; see `PolicyBackend.abandon_pass`."""
        ...

    def use_stream(self, streamed_layers: Callable[[], Iterator[str]]) -> None:
        """Make each pass bring its layers with this, if each layer is a group (`teacher/layer.<index>`)."""
        ...

    def output_rows(self, first: int, count: int) -> Tensor:
        """Return [count, H] rows of the output layer in the compute type, a new tensor; a collective over all ranks."""
        ...

    def all_reduce_max(self, value: int) -> int:
        """Return the largest value over the data-parallel ranks."""
        ...

    def close(self) -> None:
        """Free the model's memory."""
        ...
