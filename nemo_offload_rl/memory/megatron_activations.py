"""Counts what passes of the Megatron backend with Transformer Engine need, by formulas that measurements check.

Sizes are those that modules keep for their backward pass (arXiv 2205.05198 for the method), in the order of a layer:
norm, product for queries, keys and values, norms of queries and keys, rotation, fused attention, projection, norm, and
an MLP or experts. The terms for what exists for a moment only, such as copies of tokens for experts, are read off
measured passes of four shapes (benchmarks/results/pass_memory.json; tests/unit/memory/test_passes.py compares all).

Not counted: 8-bit products, adapters, uneven experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.backends.hf.model_folder import local_config
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES
from nemo_offload_rl.residency import PassNeed

_FP32_BYTES = 4
_SPARE = 1.5  # of host buffers, which are in sizes that serve tensors of several lengths
_WITH_QUERY_NORMS = ("qwen3", "gemma3", "olmo2")  # beginnings of model types; others have the key `use_qk_norm`


@dataclass(frozen=True)
class _Layer:
    """Bytes of one layer's tensors for each token of one rank.

    Attributes:
        hidden: Hidden states.
        queries: Queries of the rank's heads; also the output of attention.
        keys: Keys or values.
        normed: Queries and keys before their norms; 0 without such norms.
        stats: Statistics of norms and attention.
        inner: Input of the MLP's second product; of all copies, with experts.
        copies: Copies of hidden states for experts; 0 in a dense layer.
    """

    hidden: float
    queries: float
    keys: float
    normed: float
    stats: float
    inner: float
    copies: float

    @property
    def of_mlp(self) -> float:
        """Kept from the second norm's output on; fused kernels keep both halves of the first product's output."""
        return self.hidden + self.copies + 3 * self.inner

    @property
    def kept(self) -> float:
        """Kept of the whole layer between forward and backward pass."""
        attention = 2 * self.queries + 2 * self.keys + self.normed
        return 3 * self.hidden + attention + self.stats + self.of_mlp

    @property
    def backward(self) -> float:
        """Most at once in the backward pass in addition to `kept`."""
        return 3 * (self.hidden + self.copies) if self.copies else self.hidden + 2 * self.inner

    @property
    def forward(self) -> float:
        """Most at once in a pass without gradients."""
        if self.copies:
            return 2 * self.hidden + 4 * self.copies + 2 * self.inner
        attention = 2 * self.hidden + 4 * self.queries + 5 * self.keys
        return max(attention, 3 * self.hidden + 3 * self.inner)

    def recomputed(self, modules: tuple[str, ...]) -> float:
        """Bytes of `kept` that selective recomputation of these modules does not keep; negative if it keeps more."""
        sizes = {
            # Checkpointing keeps inputs and output in addition to what the neighbours keep.
            "core_attn": -self.queries - self.keys,
            "layernorm": self.hidden if self.copies else 0.0,
            "mlp": 0.0 if self.copies else self.of_mlp,
            "moe": self.copies + 3 * self.inner if self.copies else 0.0,
            "moe_act": self.inner if self.copies else 0.0,
        }
        return sum(sizes.get(module, 0.0) for module in modules)

    def offloaded(self, modules: tuple[str, ...]) -> float:
        """Bytes of `kept` that fine-grained offloading of these modules moves to the host."""
        sizes = {
            "qkv_linear": 2 * self.hidden + self.normed,
            "core_attn": self.queries + 2 * self.keys,
            "attn_proj": self.queries,
            "mlp_norm": self.hidden,
            "expert_fc1": self.copies,
            "moe_act": 2 * self.inner if self.copies else 0.0,
        }
        return sum(sizes.get(module, 0.0) for module in modules)


@dataclass(frozen=True)
class _Model:
    """A model as one rank has it: a layer, the number of layers over all stages, and the output layer's weight."""

    layer: _Layer
    num_layers: int
    output_bytes: int
    logit_bytes: float  # of one position
    is_tied: bool


def training_need(settings: PolicySettings) -> PassNeed | None:
    """Return what a training pass needs in addition to parameters and gradients; None if that is unknown.

    Its moments are the head's backward (with the sum of the output layer's gradients and those of one chunk) and that
    of the last layer, both in the last pipeline stage, and that of a stage before it, which holds its layers of a
    micro-batch for each stage from there on. The largest counts, whichever stage has most state.
    """
    megatron = _formulas_apply(settings)
    if megatron is None or (model := _model(settings, megatron)) is None:
        return None
    layer, stages = model.layer, megatron.pipeline_model_parallel_size
    in_stages = megatron.layers_of_stages(model.num_layers)
    most, last = max(num * (stages - at) for at, num in enumerate(in_stages)), in_stages[-1]
    kept, again = _kept(layer, megatron)
    kept -= _offloaded(layer, kept, megatron, min(in_stages))
    trained = 0 if megatron.peft.enabled else model.output_bytes
    chunk, chunk_token = _logits(settings, model)
    waiting = trained if model.is_tied and stages == 1 else 0  # until the embedding's gradient comes
    moments = [
        (chunk + (2 if chunk else 1) * trained, last * kept + 3 * layer.hidden + chunk_token),
        (waiting, last * kept + again + layer.backward),
        (0, most * kept + again + layer.backward if stages > 1 else 0.0),
    ]
    return _largest(moments, megatron)


