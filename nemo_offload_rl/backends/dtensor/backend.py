"""The DTensor backend: one rank's part of a Hugging Face model, its optimizer and its schedule.

Trained parameters, gradients and optimizer state are fp32; FSDP casts to `policy.precision` as it gathers a layer.
Between calls no parameter is gathered: gathered copies would be outdated after a load, and take memory while offloaded.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_offload_rl.backends.dtensor import checkpoint, optim, parallel, torch_optim
from nemo_offload_rl.backends.dtensor.activation_offload import (
    ActivationOffloading,
    host_bytes_at_most,
)
from nemo_offload_rl.backends.dtensor.built import BuiltModel
from nemo_offload_rl.backends.dtensor.layerwise import LayerwisePasses, ReaderOf
from nemo_offload_rl.backends.dtensor.rules import POLICY_RULES, one_worker_problem
from nemo_offload_rl.backends.dtensor.sizes import optimizer_row_bytes, part_row_bytes
from nemo_offload_rl.backends.dtensor.torch_optim import Schedule
from nemo_offload_rl.backends.hf.export import export_hf_folder
from nemo_offload_rl.backends.hf.model_folder import check_model_folder
from nemo_offload_rl.backends.hf.weight_files import HubNames
from nemo_offload_rl.backends.optimizer_parts import NamedTensors
from nemo_offload_rl.backends.ranks import Totals, join_process_group, max_over_ranks, sum_over_ranks
from nemo_offload_rl.backends.saving import dcp
from nemo_offload_rl.backends.scoring.readers import ReadScores, read_loss, reader_for
from nemo_offload_rl.data.batch import LossNorm, TokenBatch, TrainBatch
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.protocols.backend import (
    HostView,
    ProcessInfo,
    StepResult,
    WeightSpec,
    all_on_device,
    compute_dtype,
)
from nemo_offload_rl.protocols.loss import LossFn
from nemo_offload_rl.protocols.saving import StagedSave, StateReader
from nemo_offload_rl.protocols.scoring import TeacherHead
from nemo_offload_rl.residency import (
    BASE,
    GRADS_PART,
    OPTIMIZER_PART,
    PARAMS,
    PARAMS_PART,
    GradsGroup,
    PassingParts,
    StateGroup,
    aligned,
    local_tensor,
    optimizer_tensors,
    unique_storages,
)

logger = logging.getLogger(__name__)


class DTensorBackend:
    """The `PolicyBackend` on DTensor.

    Args:
        settings: The policy's settings.
        process: This rank. A process group is made here unless one exists, and destroyed if the constructor fails.
    """

    def __init__(self, settings: PolicySettings, process: ProcessInfo) -> None:
        problems = [one_worker_problem(settings, process.world_size), *(rule(settings) for rule in POLICY_RULES)]
        for problem in problems:
            if problem is not None:
                raise ConfigError(problem)
        check_model_folder(settings.model_name)
        self._settings = settings
        self.device = torch.device(process.device)
        self._compute_dtype = compute_dtype(settings.precision)
        self._teacher_head: TeacherHead | None = None
        with ExitStack() as made:
            join_process_group(process, made)
            self._build(process)
            self._made = made.pop_all()

    def _build(self, process: ProcessInfo) -> None:
        """Build everything that needs the process group."""
        settings, on_gpu = self._settings, self.device.type == "cuda"
        if settings.deterministic:
            # Without `warn_only`: torch's attention is deterministic only then.
            torch.use_deterministic_algorithms(True)
        self._built = BuiltModel(settings, process)
        self._hub_names = HubNames(self._built.config.model_type)
        self._parameters, self._lora = self._built.parameters, self._built.lora
        self.rank_info, self._dp_group = self._built.rank_info, self._built.dp_group
        self.vocab_size, self.vocab_shard = self._built.config.vocab_size, self._built.head.shard
        if settings.optimizer is None:
            raise ConfigError(torch_optim.NO_OPTIMIZER)
        self._activations: ActivationOffloading | None = None
        if (limit_bytes := self.activation_host_bytes()) > 0:
            self._activations = ActivationOffloading(limit_bytes, self.device)
            if not self._built.parts:
                self._activations.attach(self._built.layers)
        spec = torch_optim.optimizer_spec(settings.optimizer, on_gpu=on_gpu)
        groups = torch_optim.param_groups(settings.optimizer, self._named_trainable())
        self._optimizer = torch_optim.build_optimizer(settings.optimizer, groups, on_gpu=on_gpu)
        self._schedule = Schedule(settings.scheduler_phases, self._optimizer)
        self._parts = optim.divide(self._parameters, spec, settings.dtensor_cfg, self._built.parts)
        self._passing: PassingParts | None = None
        self._layerwise: LayerwisePasses | None = None

    def pass_groups(self) -> list[dist.ProcessGroup]:
        return self._built.pass_groups

    def _named_trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self._parameters if parameter.requires_grad]

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._named_trainable()]

    # -- state -----------------------------------------------------------------------------------------------------

    def state_groups(self) -> Sequence[StateGroup]:
        """Return `params` (buffers included), `grads`, `optimizer` and its streamed parts.

        With adapters, `params` has the adapters and `base` the model's own parameters and buffers. With `cpu_offload`,
        each part of the model has a group of parameters, one of gradients and one of states.
        """

        def frozen() -> Iterator[tuple[str, Tensor]]:
            yield from self._lora.base if self._lora is not None else ()
            yield from self._built.module.named_buffers()

        def params() -> Iterator[tuple[str, Tensor]]:
            yield from self._built.outside
            yield from frozen()

        if self._built.parts:
            named = [part.parameters for part in self._built.parts]
            weights = [
                StateGroup(PARAMS, params, prepare=self._built.reshard, read_dtype=self._compute_dtype),
                *(
                    StateGroup(f"{PARAMS_PART}.{i}", lambda mine=mine: mine, read_dtype=self._compute_dtype)
                    for i, mine in enumerate(named)
                ),
                *(GradsGroup(lambda mine=mine: mine, f"{GRADS_PART}.{i}") for i, mine in enumerate(named)),
            ]
        elif self._lora is None:
            weights = [self._built.group(PARAMS, params)]
        else:
            weights = [
                self._built.group(PARAMS, lambda: self._parameters),
                self._built.group(BASE, frozen),
            ]
        return (
            *weights,
            GradsGroup(lambda: self._built.outside if self._built.parts else self._parameters),
            *self._parts.groups(lambda some: optimizer_tensors(self._optimizer, lambda: some)),
        )

    def activation_host_bytes(self) -> int:
        """Return the host bytes for `policy.dtensor_cfg.activation_offload`; 0 without it."""
        return host_bytes_at_most(self._settings, len(self._built.layers), self._built.config.hidden_size)

    def expected_bytes(self) -> dict[str, int]:
        """Return host bytes of each row of the residency plan, optimizer states included."""
        sizes = {
            group.name: sum(aligned(record.storage.nbytes()) for record in unique_storages(group.tensors()).values())
            for group in self.state_groups()
            if group.name in (PARAMS, BASE)
        }
        if self._built.parts:
            sizes |= part_row_bytes([parameter for _, parameter in part.parameters] for part in self._built.parts)
        trained = [parameter for _, parameter in self._named_trainable()]
        elements = [local_tensor(parameter).numel() for parameter in trained]
        return {**sizes, **optimizer_row_bytes(self._settings, trained, elements, self.device)}

    def use_parts(self, passing: PassingParts) -> None:
        """See `PolicyBackend`; reads the parts' weights from the model's files."""
        for index, part in enumerate(self._built.parts):
            with passing.filled(index):
                self._built.read_part(part)
        self._passing = passing
        self._layerwise = LayerwisePasses(self._built, passing, self._activations)
        self._layerwise.check()

    # -- compute ---------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        micro_batches: Sequence[TrainBatch],
        loss_fn: LossFn,
        norm: LossNorm,
        before_micro_batch: Callable[[int], None],
    ) -> tuple[float, dict[str, float]]:
        self._built.module.train()
        totals = Totals(self.device)
        if self._layerwise is not None:
            reader_of = partial(reader_for, loss_fn, teacher_head=self._teacher_head)
            loss_of = partial(read_loss, loss_fn, norm=norm)
            for loss, metrics in self._layerwise.train(micro_batches, reader_of, loss_of, before_micro_batch):
                totals.add(loss, metrics)
            return totals.reduce(self._dp_group)
        for index, micro_batch in enumerate(micro_batches):
            before_micro_batch(index)
            batch, rows = self._built.on_device(micro_batch)
            reader = reader_for(loss_fn, batch, self._teacher_head)
            scores_BS = self._built.module(batch.input_ids, rows, reader)
            loss, metrics = read_loss(loss_fn, scores_BS, batch, norm)
            del batch, rows, reader, scores_BS  # a batch may have a teacher's hidden states
            loss.backward()
            totals.add(loss.detach(), metrics)
        return totals.reduce(self._dp_group)

    def evaluate(
        self, micro_batches: Sequence[TrainBatch], loss_fn: LossFn, norm: LossNorm
    ) -> tuple[float, dict[str, float]]:
        totals = Totals(self.device)
        reader_of = partial(reader_for, loss_fn, teacher_head=self._teacher_head)
        with self._built.reading():
            for scores_BS, batch in self._read(micro_batches, reader_of):
                totals.add(*read_loss(loss_fn, scores_BS, batch, norm))
        return totals.reduce(self._dp_group)

    def _read[Batch: TokenBatch](
        self, micro_batches: Sequence[Batch], reader_of: ReaderOf[Batch]
    ) -> Iterator[tuple[Any, Batch]]:
        """Yield for each micro-batch its reader's result, [B, S, ...], and the micro-batch on the device."""
        if self._layerwise is not None:
            yield from self._layerwise.read(micro_batches, reader_of)
            return
        for micro_batch in micro_batches:
            batch, rows = self._built.on_device(micro_batch)
            yield self._built.module(batch.input_ids, rows, reader_of(batch)), batch

    def use_teacher_head(self, head: TeacherHead) -> None:
        self._teacher_head = head

    def logprobs(self, micro_batches: Sequence[TokenBatch], *, whole: bool = False) -> list[Tensor]:
        reader = ReadScores(only_whole=whole)
        with self._built.reading():
            found = [scores_BS for scores_BS, _ in self._read(micro_batches, lambda _: reader)]
        return [scores_BS.logprobs.cpu() for scores_BS in found]  # at the end, since each copy waits for the device

    def drop_grads(self) -> None:
        """Drop gradients and gathered parameters."""
        if self._layerwise is None:
            self._built.drop_grads()
        else:
            self._layerwise.drop()

    def abandon_pass(self) -> None:
        self._built.abandon_pass()

    def gather_again(self) -> None:
        """Do nothing: gathered parameters were dropped, and each rank's own are whole."""

    def make_room(self) -> bool:
        """With `cpu_offload`, let fewer micro-batches pass through the parts together."""
        return self._layerwise is not None and self._layerwise.make_room()

    def optim_step(self, streamed: Iterable[str] = ()) -> StepResult:
        """Clip, update and drop the gradients; skip the update if their norm is not finite."""
        known = {} if self._layerwise is None else self._layerwise.norms
        norm = optim.global_grad_norm(self._trainable(), self._built.tp_rank, self.device, known)
        grad_norm = float(norm)  # equal on all ranks, so all decide the same
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        is_finite = math.isfinite(grad_norm)
        limit = self._settings.max_grad_norm
        factor = None if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)

        def clip(members: NamedTensors) -> None:
            if factor is not None:
                optim.scale_grads([parameter for _, parameter in members], factor)

        def drop(members: NamedTensors) -> None:
            for _, parameter in members:
                parameter.grad = None

        if is_finite:
            self._parts.step(self._optimizer, streamed, before_each=clip, after_each=drop)
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm, learning_rate, is_skipped=not is_finite)

    def advance_schedule(self) -> None:
        """Advance `policy.scheduler` by one step."""
        self._schedule.step()

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        return sum_over_ranks(values, self._dp_group, self.device)

    def all_reduce_max(self, value: int) -> int:
        return max_over_ranks(value, self._dp_group, self.device)

    # -- weights ---------------------------------------------------------------------------------------------------

    def clear_caches(self) -> None:
        """Do nothing: passes of this backend leave nothing on the device."""

    def weight_specs(self) -> list[WeightSpec]:
        """Return names and shapes of `named_weights`, with the types in which they are sent and exported."""
        shapes = [(name, tuple(param.shape)) for name, param in self._parameters]
        if self._lora is not None:
            shapes = self._lora.shapes()
        specs = [WeightSpec(self._hub_names.of(name), shape, self._compute_dtype) for name, shape in shapes]
        buffers = self._built.weight_buffers()
        return specs + [WeightSpec(self._hub_names.of(name), tuple(it.shape), it.dtype) for name, it in buffers]

    def named_weights(
        self, host_view: HostView = all_on_device, *, merges: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors one by one, parameters in the compute dtype, tied ones once; a collective over all ranks.

        Parameters that pass through the device (`cpu_offload`) are float32.
        """
        lora, dtype = self._lora, self._compute_dtype
        weights = self._own_weights() if lora is None else lora.full(dtype, host_view, merges=merges)
        buffers = ((name, parallel.brought(buffer, host_view)) for name, buffer in self._built.weight_buffers())
        for name, weight in chain(weights, buffers):
            yield self._hub_names.of(name), weight

    def named_adapters(self) -> Iterator[tuple[str, Tensor]]:
        assert self._lora is not None, "no adapters are trained"
        return self._lora.adapters().scaled()

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters; with `cpu_offload`, bring each part to the device while it is read."""
        dtype = self._compute_dtype
        part_of = {parameter: i for i, part in enumerate(self._built.parts) for _, parameter in part.parameters}
        for index, named in groupby(self._parameters, lambda it: part_of.get(it[1])):
            with nullcontext() if self._passing is None or index is None else self._passing.on_device(index):
                for name, parameter in named:
                    yield name, parallel.full_tensor(parameter, parameter.dtype if index is not None else dtype)

    def stage_save(self, folder: Path, reader: StateReader) -> StagedSave:
        return dcp.stage_save(folder, self._training_state(), reader)

    def load(self, path: Path, streamed: Iterable[str] = ()) -> None:
        self._built.reshard()
        dcp.load_state(path, self._training_state(), streamed)

    def _training_state(self) -> checkpoint.DTensorState:
        model_parts = {f"{OPTIMIZER_PART}.{i}": part.parameters for i, part in enumerate(self._built.parts)}
        return checkpoint.DTensorState(self._parameters, self._parts, self._optimizer, self._schedule, model_parts)

    def export_hf(self, path: Path) -> None:
        dtypes = {spec.name: spec.dtype for spec in self.weight_specs()}
        weights = ((name, weight.to(dtypes[name])) for name, weight in self.named_weights())
        adapters = None if self._lora is None else self._lora.adapters()
        export_hf_folder(path, weights, self._built.config, self._settings, adapters)

    def close(self) -> None:
        """Free the activations' host memory, and destroy the process group if this backend made it."""
        if self._activations is not None:
            self._activations.close()
        self._made.close()
