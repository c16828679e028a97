"""The Megatron backend: one rank's part of a Megatron-core model, its optimizer and its schedule.

Parameters have the type of `policy.precision`; with bfloat16 the optimizer holds fp32 masters. Megatron's flat buffers
hold the gradients of the global batch from `forward_backward` to `optim_step`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerLayer
from torch import Tensor

from nemo_offload_rl.backends.hf.export import export_hf_folder
from nemo_offload_rl.backends.hf.model_folder import check_model_folder
from nemo_offload_rl.backends.megatron import expert_weights, optim, parallel, state
from nemo_offload_rl.backends.megatron.activation_offload import (
    ActivationOffloading,
    check_modules,
    check_transformer_engine,
    host_bytes_at_most,
)
from nemo_offload_rl.backends.megatron.checkpoint import MegatronState
from nemo_offload_rl.backends.megatron.folder_match import check_shapes
from nemo_offload_rl.backends.megatron.lora import exported_adapters
from nemo_offload_rl.backends.megatron.model import build_model
from nemo_offload_rl.backends.megatron.optimizer_spec import optimizer_spec
from nemo_offload_rl.backends.megatron.passes import Passes, keep_scores, losses_of, on_cpu
from nemo_offload_rl.backends.megatron.streaming import StreamedStates
from nemo_offload_rl.backends.megatron.upstream import caches
from nemo_offload_rl.backends.megatron.upstream.caches import keeps_scales
from nemo_offload_rl.backends.ranks import Totals, join_process_group, max_over_ranks, sum_over_ranks
from nemo_offload_rl.backends.saving import dcp
from nemo_offload_rl.backends.scoring.readers import ReadScores
from nemo_offload_rl.data.batch import LossNorm, TokenBatch, TrainBatch
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.protocols.backend import HostView, ProcessInfo, StepResult, WeightSpec, all_on_device
from nemo_offload_rl.protocols.loss import LossFn
from nemo_offload_rl.protocols.saving import StagedSave, StateReader
from nemo_offload_rl.protocols.scoring import TeacherHead
from nemo_offload_rl.residency import OPTIMIZER, OPTIMIZER_PART, PassingParts, StateGroup, unique_storages

logger = logging.getLogger(__name__)


class MegatronBackend:
    """See `PolicyBackend`.

    Args:
        settings: The policy's settings.
        cfg: `settings.backend`.
        process: This rank. The constructor joins or creates the process group and Megatron's groups. If it fails, it
            destroys the groups that it created.
    """

    def __init__(self, settings: PolicySettings, cfg: MegatronConfig, process: ProcessInfo) -> None:
        check_model_folder(settings.model_name)
        self._settings = settings
        self._cfg = cfg
        self.device = torch.device(process.device)
        if cfg.fine_grained_activation_offloading:
            check_transformer_engine()
        with ExitStack() as made:
            join_process_group(process, made)
            if parallel.join_model_parallel(cfg, cfg.model_parallel, process.world_size):
                made.callback(parallel.leave_model_parallel)
            self._build(process)
            self._made = made.pop_all()

    def _build(self, process: ProcessInfo) -> None:
        """Build everything that needs the process groups."""
        settings, cfg = self._settings, self._cfg
        self.rank_info = parallel.rank_info(process)
        parallel.seed_everything(settings.seed)
        self._model = build_model(settings, cfg)
        self._chunks = self._model.chunks
        self._optimizer = optim.build_optimizer(settings, cfg.optimizer, self._chunks)
        self._scheduler = optim.build_scheduler(cfg.scheduler, cfg.optimizer, self._optimizer)
        spec = optimizer_spec(cfg.optimizer)
        sizes = state.state_bytes(self._chunks, self._optimizer, spec)
        self._streamed = StreamedStates(self._optimizer, cfg.optimizer, spec, sizes)
        self._model.config.grad_scale_func = self._optimizer.scale_loss
        num_layers = sum(isinstance(module, TransformerLayer) for chunk in self._chunks for module in chunk.modules())
        self._most_activation_bytes = host_bytes_at_most(self._model.config, num_layers, settings, cfg)
        self._activations = ActivationOffloading([self._model.config], self._most_activation_bytes, self.device)
        if self._activations.is_enabled:
            check_modules(self._chunks, cfg.offload_modules or ())
        self._weight_specs: list[WeightSpec] | None = None
        self._conversions: expert_weights.Conversions | None = None
        self._passes = Passes(self._model, settings, cfg, self._activations, self.device)
        self.vocab_size, self.vocab_shard = self._model.hf_config.vocab_size, self._passes.shard
        check_shapes(self._model.folder, self.weight_specs(), self._model.hf_config.model_type)

    def pass_groups(self) -> list[dist.ProcessGroup]:
        return parallel.pass_groups()

    # -- state -----------------------------------------------------------------------------------------------------

    def state_groups(self) -> Sequence[StateGroup]:
        """Return `params` (buffers included), `grads`, `optimizer` and its streamed parts.

        With adapters, `params` holds the adapters, and `base` the model's own parameters and the buffers.
        """
        return (
            *state.weight_groups(self._chunks, has_adapters=self._cfg.peft.enabled),
            state.MegatronGrads(self._chunks),
            *self._streamed.groups(),
        )

    def activation_host_bytes(self) -> int:
        """Return the largest size of the host buffers for offloaded activations."""
        return self._most_activation_bytes if self._activations.is_enabled else 0

    def expected_bytes(self) -> dict[str, int]:
        """Return the sizes of the state groups that may be on the host."""
        sizes = state.weight_bytes(self._chunks, has_adapters=self._cfg.peft.enabled)
        sizes[OPTIMIZER] = self._streamed.rest_bytes
        if self._streamed.streamed_bytes:
            sizes[OPTIMIZER_PART] = self._streamed.streamed_bytes
        return sizes

    # -- compute ---------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        micro_batches: Sequence[TrainBatch],
        loss_fn: LossFn,
        norm: LossNorm,
        before_micro_batch: Callable[[int], None],
    ) -> tuple[float, dict[str, float]]:
        consume, reader_of = losses_of(loss_fn, norm), self._passes.reader_of(loss_fn)
        with self._passes.training(micro_batches):
            schedule = self._passes.schedule(micro_batches, consume, reader_of, before_micro_batch, forward_only=False)
            found = get_forward_backward_func()(**schedule)
        return self._reduce(found)

    def evaluate(
        self, micro_batches: Sequence[TrainBatch], loss_fn: LossFn, norm: LossNorm
    ) -> tuple[float, dict[str, float]]:
        consume, reader_of = losses_of(loss_fn, norm), self._passes.reader_of(loss_fn)
        with self._passes.reading():
            schedule = self._passes.schedule(micro_batches, consume, reader_of, forward_only=True)
            found = get_forward_backward_func()(**schedule)
        return self._reduce(found)

    def _reduce(self, results: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> tuple[float, dict[str, float]]:
        reduced = None
        if parallel.is_last_stage():
            totals = Totals(self.device)
            for loss, metrics in results:
                totals.add(loss, metrics)
            reduced = totals.reduce(parallel.data_parallel_group())
        found = parallel.from_last_stage(reduced, self.device)
        assert found is not None
        return found

    def logprobs(self, micro_batches: Sequence[TokenBatch], *, whole: bool = False) -> list[Tensor]:
        reader = ReadScores(only_whole=whole)
        with self._passes.reading():
            schedule = self._passes.schedule(micro_batches, keep_scores, lambda _: reader, forward_only=True)
            found = get_forward_backward_func()(**schedule)
        return [scores_BS[0] for scores_BS in parallel.from_last_stage(on_cpu(found), self.device)]

    def use_teacher_head(self, head: TeacherHead) -> None:
        self._passes.teacher_head = head

    def use_parts(self, passing: PassingParts) -> None:
        """Do nothing; never called, since parameters lie in a few buffers that span all layers."""

    def drop_grads(self) -> None:
        """Zero the gradient buffers and drop the experts' counts."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._model.biases.forget()

    def abandon_pass(self) -> None:
        parallel.forget_collectives(self._chunks)
        caches.forget_failed_pass(self._chunks)
        self._model.biases.forget()

    def gather_again(self) -> None:
        """See `PolicyBackend`; also after each update, since the next call may offload, send or save parameters."""
        if self._cfg.distributed_data_parallel_config.overlap_param_gather:
            with torch.no_grad():
                for chunk in self._chunks:
                    chunk.start_param_sync(force_sync=True)

    def make_room(self) -> bool:
        """Return False: passes of this backend keep nothing that they could do without."""
        return False

    def optim_step(self, streamed: Iterable[str] = ()) -> StepResult:
        """Clip the gradients, update the parameters and zero the gradients; no update if the norm is not finite."""
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        with self._streamed.streaming(iter(streamed)):
            is_updated, _, _ = self._optimizer.step()
        if is_updated:
            self._model.biases.update()
        self.drop_grads()
        self.gather_again()
        if self._cfg.empty_unused_memory_level >= 1 and self.device.type == "cuda":
            torch.cuda.empty_cache()
        return StepResult(
            self._optimizer.grad_norm,
            learning_rate,
            is_skipped=not is_updated,
            lowers_loss_scale=self._optimizer.lowers_loss_scale,
        )

    def advance_schedule(self) -> None:
        """Advance `policy.megatron_cfg.scheduler` by one step."""
        self._scheduler.step(1)

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        return sum_over_ranks(values, parallel.data_parallel_group(), self.device)

    def all_reduce_max(self, value: int) -> int:
        return max_over_ranks(value, parallel.data_parallel_group(), self.device)

    # -- weights ---------------------------------------------------------------------------------------------------

    def clear_caches(self) -> None:
        if self._cfg.clear_memory_caches_before_refit:
            caches.clear_memory_caches(self._chunks)
        if self._cfg.fp8_cfg.force_clear_fp8_caches:
            caches.clear_fp8_caches(self._chunks)

    def weight_specs(self) -> list[WeightSpec]:
        """Return the specs of `named_weights`; the first call runs it, since only the conversion knows the shapes."""
        if self._weight_specs is None:
            self._weight_specs = [WeightSpec(name, tuple(t.shape), t.dtype) for name, t in self.named_weights()]
        return self._weight_specs

    def named_weights(
        self, host_view: HostView = all_on_device, *, merges: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors, tied ones once and a layer's experts stacked; a collective over all ranks.

        The bridge reads the device alone, so `host_view` is not used.
        """
        chunks = list(self._chunks)
        # Maps parameters to exported tensors. Making it anew in each refit takes as long as the rest of the export.
        if self._conversions is None:
            self._conversions = expert_weights.Conversions(self._model.bridge.get_conversion_tasks(chunks))
        merges = merges and self._cfg.peft.enabled  # False saves the bridge a search through all parameters

        def export(tasks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._model.bridge.export_hf_weights(
                chunks, cpu=False, show_progress=False, conversion_tasks=tasks, merge_adapter_weights=merges
            ):
                yield name.replace(".base_layer.", "."), tensor.detach()

        num_experts = self._model.config.num_moe_experts or 0
        yield from expert_weights.exported(chunks, self._conversions, num_experts, export)

    def named_adapters(self) -> Iterator[tuple[str, Tensor]]:
        return exported_adapters(self._model.bridge, list(self._chunks), self._cfg.peft).scaled()

    def stage_save(self, folder: Path, reader: StateReader) -> StagedSave:
        return dcp.stage_save(folder, self._training_state(), reader)

    def load(self, path: Path, streamed: Iterable[str] = ()) -> None:
        training_state = self._training_state()
        training_state.check_layout(path)
        dcp.load_state(path, training_state, streamed)

    def _training_state(self) -> MegatronState:
        return MegatronState(
            self._model,
            self._optimizer,
            self._streamed,
            self._scheduler,
            self.device,
            with_frozen=not self._cfg.peft.enabled,
            with_scales=keeps_scales(self._cfg.fp8_cfg),
        )

    def export_hf(self, path: Path) -> None:
        peft = self._cfg.peft
        adapters = exported_adapters(self._model.bridge, list(self._chunks), peft) if peft.enabled else None
        export_hf_folder(path, self.named_weights(), self._model.hf_config, self._settings, adapters)

    def _release_device_memory(self) -> None:
        """Free the state's GPU memory even where references to its tensors remain: Megatron's hooks form cycles."""
        if self.device.type != "cuda":
            return
        torch.cuda.synchronize(self.device)
        for group in self.state_groups():
            for record in unique_storages(group.tensors()).values():
                if record.storage.device.type == "cuda":
                    record.storage.resize_(0)
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Release memory, and leave the process groups if this backend created them."""
        self._activations.close()
        caches.clear_memory_caches(self._chunks)
        caches.clear_fp8_caches(self._chunks)
        self._release_device_memory()
        # Breaks a reference cycle that Python's collector cannot follow: the optimizer holds slices of the parameters,
        # and hooks of their autograd nodes refer to the model.
        self._model.config.grad_scale_func = None
        self._conversions = None
        self._made.close()