def _kept(layer: _Layer, megatron: MegatronConfig) -> tuple[float, float]:
    """Return what a layer keeps, on the GPU or the host, and what it computes again."""
    if not megatron.activation_checkpointing:
        return layer.kept, 0.0
    if megatron.recompute_granularity == "full":
        # The dispatcher of experts still holds tensors of the first pass when they are computed again.
        return layer.hidden, layer.kept + (layer.hidden + 3 * layer.inner if layer.copies else 0.0)
    saved = layer.recomputed(megatron.recompute_modules or ("core_attn",))
    return layer.kept - saved, max(0.0, saved)


def _offloaded(layer: _Layer, kept: float, megatron: MegatronConfig, num_layers: int) -> float:
    """Return what a layer of a stage moves to the host, as a mean: the last layer's tensors stay."""
    if not megatron.fine_grained_activation_offloading:
        return 0.0
    moved = min(kept, layer.offloaded(tuple(megatron.offload_modules or ())))
    return moved * megatron.activation_offload_fraction * (1 - 1 / max(1, num_layers))


def offloaded_bytes_per_token(settings: PolicySettings) -> float:
    """Return what one rank moves to the host and back for each token of a micro-batch; 0 if that is unknown."""
    megatron = _formulas_apply(settings)
    if megatron is None or (model := _model(settings, megatron)) is None:
        return 0.0
    in_stage = max(megatron.layers_of_stages(model.num_layers))
    kept, _ = _kept(model.layer, megatron)
    return in_stage * _offloaded(model.layer, kept, megatron, in_stage) / megatron.context_parallel_size


def offloaded_bytes_at_most(settings: PolicySettings) -> int:
    """Estimate one worker's host memory for offloaded activations: those of as many micro-batches as stages."""
    megatron = settings.megatron_cfg
    if megatron is None or not megatron.fine_grained_activation_offloading:
        return 0
    num_bytes = _SPARE * offloaded_bytes_per_token(settings) * settings.most_train_tokens
    limit_bytes = megatron.activation_offload_host_limit_gib * 2**30
    return int(min(limit_bytes, num_bytes * megatron.pipeline_model_parallel_size))


def reading_need(settings: PolicySettings) -> PassNeed | None:
    """Return what a pass without gradients needs in addition to parameters; None if that is unknown."""
    megatron = _formulas_apply(settings)
    if megatron is None or (model := _model(settings, megatron)) is None:
        return None
    chunk, chunk_token = _logits(settings, model)
    return _largest([(0, model.layer.forward), (chunk, 3 * model.layer.hidden + chunk_token)], megatron)


def _largest(moments: list[tuple[int, float]], megatron: MegatronConfig) -> PassNeed:
    cp_size = megatron.context_parallel_size
    first, *others = (PassNeed(fixed_bytes, per_token / cp_size) for fixed_bytes, per_token in moments)
    return PassNeed(first.fixed_bytes, first.bytes_per_token, other_moments=tuple(others))


def _logits(settings: PolicySettings, model: _Model) -> tuple[int, float]:
    """Return the bytes of a chunk of logits, and of each token's logits without chunks."""
    chunk_size = settings.logprob_chunk_size
    return (0, model.logit_bytes) if chunk_size is None else (int(chunk_size * model.logit_bytes), 0.0)


def _formulas_apply(settings: PolicySettings) -> MegatronConfig | None:
    """Return the backend's settings if its attention is fused: layers of Transformer Engine in 16 bits."""
    megatron = settings.megatron_cfg
    if megatron is None or megatron.transformer_impl == "local" or settings.precision == "float32":
        return None
    return megatron


def _model(settings: PolicySettings, megatron: MegatronConfig) -> _Model | None:
    config = local_config(settings.model_name, settings.hf_config_overrides)
    if config is None or "kv_lora_rank" in config:  # latent attention
        return None
    shape, size = ModelShape.of(config), COMPUTE_DTYPES[settings.precision].itemsize
    if not (shape.num_layers and shape.hidden_size and shape.num_heads and shape.num_kv_heads and shape.head_dim):
        return None
    inner_size, copies = _inner_size(config, shape)
    if inner_size is None or shape.vocab_size is None:
        return None
    tp_size = megatron.tensor_model_parallel_size
    heads = shape.num_heads / tp_size
    kv_heads = max(1.0, shape.num_kv_heads / tp_size)
    has_query_norms = config.get("use_qk_norm", str(config.get("model_type")).startswith(_WITH_QUERY_NORMS))
    split_by = megatron.expert_tensor_parallel_size if copies else tp_size
    hidden = size * shape.hidden_size / (tp_size if megatron.sequence_parallel else 1)
    layer = _Layer(
        hidden=hidden,
        queries=size * heads * shape.head_dim,
        keys=size * kv_heads * shape.head_dim,
        normed=size * (heads + kv_heads) * shape.head_dim if has_query_norms else 0.0,
        stats=_FP32_BYTES * (2 * heads + kv_heads + 2 + shape.num_experts),
        inner=size * max(1, copies) * inner_size / split_by,
        copies=copies * hidden,
    )
    logit_bytes = size * shape.vocab_size / tp_size
    return _Model(
        layer=layer,
        num_layers=shape.num_layers,
        output_bytes=int(logit_bytes * shape.hidden_size),
        logit_bytes=logit_bytes,
        is_tied=bool(config.get("tie_word_embeddings")),
    )


def _inner_size(config: Mapping[str, Any], shape: ModelShape) -> tuple[int | None, int]:
    """Return the MLP's or an expert's inner size, and the copies of each token; shared experts are copies too."""
    if not shape.num_experts:
        return shape.intermediate_size, 0
    inner_size = config.get("moe_intermediate_size", shape.intermediate_size)
    return inner_size, shape.num_active_experts + shape.num_shared_experts
