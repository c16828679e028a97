"""A Hugging Face model with its weights, sharded over the ranks of a mesh."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nemo_offload_rl.backends.dtensor import parallel
from nemo_offload_rl.backends.dtensor.attention import choose_attention, share_rows
from nemo_offload_rl.backends.dtensor.experts import divide_experts
from nemo_offload_rl.backends.dtensor.loading import (
    WeightSources,
    build_causal_lm,
    find_weights,
    materialize,
    read_weights,
    take_sample,
    weight_buffers,
)
from nemo_offload_rl.backends.dtensor.lora import LoraWeights, add_adapters, name_without_adapters
from nemo_offload_rl.backends.dtensor.model import (
    LogprobModel,
    ModelRows,
    can_be_compiled,
    compile_layers,
    decoder_layers,
    packed_rows,
    padded_rows,
    shared_rows,
)
from nemo_offload_rl.backends.dtensor.replayed_experts import ReplayedExperts
from nemo_offload_rl.backends.dtensor.state_mixers import choose_kernels
from nemo_offload_rl.backends.dtensor.tensor_parallel import apply_tensor_parallel
from nemo_offload_rl.backends.hf.export import load_config
from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.models.families import logits_divisor, logits_softcap
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES, ProcessInfo, RankInfo
from nemo_offload_rl.protocols.scoring import Head
from nemo_offload_rl.protocols.vocab import VocabShard
from nemo_offload_rl.residency import StateGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A part of the model that is on the device as a whole or not at all: a layer, the embedding, the output layer.

    Attributes:
        unit: The FSDP unit.
        parameters: Parameters of the unit, by Hugging Face name.
    """

    unit: nn.Module
    parameters: list[tuple[str, nn.Parameter]]


