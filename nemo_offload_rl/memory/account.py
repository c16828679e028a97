"""Counts a run's memory by phase and owner, from its configuration and the files of its model alone.

It counts state, passes, engines, and memory that stays on a GPU when state leaves. It does not count the building of a
model, nor passes of a model whose files are not here or whose code does not run without data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from itertools import batched
from pathlib import Path
from typing import Any

import torch
import yaml

from nemo_offload_rl.backends.dtensor import torch_optim
from nemo_offload_rl.backends.dtensor.activation_offload import host_bytes_at_most
from nemo_offload_rl.backends.hf.model_folder import WEIGHT_PATTERNS, local_config, local_folder, local_model_config
from nemo_offload_rl.backends.hf.served_adapters import adapters_of, served_adapters
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.generation.vllm.fp8_loading import BLOCK, QUANTIZING_BYTES
from nemo_offload_rl.keys.engine import ServedAdapters
from nemo_offload_rl.keys.generation import VllmConfig
from nemo_offload_rl.keys.grpo import RolloutSectionConfig
from nemo_offload_rl.keys.master import (
    DistillationMasterConfig,
    DpoMasterConfig,
    GrpoMasterConfig,
    RolloutMasterConfig,
    RunConfig,
)
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.policy import PolicyConfig
from nemo_offload_rl.keys.section import replace_key
from nemo_offload_rl.keys.worker import PolicySettings, grpo_worker, supervised_worker, teacher_model
from nemo_offload_rl.memory.gpus import (
    DRIVER_REST_BYTES,
    DTENSOR_REST_BYTES,
    ENGINE_REST_BYTES,
    MEGATRON_REST_BYTES,
)
from nemo_offload_rl.memory.groups import Held, ModelElements, group_bytes, has_adapters, held_by_stage
from nemo_offload_rl.memory.host_plan import HostNeed, HostPlan, host_bytes_by_owner, host_need
from nemo_offload_rl.memory.limits import memory_total_bytes
from nemo_offload_rl.memory.machine import Machine
from nemo_offload_rl.memory.megatron_activations import offloaded_bytes_at_most
from nemo_offload_rl.memory.passes import PASSES, most_tokens, pass_needs
from nemo_offload_rl.memory.stages import Stage, held_rows, stages_of
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES, ExpectedBytes
from nemo_offload_rl.residency import (
    BASE,
    GRADS,
    GRADS_PART,
    OPTIMIZER,
    OPTIMIZER_PART,
    PARAMS,
    PARAMS_PART,
    PHASES,
    REFERENCE,
    TEACHER,
    TEACHER_LAYER,
    PassKind,
    PassNeed,
    Phase,
    Placement,
)
from nemo_offload_rl.residency.needs import RESERVE_BYTES
from nemo_offload_rl.residency.state.frozen_copy import EXCHANGE_BYTES
from nemo_offload_rl.utils.flops import ModelSizes, count_sizes, read_model_sizes

_GIB = 2**30
TOLERANCE = 0.04  # of a GPU, by which estimates of passes may be off (tests/unit/memory/test_passes.py)

# Groups that come and go inside phases: the group that each is a part of, and the phases that use it.
_WHOLE = {PARAMS_PART: PARAMS, GRADS_PART: GRADS, OPTIMIZER_PART: OPTIMIZER, TEACHER_LAYER: TEACHER}
_USED_IN = {
    PARAMS_PART: (Phase.TRAINING, Phase.OPTIM_STEP, Phase.LP_INFERENCE, Phase.REFIT),
    GRADS_PART: (Phase.TRAINING, Phase.OPTIM_STEP),
    OPTIMIZER_PART: (Phase.OPTIM_STEP,),
    TEACHER_LAYER: (Phase.TEACHER_INFERENCE,),
}
_NAMES = {**_WHOLE, BASE: "frozen params"}


@dataclass(frozen=True)
class PhaseUse:
    """Bytes that a GPU of policy workers holds in a phase.

    Attributes:
        phase: The phase.
        state: The policy's state by name, and the buffers of a refit; for groups that stream in parts, the embedding's
            part, and of a teacher's streamed layers two.
        engine_bytes: Memory of the engine.
        other_bytes: Contexts, communicators and captured graphs.
        pass_bytes: Most that a pass of the phase needs in addition to state; None if that is unknown.
        early_bytes: State of the next phase, and a reference in addition to the policy's parameters, that are there if
            this one has room.
        leaving_bytes: State of the phase before that is still copied to the host, and is there if this one has room.
        gpu_bytes: Memory of the GPU.
        limit_bytes: Limit of the policy's own process (`policy.gpu_memory_limit_gib`); None for the whole GPU.
    """

    phase: Phase
    state: Mapping[str, int]
    engine_bytes: int
    other_bytes: int
    pass_bytes: int | None
    early_bytes: int
    leaving_bytes: int
    gpu_bytes: int
    limit_bytes: int | None

    @property
    def state_bytes(self) -> int:
        """Bytes of all of the policy's state."""
        return sum(self.state.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all owners, without state that comes early or is leaving."""
        return self.state_bytes + (self.pass_bytes or 0) + self.engine_bytes + self.other_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes that the GPU and the limit leave; negative if memory is short. For passes, where they are unknown."""
        left_bytes = self.gpu_bytes - self.total_bytes
        if self.limit_bytes is None:
            return left_bytes
        return min(left_bytes, self.limit_bytes - self.state_bytes - (self.pass_bytes or 0))

    @property
    def peak_bytes(self) -> int:
        """Bytes of all owners at the peak: state of other phases is there as far as there is room, less a reserve."""
        return self.total_bytes + min(self.early_bytes + self.leaving_bytes, max(0, self.left_bytes - RESERVE_BYTES))

    @property
    def is_short(self) -> bool:
        """Tell whether memory is short, by more than passes may be wrongly estimated."""
        pass_bytes = self.pass_bytes or 0
        return self.left_bytes + pass_bytes < 0 or self.left_bytes < -min(pass_bytes, TOLERANCE * self.gpu_bytes)

    @property
    def exceeds_limit(self) -> bool:
        """Tell whether the policy's state and passes are above the limit."""
        own_bytes = self.state_bytes + (self.pass_bytes or 0)
        return self.limit_bytes is not None and own_bytes > self.limit_bytes


_NEEDED_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
_parsed = cache(yaml.safe_load)  # a search tries the same values again and again


class Account:
    """Memory that a run takes of a machine; empty if the size of its model is unknown.

    Args:
        cfg: The keys of a run that trains.
        machine: Machine of the workers.
        num_parameters: Parameters of the policy's model; None reads their number from its folder.
        without_weights: Models' folders may have a config.json alone.
        sizes_of: Reads the sizes of a model, by its name, if another account has done that; None for `model_sizes`.
    """

    def __init__(
        self,
        cfg: RunConfig,
        machine: Machine,
        num_parameters: int | None = None,
        *,
        without_weights: bool = False,
        sizes_of: Callable[[str], ModelSizes | None] | None = None,
    ) -> None:
        self.cfg = cfg
        self.machine = machine
        self._sizes_of = sizes_of or cache(partial(model_sizes, without_weights=without_weights))
        sizes = self._sizes_of(cfg.policy.model_name)
        if num_parameters is None:
            num_parameters = None if sizes is None else sizes.num_parameters
        self.num_parameters = num_parameters
        self.sizes = sizes if sizes is not None and sizes.num_parameters == num_parameters else None

    def with_keys(self, overrides: str) -> Account:
        """Account of the same models on the same machine after `KEY=VALUE ...`, whose keys must be in the sections."""
        cfg: Any = self.cfg
        for override in overrides.split():
            key, _, value = override.lstrip("+").partition("=")
            cfg = replace_key(cfg, key, _parsed(value))
        return Account(cfg, self.machine, self.num_parameters, sizes_of=self._sizes_of)

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of the smallest GPU; None if the policy uses no GPU or it is unknown."""
        return self.machine.gpu_bytes if self.cfg.cluster.gpus_per_node else None

    @cached_property
    def _elements(self) -> ModelElements:
        return ModelElements.of(self.num_parameters or 0, self.sizes, self.config, self.cfg.policy)

    @cached_property
    def config(self) -> Mapping[str, object]:
        """Contents of the model's config.json, with sizes that it leaves to the library; empty if it is unknown."""
        policy, config = self.cfg.policy, local_model_config(self.cfg)
        if config is None:
            return {}
        has_all = all(getattr(ModelShape.of(config), size) for size in _NEEDED_SIZES)
        return config if has_all else {**_default_config(policy.model_name, json.dumps(config)), **config}

    @cached_property
    def _stages_hold(self) -> tuple[Held, ...]:
        """Parameters that a worker of each pipeline stage holds."""
        return held_by_stage(self.cfg.policy, self.cfg.cluster.world_size, self._elements)

    @cached_property
    def _groups_by_stage(self) -> tuple[Mapping[str, int], ...]:
        """Bytes of the state groups of a worker of each pipeline stage."""
        policy, on_gpu = self.cfg.policy, self.cfg.cluster.gpus_per_node > 0
        return tuple(group_bytes(policy, held, self.config, on_gpu=on_gpu) for held in self._stages_hold)

    @cached_property
    def groups(self) -> Mapping[str, int]:
        """Bytes of the state groups of the worker that holds most; empty if the model is unknown."""
        if self.num_parameters is None:
            return {}
        return max(self._groups_by_stage, key=lambda groups: sum(groups.values()))

    # -- the host --------------------------------------------------------------------------------------------------

    @cached_property
    def need(self) -> HostNeed:
        """Mean host memory of a worker of the fullest host; loading and Megatron's activations are not counted."""
        return self._need_of(self._mean_groups())

    def _mean_groups(self) -> Mapping[str, int]:
        """Mean of the state groups of one host's workers, of the host whose workers hold most."""
        stages, cluster = self._groups_by_stage, self.cfg.cluster
        of_ranks = [stages[rank * len(stages) // cluster.world_size] for rank in range(cluster.world_size)]
        of_hosts = batched(of_ranks, cluster.workers_per_node)
        fullest = max(of_hosts, key=lambda ranks: sum(sum(groups.values()) for groups in ranks))
        return {name: sum(groups[name] for groups in fullest) // len(fullest) for name in fullest[0]}

    def _need_of(self, groups: Mapping[str, int]) -> HostNeed:
        cfg, settings = self.cfg, self.settings
        return host_need(
            settings,
            self._expected(settings, groups),
            on_cpu=not cfg.cluster.gpus_per_node,
            device_bytes=(self.machine.gpu_bytes or 0) if cfg.cluster.gpus_per_node else memory_total_bytes(),
            has_started=False,
            engine_weight_bytes=self.engine_weight_bytes,
        )

    @cached_property
    def plan(self) -> HostPlan:
        """The residency plan of the worker that holds most."""
        return self._need_of(self.groups).resolve()

    @cached_property
    def settings(self) -> PolicySettings:
        """Settings of a policy worker."""
        policy, (_, section) = self.cfg.policy, self.cfg.algorithm
        if isinstance(policy, PolicyConfig) and isinstance(section, RolloutSectionConfig):
            return grpo_worker(policy, section, sends_adapters=self._served_adapters is not None)
        return supervised_worker(policy, section.seed, rows_per_item=2 if isinstance(self.cfg, DpoMasterConfig) else 1)

    def _expected(self, settings: PolicySettings, groups: Mapping[str, int]) -> ExpectedBytes:
        backend = settings.backend
        sizes = {name: groups[name] for name in (BASE, PARAMS) if name in groups}
        if backend.streams_parameters:
            sizes = {PARAMS: 0, PARAMS_PART: groups[PARAMS], GRADS_PART: groups[GRADS]}
        sizes |= {name: groups[name] for name in (OPTIMIZER, OPTIMIZER_PART) if groups[name]}
        sizes |= self._teacher_groups
        on_megatron, activation_bytes = isinstance(backend, MegatronConfig), 0
        shape = self.shape
        if on_megatron:
            activation_bytes = offloaded_bytes_at_most(settings)
        elif shape.num_layers is not None and shape.hidden_size is not None:
            activation_bytes = host_bytes_at_most(settings, shape.num_layers, shape.hidden_size)
        reference_bytes = groups[PARAMS] if self.keeps_reference else 0
        read_bytes, fp32_bytes = COMPUTE_DTYPES[settings.precision].itemsize, COMPUTE_DTYPES["float32"].itemsize
        is_cast = not on_megatron and read_bytes < fp32_bytes
        return ExpectedBytes(
            state=sizes,
            loading=0,
            reference=reference_bytes * read_bytes // fp32_bytes if is_cast else reference_bytes,
            activations=activation_bytes,
            reference_is_cast=is_cast,
        )

    def short_bytes(self, margin_bytes: int) -> int:
        """Sum the bytes that a GPU lacks in each phase, the engine in its share, and a planned host.

        Args:
            margin_bytes: Bytes of a GPU that stay free in phases with passes.
        """
        need, budget_gib = self.need, self.cfg.policy.host_memory_budget_gib
        short = [(margin_bytes if use.pass_bytes else 0) - use.left_bytes for use in self.phases]
        short.append(self.engine_short_bytes)
        if self.machine.planned_host_bytes is not None:
            short.append(sum(self.host_owners.values()) - self.machine.planned_host_bytes)
        if budget_gib is not None:
            short.append(sum(need.state_parts().values()) - int(budget_gib * _GIB))
        return sum(max(0, num_bytes) for num_bytes in short)

    @cached_property
    def host_owners(self) -> Mapping[str, int]:
        """Main memory of all processes of a host, in bytes by owner."""
        return host_bytes_by_owner(self.need, "cuda", self.cfg.cluster.workers_per_node)

    @property
    def has_adapters(self) -> bool:
        """Tell whether adapters are trained and the model is frozen."""
        return has_adapters(self.cfg.policy)

    @property
    def keeps_reference(self) -> bool:
        """Tell whether workers keep a copy of the initial parameters."""
        if isinstance(self.cfg, GrpoMasterConfig):
            return self.cfg.loss_fn.reference_policy_kl_penalty != 0
        return isinstance(self.cfg, DpoMasterConfig) and not self.cfg.dpo.precompute_reference_logprobs

    @cached_property
    def teacher_sizes(self) -> ModelSizes | None:
        """Sizes of the teacher; None without a teacher or if they are unknown."""
        cfg = self.cfg
        return self._sizes_of(cfg.teacher.model_name) if isinstance(cfg, DistillationMasterConfig) else None

    @cached_property
    def teacher_bytes(self) -> int | None:
        """Bytes of one worker's part of the teacher; None without a teacher or if its size is unknown."""
        cfg, sizes, settings = self.cfg, self.teacher_sizes, self.teacher_settings
        if sizes is None or settings is None:
            return None
        config = local_config(settings.model_name, settings.hf_config_overrides) or {}
        elements = ModelElements.of(sizes.num_parameters, sizes, config, settings)
        held = max(held.total for held in held_by_stage(settings, cfg.cluster.world_size, elements))
        return COMPUTE_DTYPES[settings.precision].itemsize * held

    @cached_property
    def _teacher_groups(self) -> Mapping[str, int]:
        """Bytes of one worker's groups of the teacher; streamed layers are a group of their own if sizes are known."""
        cfg, num_bytes, sizes = self.cfg, self.teacher_bytes, self.teacher_sizes
        if not isinstance(cfg, DistillationMasterConfig) or sizes is None or not num_bytes:
            return {}
        config = local_config(cfg.teacher.model_name, cfg.teacher.hf_config_overrides) or {}
        shape = ModelShape.of(config)
        elements = (shape.vocab_size or 0) * (shape.hidden_size or 0)
        if not cfg.teacher.stream_layers or not elements:
            return {TEACHER: num_bytes}
        num_matrices = 1 if config.get("tie_word_embeddings") else 2
        rest_bytes = num_bytes * min(num_matrices * elements, sizes.num_parameters) // sizes.num_parameters
        return {TEACHER: rest_bytes, TEACHER_LAYER: num_bytes - rest_bytes}

    # -- the GPU ---------------------------------------------------------------------------------------------------

    @property
    def engine_weight_bytes(self) -> int:
        """Bytes of an engine's weights on each device of the policy; 0 without an engine there."""
        cfg = self.cfg
        if not isinstance(cfg, RolloutMasterConfig) or not cfg.policy.generation.colocated.enabled:
            return 0
        vllm = cfg.policy.generation.vllm_cfg
        num_bytes = (self.num_parameters or 0) * self.engine_parameter_bytes(vllm) / vllm.tensor_parallel_size
        if (served := self._served_adapters) is not None and (trained := adapters_of(cfg.policy)) is not None:
            # Each device counts whole: A is not divided.
            elements = self._elements.in_adapters * served.max_rank // trained.dim
            num_bytes += elements * COMPUTE_DTYPES[vllm.dtype].itemsize
        return int(num_bytes)

    @property
    def engine_short_bytes(self) -> int:
        """Bytes by which an engine's weights exceed its share of a GPU; 0 if they do not or nothing bounds them."""
        cfg, gpu_bytes, weight_bytes = self.cfg, self.gpu_bytes, self.engine_weight_bytes
        if gpu_bytes is None or not weight_bytes or not isinstance(cfg, RolloutMasterConfig):
            return 0
        vllm = cfg.policy.generation.vllm_cfg
        if vllm.kv_cache_memory_gib is not None:
            return 0
        return max(0, weight_bytes - int(vllm.gpu_memory_utilization * gpu_bytes))

    @cached_property
    def _served_adapters(self) -> ServedAdapters | None:
        """Adapters that engines apply."""
        found = served_adapters(self.cfg) if isinstance(self.cfg, RolloutMasterConfig) else None
        return found if isinstance(found, ServedAdapters) else None

    def engine_parameter_bytes(self, vllm: VllmConfig) -> float:
        """Mean bytes of a parameter in an engine.

        With 8-bit weights, embedding, output layer, and first and last layers that the keys name have 16 bits. Modules
        that are named by a part of their name count as if they had 8.
        """
        itemsize = COMPUTE_DTYPES[vllm.dtype].itemsize
        if not vllm.is_quantized or not self.num_parameters:
            return itemsize
        num_layers, num_kept = self.shape.num_layers or 1, vllm.num_first_layers_in_bf16 + vllm.num_last_layers_in_bf16
        in_layers = self.num_parameters - (1 if self._elements.is_tied else 2) * self._elements.in_embedding
        share = in_layers / self.num_parameters * max(0, num_layers - num_kept) / num_layers
        return share * (1 + 4 / BLOCK**2) + (1 - share) * itemsize

    def _engine_bytes(self, gpu_bytes: int) -> Mapping[Phase, int]:
        """Bytes of an engine that shares the policy's GPUs, by phase; empty without one."""
        cfg, weights_bytes = self.cfg, self.engine_weight_bytes
        if not isinstance(cfg, RolloutMasterConfig) or not weights_bytes:
            return {}
        vllm = cfg.policy.generation.vllm_cfg
        awake_bytes = int(vllm.gpu_memory_utilization * gpu_bytes)
        if vllm.kv_cache_memory_gib is not None:  # not bounded by the share
            awake_bytes = weights_bytes + int(vllm.kv_cache_memory_gib * _GIB)
        if not vllm.enable_sleep_mode:
            return dict.fromkeys(Phase, awake_bytes)
        quantizing_bytes = QUANTIZING_BYTES if vllm.is_quantized else 0
        return {Phase.REFIT: weights_bytes + quantizing_bytes, Phase.GENERATION: awake_bytes}

    def _rest_bytes(self, phase: Phase) -> int:
        """Bytes of contexts, communicators and captured graphs; an awake engine has them in its share."""
        cfg = self.cfg
        of_policy = MEGATRON_REST_BYTES if isinstance(cfg.policy.backend, MegatronConfig) else DTENSOR_REST_BYTES
        num_bytes = DRIVER_REST_BYTES + of_policy["several" if cfg.cluster.world_size > 1 else "one"]
        if not isinstance(cfg, RolloutMasterConfig) or phase is Phase.GENERATION:
            return num_bytes
        generation = cfg.policy.generation
        if not generation.engines_sleep:
            return num_bytes
        return num_bytes + ENGINE_REST_BYTES["several" if generation.vllm_cfg.tensor_parallel_size > 1 else "one"]

    @cached_property
    def phases(self) -> tuple[PhaseUse, ...]:
        """Use of a policy worker's GPU in each phase; empty if the GPU or the model is unknown."""
        gpu_bytes, limit_gib = self.gpu_bytes, self.cfg.policy.gpu_memory_limit_gib
        if gpu_bytes is None or not self.groups:
            return ()
        engine_bytes = self._engine_bytes(gpu_bytes)
        phases = [phase for phase in Phase if phase in self._held and (engine_bytes or not PHASES[phase].is_for_engine)]
        return tuple(
            PhaseUse(
                phase=phase,
                state=self._state_in(phase),
                engine_bytes=engine_bytes.get(phase, 0),
                other_bytes=self._rest_bytes(phase),
                pass_bytes=self._pass_bytes(phase),
                early_bytes=self._early_bytes(phase),
                leaving_bytes=self._leaving_bytes(phase),
                gpu_bytes=gpu_bytes,
                limit_bytes=None if limit_gib is None else int(limit_gib * _GIB),
            )
            for phase in phases
        )

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of a step, in order."""
        return stages_of(self.cfg, keeps_reference=self.keeps_reference)

    @cached_property
    def _held(self) -> Mapping[Phase, frozenset[str]]:
        """Rows of the plan whose groups are on the GPU from the start of each phase of the run."""
        stages = self.stages
        if isinstance(self.cfg, DpoMasterConfig) and Stage.REFERENCE not in stages:
            # With `precompute_reference_logprobs` the reference's passes run before the first step.
            stages = (Stage.REFERENCE, *stages)
        return held_rows(self.plan.plan, stages)

    @cached_property
    def pass_needs(self) -> Mapping[PassKind, PassNeed]:
        """Need of a GPU of each kind of pass that is known."""
        grads_bytes = 0 if self.has_adapters else self.groups[GRADS]
        return pass_needs(self.settings, self.cfg.cluster.world_size, grads_bytes, self.teacher_settings)

    @property
    def teacher_settings(self) -> PolicySettings | None:
        """Settings of the teacher in the form of a policy's; None without a teacher."""
        cfg = self.cfg
        return teacher_model(self.settings, cfg.teacher) if isinstance(cfg, DistillationMasterConfig) else None

    def _pass_bytes(self, phase: Phase) -> int | None:
        """Most bytes that a pass of the phase needs with the configuration's largest micro-batch; None if unknown."""
        if phase is Phase.OPTIM_STEP:
            return self._update_bytes
        if phase not in PASSES:
            return 0
        need = self.pass_needs.get(PASSES[phase])
        num_tokens = most_tokens(PASSES[phase], self.settings, self.teacher_settings)
        return None if need is None else need.num_bytes(num_tokens)

    @property
    def _update_bytes(self) -> int:
        """Temporary bytes of the optimizer's step on DTensor; a fused kernel has none.

        Without it Adam makes a tensor of each parameter's size, for all parameters together (`foreach`) or one after
        the other, then two. Other optimizers of torch make fewer.
        """
        optimizer, backend = self.cfg.policy.optimizer, self.cfg.policy.backend
        is_whole = not isinstance(backend, MegatronConfig) and not backend.streams_parameters and not self.has_adapters
        if optimizer is None or not is_whole or torch_optim.fuses(optimizer):
            return 0
        embedding_bytes = (
            COMPUTE_DTYPES["float32"].itemsize * self._elements.in_embedding // self.cfg.cluster.world_size
        )
        if backend.streams_in_parts or not optimizer.kwargs.get("foreach", "fused" not in optimizer.kwargs):
            return 2 * embedding_bytes
        return self.groups[PARAMS]

    @property
    def _refit_buffer_bytes(self) -> int:
        """Bytes of the two buffers that carry weights to the engine."""
        cfg = self.cfg
        if not isinstance(cfg, RolloutMasterConfig):
            return 0
        if not self.settings.sends_weights:
            return min(2 * int(cfg.policy.refit_buffer_size_gib * _GIB), 4 * self._elements.in_adapters)
        itemsize = COMPUTE_DTYPES[cfg.policy.generation.vllm_cfg.dtype].itemsize
        # A tensor that is larger than a buffer travels in one of its own size.
        largest_bytes = itemsize * (self.shape.vocab_size or 0) * (self.shape.hidden_size or 0)
        buffer_bytes = max(int(cfg.policy.refit_buffer_size_gib * _GIB), largest_bytes)
        return min(2 * buffer_bytes, itemsize * (self.num_parameters or 0))

    @property
    def rows_in_parts(self) -> frozenset[str]:
        """Rows of the plan whose groups are on the GPU part by part."""
        rows = {
            PARAMS_PART,
            GRADS_PART,
            TEACHER_LAYER,
            *([OPTIMIZER_PART] if self.cfg.policy.backend.streams_in_parts else []),
        }
        return frozenset(rows & self.plan.sizes.keys())

    def _state_in(self, phase: Phase) -> dict[str, int]:
        """Peak bytes of the policy's state in a phase, by name."""
        plan, in_parts, largest = self.plan, self.rows_in_parts, self._largest_part
        sizes = {GRADS: 0 if GRADS_PART in plan.sizes else self.groups[GRADS], **plan.sizes}
        state: dict[str, int] = {}
        for row in (row for row in plan.plan.table if row in sizes):
            name = _NAMES.get(row, row)
            if row in in_parts:
                size = largest[_WHOLE[row]] if phase in _USED_IN[row] else 0
            else:
                size = sizes[row] if row in self._held[phase] or phase in _USED_IN.get(row, ()) else 0
            state[name] = state.get(name, 0) + size
        if phase is Phase.REFIT and self.refits_read_host:
            state[_NAMES[BASE]] = self._largest_frozen_bytes
        if phase is Phase.LP_INFERENCE and REFERENCE in sizes and PARAMS_PART not in sizes:
            state[REFERENCE] = min(EXCHANGE_BYTES, sizes[PARAMS])
        return state | {"refit buffers": self._refit_buffer_bytes if phase is Phase.REFIT else 0}

    @property
    def refits_read_host(self) -> bool:
        """Tell whether refits read a frozen model on the host, one tensor after the other."""
        return BASE in self.plan.sizes and self.plan.plan.placement(BASE, Phase.REFIT) is Placement.HOST

    @property
    def _largest_frozen_bytes(self) -> int:
        """Bytes of one worker's part of the embedding of a frozen model."""
        return self.groups[BASE] * self._elements.in_embedding // max(1, self.num_parameters or 0)

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the model's layers, as far as its config.json has them."""
        return ModelShape.of(self.config)

    @property
    def ties_embeddings(self) -> bool:
        """Tell whether the model's output layer is its embedding."""
        return self._elements.is_tied

    @cached_property
    def _largest_part(self) -> dict[str, int]:
        """Bytes of one worker's groups that belong to the embedding, which streaming does not divide.

        Zeros if not everything streams, because the embedding may then be in the rest, and if the model's sizes are
        unknown. For a teacher, bytes of two layers: of the present one and the next.
        """
        teacher = self.teacher_sizes
        layers = {
            TEACHER: 0 if teacher is None else 2 * self._teacher_groups.get(TEACHER_LAYER, 0) // teacher.num_layers
        }
        groups, backend = self.groups, self.cfg.policy.backend
        if not self.num_parameters or backend.streamed_share < 1 or self.has_adapters:
            return dict.fromkeys((PARAMS, GRADS, OPTIMIZER), 0) | layers
        held = max(held.total for held in self._stages_hold)
        on_megatron = isinstance(backend, MegatronConfig)
        ranks = backend.model_parallel.tensor if on_megatron else self.cfg.cluster.world_size
        embedding = min(self._elements.in_embedding // ranks, held)
        whole = {**groups, OPTIMIZER: groups[OPTIMIZER] + groups[OPTIMIZER_PART]}
        return {name: whole[name] * embedding // held for name in (PARAMS, GRADS, OPTIMIZER)} | layers

    def _early_bytes(self, phase: Phase) -> int:
        """Bytes of state that may come before its use: a reference, groups of the next phase, the optimizer's parts."""
        if not self.cfg.policy.residency_overlap:
            return 0
        plan, sizes, spec = self.plan.plan, self.plan.sizes, PHASES[phase]
        names: set[str] = set()
        following = Phase.OPTIM_STEP if phase is Phase.TRAINING else spec.prefetches_for
        if following is not None:
            # Groups that this phase leaves on the host may come early. Parts come early only in passes before the step.
            names |= {
                name
                for name in sizes
                if name in plan.table
                and name not in self._held[phase]
                and plan.placement(name, phase) is Placement.UNCHANGED
                and plan.placement(name, following) is Placement.DEVICE
            }
            names |= {OPTIMIZER_PART} if phase is Phase.TRAINING else set()
        num_bytes = sum(sizes.get(name, 0) for name in names)
        if spec.prefetches_snapshots and REFERENCE in sizes and PARAMS_PART not in sizes:
            # It changes places with the parameters, in their type. A streamed one comes part by part.
            num_bytes += sizes[PARAMS]
        return num_bytes

    def _leaving_bytes(self, phase: Phase) -> int:
        """Bytes that the optimizer's step leaves on the GPU, and that are copied to the host during the refit.

        State that leaves as passes begin is gone long before their peak.
        """
        if phase is not Phase.REFIT or not self.cfg.policy.residency_overlap:
            return 0
        leaving = self._held[Phase.OPTIM_STEP] - self._held[phase]
        return sum(size for name, size in self.plan.sizes.items() if name in leaving)


@lru_cache(maxsize=8)
def _default_config(model_name: str, _contents: str) -> Mapping[str, object]:
    """Read all entries that `transformers` sees in a config.json of these contents; empty if it cannot."""
    if (folder := local_folder(model_name)) is None:
        return {}  # asks no hub
    from nemo_offload_rl.backends.hf.export import load_config

    try:
        return load_config(str(folder), {}).to_dict()
    except UserError:  # the check of the folder reports it
        return {}


def model_sizes(model_name: str, *, without_weights: bool = False) -> ModelSizes | None:
    """Read a model's sizes from a local folder, or from the hub's cache with its weights; None for any other.

    Args:
        model_name: The folder, or the hub's name.
        without_weights: A folder without weights tells the sizes by its config.json, for which the model is built
            without memory; None if `transformers` cannot do that.
    """
    folder = local_folder(model_name) or Path(model_name)
    sizes = read_model_sizes(str(folder))
    return _sizes_by_config(folder) if sizes is None and without_weights else sizes


def _sizes_by_config(folder: Path) -> ModelSizes | None:
    if not (folder / "config.json").is_file() or any(any(folder.glob(weights)) for weights in WEIGHT_PATTERNS):
        return None
    from transformers import AutoModelForCausalLM

    from nemo_offload_rl.backends.dtensor.loading import BUILD_ERRORS
    from nemo_offload_rl.backends.hf.export import load_config

    try:
        config = load_config(str(folder), {})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (UserError, *BUILD_ERRORS):  # the check of the folder reports them
        return None
    # A size may be in the file alone, or be a default of transformers that the file leaves out.
    contents = {**config.to_dict(), **(local_config(str(folder), {}) or {})}
    return count_sizes(contents, ((name, tensor.numel()) for name, tensor in model.named_parameters()))
