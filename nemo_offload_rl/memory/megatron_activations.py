"""Counts what passes of the Megatron backend with Transformer Engine need, by formulas that measurements check.

Sizes are those that modules keep for their backward pass (arXiv 2205.05198 for the method), in the order of a layer:
norm, product for queries, keys and values, norms of queries and keys, rotation, fused attention, projection, norm, and
an MLP or experts. Dense layers of a mixture count like those with experts. The terms for what exists for a moment only,
such as copies of tokens for experts, are read off measured passes of four shapes (benchmarks/results/pass_memory.json;
tests/unit/memory/test_passes.py compares all).

Not counted: 8-bit products, adapters, uneven experts. Layers with a state along the row have no formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.backends.hf.model_folder import local_config
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.models.families import state_mixer
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES
from nemo_offload_rl.residency import PassNeed

_FP32_BYTES = 4
_SPARE = 1.5  # of host buffers, which are in sizes that serve tensors of several lengths
_WITH_QUERY_NORMS = (
    "qwen3",
    "gemma3",
    "olmo2",
    "olmoe",
    "exaone_moe",
    "hy_v3",
)  # beginnings of model types; others have the key `use_qk_norm`


@dataclass(frozen=True)
class Attention:
    """Bytes of one layer's attention for each token of one rank.

    Attributes:
        kept: Kept for the backward pass, from the product for queries on, without hidden states.
        forward: Most at once in a pass without gradients, without hidden states.
        stats: Statistics of its norms and of attention.
        recomputed: Bytes of `kept` that recomputing a module does not keep, by module; negative if it keeps more.
        offloaded: Bytes that offloading a module moves to the host, by module.
        fuses_norm: The norm before it is a part of the product for queries, keys and values.
    """

    kept: float
    forward: float
    stats: float
    recomputed: Mapping[str, float]
    offloaded: Mapping[str, float]
    fuses_norm: bool


@dataclass(frozen=True)
class _Layer:
    """Bytes of one layer's tensors for each token of one rank.

    Attributes:
        hidden: Hidden states.
        attention: The layer's attention.
        stats: Statistics of the layer's norms, and scores of experts.
        inner: Input of the MLP's second product; of all copies, with experts.
        copies: Copies of hidden states for experts; 0 in a dense layer.
        shared: Input of the second product of experts that all tokens pass through.
        has_gate: The first product's output has two halves.
    """

    hidden: float
    attention: Attention
    stats: float
    inner: float
    copies: float
    shared: float
    has_gate: bool

    @property
    def of_mlp(self) -> float:
        """Kept from the second norm's output on; fused kernels keep all of the first product's output."""
        return self.hidden + self.copies + (2 + self.has_gate) * (self.inner + self.shared)

    @property
    def kept(self) -> float:
        """Kept of the whole layer between forward and backward pass."""
        return 3 * self.hidden + self.attention.kept + self.attention.stats + self.stats + self.of_mlp

    @property
    def backward(self) -> float:
        """Most at once in the backward pass in addition to `kept`."""
        return 3 * (self.hidden + self.copies) if self.copies else self.hidden + 2 * self.inner

    @property
    def forward(self) -> float:
        """Most at once in a pass without gradients."""
        of_mlp = 3 * self.hidden + 3 * self.inner
        if self.copies:
            of_mlp = 2 * self.hidden + 4 * self.copies + 2 * (self.inner + self.shared)
        return max(2 * self.hidden + self.attention.forward, of_mlp)

    def recomputed(self, modules: tuple[str, ...]) -> float:
        """Bytes of `kept` that selective recomputation of these modules does not keep; negative if it keeps more."""
        num_norms = (0 if self.attention.fuses_norm else 1) + (1 if self.copies else 0)
        sizes = {
            **self.attention.recomputed,
            "layernorm": num_norms * self.hidden,
            "mlp": 0.0 if self.copies else self.of_mlp,
            "moe": self.copies + 3 * (self.inner + self.shared) if self.copies else 0.0,
            "moe_act": self.inner if self.copies else 0.0,
            "shared_experts": 3 * self.shared,
        }
        if "moe" in modules:
            modules = tuple(name for name in modules if name not in ("moe_act", "shared_experts"))
        return sum(sizes.get(module, 0.0) for module in modules)

    def offloaded(self, modules: tuple[str, ...]) -> float:
        """Bytes of `kept` that fine-grained offloading of these modules moves to the host."""
        of_attention = dict(self.attention.offloaded)
        of_attention["attn_norm"] = 0.0 if self.attention.fuses_norm else self.hidden
        of_attention["qkv_linear"] += (2 if self.attention.fuses_norm else 1) * self.hidden
        sizes = {
            **of_attention,
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

    The largest of three moments counts, whichever stage has most state. Two are in the last pipeline stage: the head's
    backward, with the sum of the output layer's gradients and those of one chunk, and the last layer's backward. The
    third is in an earlier stage, which keeps a micro-batch's activations for itself and for each stage after it.
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
    if config is None or state_mixer(config) is not None:  # layers with states have no formula
        return None
    shape, size = ModelShape.of(config), COMPUTE_DTYPES[settings.precision].itemsize
    if not (shape.num_layers and shape.hidden_size and shape.num_heads and shape.num_kv_heads and shape.head_dim):
        return None
    inner_size = (config.get("moe_intermediate_size") if shape.num_experts else None) or shape.intermediate_size
    inner_size = inner_size[0] if isinstance(inner_size, list) else inner_size
    if inner_size is None or shape.vocab_size is None:
        return None
    tp_size, num_copies = megatron.tensor_model_parallel_size, shape.num_active_experts if shape.num_experts else 0
    split_by = megatron.expert_tensor_parallel_size if num_copies else tp_size
    hidden = size * shape.hidden_size / (tp_size if megatron.sequence_parallel else 1)
    shared_size = config.get("shared_expert_intermediate_size") or shape.num_shared_experts * inner_size
    attention = _attention(config, shape, size, tp_size)
    if "kv_lora_rank" in config:
        num_parts = tp_size if megatron.sequence_parallel else 1
        attention = latent_attention(
            config, shape, size, tp_size, num_parts=num_parts, is_packed=settings.sequence_packing.enabled
        )
    layer = _Layer(
        hidden=hidden,
        attention=attention,
        stats=_FP32_BYTES * (2 + shape.num_experts),
        inner=size * max(1, num_copies) * inner_size / split_by,
        copies=num_copies * hidden,
        shared=size * shared_size / tp_size if num_copies else 0.0,
        has_gate=shape.has_gate,
    )
    logit_bytes = size * shape.vocab_size / tp_size
    return _Model(
        layer=layer,
        num_layers=shape.num_layers,
        output_bytes=int(logit_bytes * shape.hidden_size),
        logit_bytes=logit_bytes,
        is_tied=bool(config.get("tie_word_embeddings")),
    )


def _attention(config: Mapping[str, Any], shape: ModelShape, size: int, tp_size: int) -> Attention:
    """Count queries, keys, values and the output, and queries and keys before their norms where there are norms."""
    assert shape.num_heads and shape.num_kv_heads and shape.head_dim
    heads, kv_heads = shape.num_heads / tp_size, max(1.0, shape.num_kv_heads / tp_size)
    queries, keys = size * heads * shape.head_dim, size * kv_heads * shape.head_dim
    has_norms = config.get("use_qk_norm", str(config.get("model_type")).startswith(_WITH_QUERY_NORMS))
    normed = queries + keys if has_norms else 0.0
    return Attention(
        kept=2 * queries + 2 * keys + normed,
        forward=4 * queries + 5 * keys,
        stats=_FP32_BYTES * (2 * heads + kv_heads),
        # Checkpointing keeps inputs and output in addition to what the neighbours keep.
        recomputed={"core_attn": -queries - keys},
        offloaded={"qkv_linear": normed, "core_attn": queries + 2 * keys, "attn_proj": queries},
        fuses_norm=True,
    )


def latent_attention(
    config: Mapping[str, Any], shape: ModelShape, size: int, tp_size: int, *, num_parts: int, is_packed: bool
) -> Attention:
    """Count what `MLASelfAttention` keeps: compressed states before and after their norms, angles, and whole heads.

    Queries, keys and values are computed from compressed states. In packed rows values are padded to the size of keys,
    and so is the kernel's output, of which the projection reads a copy without the padding.

    Args:
        config: The model's config.json.
        shape: Its sizes.
        size: Bytes of an element.
        tp_size: Tensor-parallel ranks.
        num_parts: Ranks that divide the compressed states of a row.
        is_packed: Sequences are packed in rows.
    """
    assert shape.num_heads and shape.head_dim
    heads, rotated, latent = shape.num_heads / tp_size, config["qk_rope_head_dim"], config["kv_lora_rank"]
    queries, values = size * heads * shape.head_dim, size * heads * config["v_head_dim"]
    is_padded = is_packed and queries != values
    padded = 2 * queries - values if is_padded else 0.0  # padded values and output, less values as they were
    normed = size * (latent + (config.get("q_lora_rank") or 0)) / num_parts
    # Cosines and sines of queries and of keys; the part of keys that is rotated comes with the compressed states.
    angles = size * 4 * rotated
    before = normed + size * rotated / num_parts
    up = 2 * queries + (0.0 if is_padded else values)
    return Attention(
        kept=before + normed + angles + 2 * queries + 2 * values + padded,
        forward=4 * queries + 2 * values,
        stats=_FP32_BYTES * (heads + 2),
        recomputed={"core_attn": padded, "mla_up_proj": up + normed + angles},
        offloaded={
            "qkv_linear": before + normed + angles,
            "core_attn": 2 * queries + values + padded,
            "attn_proj": values,
        },
        fuses_norm=False,
    )