class BuiltModel:
    """The model of one rank; built on all ranks together, once the process group exists.

    Args:
        settings: Settings of the policy, or of a teacher in the form of a policy's.
        process: This rank.
        is_frozen: The model is not trained: parameters have the compute type and no gradient.
        is_sample: Build a small sample of the model without weights, whose layers compile to the same code; see
            `take_sample`. For one rank.

    Attributes:
        config: The Hugging Face config, overrides included.
        dp_group: Ranks with different data.
        pass_groups: See `PolicyBackend.pass_groups`.
        tp_rank: This rank's tensor-parallel rank.
        rank_info: This process's rank and data-parallel rank.
        compute_dtype: Type in which passes compute.
        head: Settings for reading logits, with this rank's vocabulary columns.
        module: The module that FSDP wraps.
        fsdp_root: The wrapped module, as FSDP's root unit.
        layers: The decoder layers, in order.
        parts: Parts that pass through the device one by one; none without `cpu_offload`. Their weights are read later,
            by `read_part`.
        outside: Parameters outside of all parts, by name.
        gather: Begins to gather a layer's parameters on the current stream; None if nothing is gathered.
        parameters: All parameters by Hugging Face name; with adapters, the adapters' only.
        lora: The adapters; None without.
    """

    def __init__(
        self, settings: PolicySettings, process: ProcessInfo, *, is_frozen: bool = False, is_sample: bool = False
    ) -> None:
        tp_size, lora_cfg = settings.dtensor_cfg.tensor_parallel_size, settings.dtensor_cfg.lora_cfg
        ep_size = settings.dtensor_cfg.expert_parallel_size
        self.config = load_config(settings.model_name, settings.hf_config_overrides)
        splits_sequence = settings.dtensor_cfg.sequence_parallel and tp_size > 1
        longest, num_workers = settings.max_total_sequence_length, process.world_size
        parallel.check_model(self.config, settings.dtensor_cfg, longest, num_workers)
        self._device = torch.device(process.device)
        self.compute_dtype = COMPUTE_DTYPES[settings.precision]
        self._packs = settings.sequence_packing.enabled
        self._multiple = tp_size if splits_sequence else 1
        cp_size = settings.dtensor_cfg.context_parallel_size
        meshes = parallel.build_meshes(self._device, process.world_size, tp_size, ep_size, cp_size)
        dp_mesh, tp_mesh, self._cp_mesh = meshes.dp, meshes.tp, meshes.cp
        self.dp_group, self.tp_rank = dp_mesh.get_group(), tp_mesh.get_local_rank()
        self.pass_groups = meshes.groups()
        self.rank_info = RankInfo(process.rank, process.world_size, dp_mesh.get_local_rank(), dp_mesh.size())
        if not is_frozen:
            torch.manual_seed(settings.seed + meshes.fsdp.get_local_rank())

        on_gpu, compute_dtype = self._device.type == "cuda", self.compute_dtype
        attention = choose_attention(
            self.config,
            self._device,
            compute_dtype,
            longest=settings.max_total_sequence_length,
            packs=self._packs,
            shares_rows=cp_size > 1,
        )
        causal_lm = build_causal_lm(self.config, attention, dropout=settings.dropout)
        advice = choose_kernels(causal_lm) if on_gpu else None
        if advice is not None and process.rank == 0 and not is_sample:
            logger.warning(advice)
        sources = find_weights(causal_lm, settings.model_name)
        if is_sample:
            take_sample(causal_lm, first_differs=lora_cfg.enabled)
        if is_frozen:
            freeze(causal_lm, compute_dtype)
        if settings.dtensor_cfg.activation_checkpointing and not is_frozen:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if not lora_cfg.enabled:
                # Embeddings are trained. Its hook would require gradients in passes without any too, so that the first
                # layer is compiled by itself.
                causal_lm.disable_input_require_grads()
        if lora_cfg.enabled:
            add_adapters(causal_lm, lora_cfg, settings.seed)
            keep_as_stored(causal_lm, compute_dtype, sources)
        layers, shard = decoder_layers(causal_lm), VocabShard(0, None)
        if tp_size > 1:
            apply_tensor_parallel(causal_lm, layers, tp_mesh, splits_sequence=splits_sequence)
            shard = VocabShard(self.tp_rank * self.config.vocab_size // tp_size, tp_mesh.get_group())
        if meshes.cp is not None:
            share_rows(layers, meshes.cp.get_group())
        if meshes.ep is not None:
            divide_experts(causal_lm, meshes.ep)
        contents = self.config.to_dict()
        temperature = settings.logprob_temperature * logits_divisor(contents)
        softcap, kept = logits_softcap(contents), settings.logprob_filter
        self.head = Head(temperature, settings.logprob_chunk_size, shard, softcap, kept)
        replayed = None
        if settings.router_replay.enabled and not is_frozen:
            replayed = ReplayedExperts(layers, self.config)
        context_group = None if meshes.cp is None else meshes.cp.get_group()
        self.module = LogprobModel(causal_lm, self.head, context_group, replayed)
        if settings.dtensor_cfg.torch_compile and on_gpu and can_be_compiled(causal_lm):
            compile_layers(layers)
        self.layers = list(layers)
        # A single rank gathers nothing: FSDP reads a layer's parameters on the current stream.
        self.gather = parallel.gather if meshes.fsdp.size() > 1 else None
        units: list[list[nn.Module]] = []
        if settings.dtensor_cfg.cpu_offload and not is_frozen:
            is_tied = causal_lm.get_output_embeddings().weight is causal_lm.get_input_embeddings().weight
            embedding, scorer = causal_lm.get_input_embeddings(), self.module.scorer
            units = [[embedding, scorer]] if is_tied else [[embedding], [scorer]]
        self.fsdp_root = parallel.apply_fsdp(self.module, layers, meshes, compute_dtype, units, is_empty=is_sample)
        if settings.dtensor_cfg.activation_checkpointing and not is_frozen:
            for layer in layers:
                parallel.prepare_when_computed_again(layer, compute_dtype)
        outer = [modules[0] for modules in units]
        in_order = [*outer[:1], *self.layers, *outer[1:]] if units else []
        empty = [self.module] if is_sample else in_order
        materialize(self.module, self._device, empty={it for unit in empty for it in unit.parameters()})
        self.parameters = self.module.hf_parameters()
        part_of = {parameter: unit for unit in in_order for parameter in unit.parameters()}
        self.parts = [Part(unit, [it for it in self.parameters if part_of.get(it[1]) is unit]) for unit in in_order]
        self.outside = [it for it in self.parameters if it[1] not in part_of]
        self.lora = LoraWeights(self.parameters, lora_cfg) if lora_cfg.enabled else None
        own = self.outside if self.lora is None else self.lora.named_base()
        self._sources = sources
        if not is_sample:
            read_weights([*own, *self.weight_buffers()], sources)
        if self.lora is not None:
            self.parameters = self.lora.trainable

    def group(self, name: str, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> StateGroup:
        """Return a state group of the model's tensors that arrives layer by layer; FSDP casts gathered parameters."""
        return StateGroup(
            name,
            tensors,
            prepare=self.reshard,
            layers=self.layers,
            layer_arrived=self.gather,
            read_dtype=self.compute_dtype,
        )

    def read_part(self, part: Part) -> None:
        """Read the weights of a part, whose parameters must have memory on the device."""
        read_weights(part.parameters, self._sources)

    def weight_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that are weights, by Hugging Face name."""
        return weight_buffers(self.module.causal_lm)

    def reshard(self) -> None:
        """Free gathered parameters, and the routing of the last pass."""
        parallel.reshard_all(self.fsdp_root)
        self.module.replay(None)

    def abandon_pass(self) -> None:
        """Drop what a pass that broke off left, except gradients."""
        self.reshard()
        parallel.forget_pass(self.fsdp_root)

    def drop_grads(self) -> None:
        """Drop gradients and gathered parameters."""
        self.reshard()
        parallel.drop_unreduced_grads(self.fsdp_root)
        for _, parameter in self.parameters:
            parameter.grad = None

    def num_tokens(self, micro_batch: TokenBatch) -> int:
        """Count a micro-batch's tokens that go through the model, on all ranks that share its rows."""
        return micro_batch.num_tokens(packed=self._packs)

    def on_device[Batch: TokenBatch](self, micro_batch: Batch) -> tuple[Batch, ModelRows]:
        """Copy a micro-batch to the device, and return it with the model's rows for it."""
        # Computed on the host: reading it from a GPU would wait for all queued work.
        is_scored_BS = micro_batch.is_scored()
        if self._packs:
            rows = packed_rows(micro_batch.input_lengths, is_scored_BS, self._multiple)
        elif self._cp_mesh is not None:
            rows = shared_rows(is_scored_BS, self._multiple, self._cp_mesh.get_local_rank(), self._cp_mesh.size())
        else:
            rows = padded_rows(is_scored_BS, self._multiple)
        batch = micro_batch.to(self._device)
        return batch, rows.to(self._device).replaying(batch.routed_experts)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn gradients and dropout off, within the context; gathered parameters are freed at its end."""
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.reshard()


def freeze(causal_lm: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, on the meta device, to `dtype` and turn off their gradients; buffers stay unchanged."""
    for parameter in causal_lm.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)


def keep_as_stored(causal_lm: nn.Module, dtype: torch.dtype, sources: WeightSources) -> None:
    """Cast frozen parameters, on the meta device, to the compute type `dtype` if the model's files have them in it.

    Passes, which cast to `dtype`, and merged weights stay the same bits: no value is rounded.
    """
    for name, parameter in causal_lm.named_parameters():
        if not parameter.requires_grad and sources.has_all_in(name_without_adapters(name), dtype):
            parameter.data = parameter.data.to(dtype)
