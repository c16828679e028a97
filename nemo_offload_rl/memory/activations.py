"""Counts what passes of the DTensor backend need: layers of the model run without data; FSDP and the head add to it.

FSDP casts a layer's parameters when it gathers them, and keeps the root's (embedding, last norm, output layer) through
a pass. A pass has several moments, one of which needs most: see `_training_need` and `_reading_need`.

Not counted: keys and values that context-parallel ranks gather, uneven experts, and filters of the logprobs.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import masking_utils

from nemo_offload_rl.backends.dtensor.attention import CAUSAL, PACKED, TAKES_BOUNDS, choose_attention
from nemo_offload_rl.backends.dtensor.experts import expert_modules
from nemo_offload_rl.backends.dtensor.loading import build_causal_lm
from nemo_offload_rl.backends.dtensor.lora import add_adapters
from nemo_offload_rl.backends.dtensor.model import can_be_compiled, decoder_layers
from nemo_offload_rl.backends.dtensor.parallel import cast_inputs
from nemo_offload_rl.backends.dtensor.state_mixers import sequence_arguments, without_kernels
from nemo_offload_rl.backends.dtensor.supported import COLUMNS, ROWS
from nemo_offload_rl.backends.hf.export import load_config
from nemo_offload_rl.backends.hf.model_folder import local_config, local_folder
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.keys.dtensor import DTensorLoraConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.memory.groups import base_element_bytes
from nemo_offload_rl.memory.layer_trace import LayerCall, LayerMemory, live_bytes, trace_layer
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES
from nemo_offload_rl.residency import PassNeed

logger = logging.getLogger(__name__)
_CHUNK = 64  # tokens of a chunk of gated delta rules
_WORKING = 8  # float32 tensors of a delta rule without gradients: queries, keys and values, with decays, in chunks

_WITHOUT_MASKS = (CAUSAL, PACKED)
_TOKENS = 4097  # of a traced row where each token needs as much

_FP32_BYTES = 4
_ON_DEVICE = 4  # inputs of layers on the device if they are offloaded


@dataclass(frozen=True)
class _Row:
    """A traced row on one rank.

    Attributes:
        num_tokens: Its tokens.
        longest: Most tokens of a sequence.
        is_packed: Sequences are packed in it.
        num_sharing: Ranks that share it.
        num_parts: Ranks that divide it between attention and MLP.
    """

    num_tokens: int
    longest: int
    is_packed: bool
    num_sharing: int
    num_parts: int


@dataclass(frozen=True)
class ModelMemory:
    """A traced model, as one rank has it; bytes of activations are those of all tokens of the trace.

    Attributes:
        num_tokens: Tokens of the trace on this rank.
        num_sharing: Ranks that share each row.
        hidden_bytes: Hidden states.
        outer_bytes: Kept outside of the layers: the last norm, masks, rotary angles.
        shared_bytes: Masks and rotary angles, which all layers read.
        layers: Memory of each layer.
        copies: Copies of parameters in the compute type, of each kind of layer: bytes of each, and whether it is one of
            experts. A lone rank copies no frozen parameters that are in that type.
        expert_size: Ranks that share out experts; the number of tokens for a rank's experts does not depend on it.
        root_bytes: Copies of the parameters outside of layers in the compute type.
        root_cast_bytes: The largest of those.
        trained_root_bytes: Trained parameters outside of layers in the compute type.
        output_bytes: The output layer's weight if it is trained.
        num_columns: Columns of the logits.
    """

    num_tokens: int
    num_sharing: int
    hidden_bytes: int
    outer_bytes: int
    shared_bytes: int
    layers: Sequence[LayerMemory]
    copies: Sequence[Sequence[tuple[int, bool]]]
    expert_size: int
    root_bytes: int
    root_cast_bytes: int
    trained_root_bytes: int
    output_bytes: int
    num_columns: int

    @property
    def layer_bytes(self) -> int:
        """Copies of the largest layer's parameters."""
        return max(map(sum, self._of_layers))

    @property
    def layer_cast_bytes(self) -> int:
        """The largest copy of a parameter of a layer."""
        return max(map(max, filter(None, self._of_layers)), default=0)

    @property
    def _of_layers(self) -> list[list[int]]:
        return [[size // (self.expert_size if is_expert else 1) for size, is_expert in of] for of in self.copies]

    def need(self, fixed_bytes: int, token_bytes: int) -> PassNeed:
        """Make a need of fixed bytes and of those of all tokens of the trace."""
        return PassNeed(fixed_bytes, token_bytes / (self.num_tokens * self.num_sharing))


def training_need(settings: PolicySettings, num_workers: int, grads_bytes: int) -> PassNeed | None:
    """Return what a training pass needs in addition to parameters and gradients; None if that is unknown.

    Args:
        settings: The policy's settings.
        num_workers: Number of policy workers.
        grads_bytes: Gradients of one worker.
    """
    dtensor = settings.dtensor_cfg
    num_shards = num_workers // dtensor.tensor_parallel_size
    in_place = num_shards == 1 and _has_base_in_compute_type(settings)
    model = _traced(settings, _row(settings, is_training=True), is_training=True, in_place=in_place)
    if model is None:
        return None
    dp_size = num_shards // dtensor.context_parallel_size
    step_tokens = settings.train_global_batch_size // dp_size * settings.max_total_sequence_length
    is_single = step_tokens <= settings.most_train_tokens and not settings.backend.streams_parameters
    return _training_need(model, settings, num_shards, grads_bytes, is_single=is_single)


def _training_need(
    model: ModelMemory, settings: PolicySettings, num_shards: int, grads_bytes: int, *, is_single: bool
) -> PassNeed:
    """Combine the moments of a training pass.

    1. The head's backward: everything is kept, and one chunk of logits is there with gradients of the output layer.
    2. The last layer's backward.
    3. The first layer's backward, when gradients of all other layers are there.
    4. The end, when the root's gradients are cast and reduced, while both kinds are there.

    In a step of a single micro-batch the first two come before all gradients.
    """
    dtensor, size = settings.dtensor_cfg, COMPUTE_DTYPES[settings.precision].itemsize
    hidden, root, layer = model.hidden_bytes, model.root_bytes, model.layer_bytes
    of_layer = max(it.kept_bytes + it.backward_bytes for it in model.layers)
    if dtensor.activation_checkpointing:
        num_inputs = _ON_DEVICE if dtensor.activation_offload else len(model.layers)
        kept, at_last = num_inputs * hidden, of_layer
    else:
        kept, at_last = sum(it.kept_bytes for it in model.layers), model.layers[-1].backward_bytes
    before = -grads_bytes if is_single else 0
    has_chunks = settings.logprob_chunk_size is not None
    logits = size * model.num_columns * (settings.logprob_chunk_size or model.num_tokens)
    head = root + (2 if has_chunks else 1) * model.output_bytes
    outer = model.outer_bytes + hidden
    # Parameters of a layer and of the next one, and gradients; several ranks also gather and reduce in flat buffers.
    around_layer = (3 if num_shards == 1 else 6) * layer if grads_bytes else 2 * layer
    trained_fp32 = model.trained_root_bytes * _FP32_BYTES // size
    at_end = root + trained_fp32 + (model.trained_root_bytes if is_single or num_shards > 1 else trained_fp32)
    if not is_single and num_shards > 1:
        at_end += trained_fp32 // num_shards
    if settings.backend.streams_parameters:
        # Two parts with their gradients are on the device. The embedding's, which count as state, are away then.
        around_layer += 2 * (2 * layer - model.root_cast_bytes) * _FP32_BYTES // size
        at_end = root + model.trained_root_bytes
    chunk, whole = (logits, 0) if has_chunks else (0, logits)
    return PassNeed(
        at_end,
        0.0,
        other_moments=(
            model.need(before + head + chunk, kept + outer + whole),
            model.need(before + root + model.output_bytes + around_layer, kept + at_last),
            model.need(root + model.output_bytes + around_layer - trained_fp32 // num_shards, of_layer + hidden),
        ),
    )


def reading_need(settings: PolicySettings, num_workers: int, *, is_teacher: bool = False) -> PassNeed | None:
    """Return what a pass without gradients needs in addition to parameters; None if that is unknown."""
    num_shards = num_workers // settings.dtensor_cfg.tensor_parallel_size
    in_place = num_shards == 1 and (is_teacher or _has_base_in_compute_type(settings))
    model = _traced(settings, _row(settings, is_training=False), is_training=False, in_place=in_place)
    return None if model is None else _reading_need(model, settings, num_shards)


def _has_base_in_compute_type(settings: PolicySettings) -> bool:
    """Tell whether the model is frozen, under adapters, and kept in the compute type."""
    config = local_config(settings.model_name, settings.hf_config_overrides) or {}
    itemsize = COMPUTE_DTYPES[settings.precision].itemsize
    return settings.dtensor_cfg.lora_cfg.enabled and base_element_bytes(settings, config) == itemsize


def _reading_need(model: ModelMemory, settings: PolicySettings, num_shards: int) -> PassNeed:
    """Combine the moments of a pass without gradients: gathering the root and a layer, a layer, and the head."""
    size, hidden = COMPUTE_DTYPES[settings.precision].itemsize, model.hidden_bytes
    root, layer = model.root_bytes, model.layer_bytes
    # One rank casts one parameter after the other; several gather into a flat buffer and copy out of it.
    root_copy, layer_copy = model.root_cast_bytes, model.layer_cast_bytes
    if num_shards > 1:
        root_copy, layer_copy = root + root // num_shards, layer + layer // num_shards
    forward = max(it.forward_bytes for it in model.layers)
    logits = size * model.num_columns * (settings.logprob_chunk_size or model.num_tokens)
    chunk, whole = (logits, 0) if settings.logprob_chunk_size is not None else (0, logits)
    around_layer = layer if num_shards == 1 else 2 * layer
    if settings.backend.streams_parameters:
        around_layer += (2 * layer - model.root_cast_bytes) * _FP32_BYTES // size
    return PassNeed(
        root + root_copy,
        0.0,
        other_moments=(
            model.need(root + layer + layer_copy, 3 * hidden),
            model.need(root + around_layer, forward + hidden + model.shared_bytes),
            model.need(root + chunk, 2 * hidden + whole),
        ),
    )


def _row(settings: PolicySettings, *, is_training: bool) -> _Row:
    """Return the longest row: one is enough, since all memory grows with the number of rows.

    Its number of tokens is odd, so no size of the model, which tells activations from gradients of parameters.
    """
    dtensor, longest = settings.dtensor_cfg, settings.max_total_sequence_length
    packing, num_tokens = settings.sequence_packing, longest
    if packing.enabled:
        num_tokens = max(longest, packing.train_mb_tokens if is_training else packing.logprob_mb_tokens)
    return _Row(
        _odd_multiple(num_tokens // dtensor.context_parallel_size, dtensor.tensor_parallel_size),
        longest,
        packing.enabled,
        num_sharing=dtensor.context_parallel_size,
        num_parts=dtensor.tensor_parallel_size if dtensor.sequence_parallel else 1,
    )


def _odd_multiple(num_tokens: int, divisor: int) -> int:
    return (num_tokens // divisor | 1) * divisor


def _traced(settings: PolicySettings, row: _Row, *, is_training: bool, in_place: bool) -> ModelMemory | None:
    """Trace the model, once in a process; None if its code does not run without data."""
    dtensor = settings.dtensor_cfg
    overrides = json.dumps(settings.hf_config_overrides, sort_keys=True, default=str)
    dtype = COMPUTE_DTYPES[settings.precision]
    try:
        model = _Model(
            name=settings.model_name,
            overrides=overrides,
            attention=_attention(settings.model_name, overrides, dtype, row.longest, row.is_packed),
            dtype=dtype,
            tensor_size=dtensor.tensor_parallel_size,
            lora=dtensor.lora_cfg if dtensor.lora_cfg.enabled and is_training else None,
        )
    except UserError:  # of config.json, which others report
        return None
    traced_row = row
    if model.attention in _WITHOUT_MASKS:  # then memory grows with the number of tokens: one trace serves all lengths
        num_tokens = _odd_multiple(_TOKENS, model.tensor_size)
        traced_row = replace(row, num_tokens=num_tokens, longest=_TOKENS // 2, num_sharing=1)
    traced = _trace(model, traced_row, is_compiled=dtensor.torch_compile, in_place=in_place)
    if traced is None:
        return None
    return replace(traced, num_sharing=row.num_sharing, expert_size=dtensor.expert_parallel_size)


@dataclass(frozen=True)
class _Model:
    """Everything that a rank's part of a model depends on."""

    name: str
    overrides: str
    attention: str
    dtype: torch.dtype
    tensor_size: int
    lora: DTensorLoraConfig | None


@lru_cache(maxsize=8)
def _config(name: str, overrides: str) -> Any:
    folder = local_folder(name)  # no hub is asked
    return load_config(name if folder is None else str(folder), json.loads(overrides))


@lru_cache(maxsize=256)
def _attention(name: str, overrides: str, dtype: torch.dtype, longest: int, packs: bool) -> str:
    return choose_attention(_config(name, overrides), torch.device("cuda"), dtype, longest=longest, packs=packs)


@lru_cache(maxsize=32)
def _built(model: _Model) -> Any:
    """Build a tensor-parallel rank's part of a model without data, in the compute type, with all experts."""
    causal_lm = build_causal_lm(_config(model.name, model.overrides), model.attention)
    _share_equal_layers(decoder_layers(causal_lm))
    without_kernels(causal_lm)  # which need values
    for module in causal_lm.modules():
        if (rule := getattr(module, "chunk_gated_delta_rule", None)) is not None:
            module.chunk_gated_delta_rule = partial(_traced_delta_rule, rule)
    if model.lora is not None:
        add_adapters(causal_lm, model.lora, None)
    for module in causal_lm.modules():
        if isinstance(getattr(module, "rope_type", None), str):
            module.rope_type = "default"  # others compare positions, which have no values here; sizes are the same
    causal_lm.to("meta")
    for parameter in causal_lm.parameters():
        parameter.data = parameter.data.to(model.dtype)
    _split(causal_lm, model.tensor_size)
    return causal_lm


def _share_equal_layers(layers: nn.ModuleList) -> None:
    """Put one layer in all places of equal ones, so that adapters and parts are made for it alone."""

    def described(layer: nn.Module) -> str:
        parts = [(name, type(part), _plain_attributes(part)) for name, part in layer.named_modules()]
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        return repr((parts, [(name, tuple(it.shape), it.dtype) for name, it in tensors]))

    first: dict[str, nn.Module] = {}
    for place, layer in enumerate(layers):
        layers[place] = first.setdefault(described(layer), layer)


def _plain_attributes(part: nn.Module) -> list[tuple[str, Any]]:
    """Return a module's own numbers, texts and lists by name, but for its layer's place in the model."""
    plain = (bool, int, float, str, tuple, list, torch.dtype, NoneType)
    return [(name, it) for name, it in sorted(vars(part).items()) if isinstance(it, plain) and name != "layer_idx"]


class _Keeps(torch.autograd.Function):
    """Takes the place of an operation without running it: keeps bytes for the backward pass."""

    @staticmethod
    def forward(ctx: Any, kept_bytes: int, result: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(result.new_empty(kept_bytes, dtype=torch.uint8), *inputs)
        return torch.empty_like(result)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        _, *inputs = ctx.saved_tensors
        return None, None, *(torch.empty_like(it) for it in inputs)


def _traced_delta_rule(
    rule: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_kwargs: Any
) -> tuple[Tensor, None]:
    """Take the place of a gated delta rule, whose operations in torch (`rule`) grow in number with a row's length."""
    (_, num_tokens, num_heads, key_dim), value_dim = key.shape, value.shape[-1]
    if not torch.is_grad_enabled():
        kept_bytes = _WORKING * value.numel() * _FP32_BYTES
    elif all(find_spec(name) is not None for name in ("fla", "causal_conv1d")):
        kept_bytes = num_tokens * num_heads * (_CHUNK + 2 * key_dim) * value.element_size()
    else:
        one, two = (_delta_rule_bytes(rule, chunks, num_heads, key_dim, value_dim) for chunks in (1, 2))
        kept_bytes = one + (two - one) * (-(-num_tokens // _CHUNK) - 1)
    return _Keeps.apply(kept_bytes, value.detach(), query, key, value, g, beta), None


@lru_cache(maxsize=32)
def _delta_rule_bytes(rule: Callable[..., Any], num_chunks: int, num_heads: int, key_dim: int, value_dim: int) -> int:
    """Count what torch's operations of a gated delta rule keep for the backward pass of some chunks."""

    def given(*sizes: int) -> Tensor:
        return torch.empty(1, num_chunks * _CHUNK, num_heads, *sizes, device="meta", requires_grad=True)

    kept: dict[int, Tensor] = {}  # without what is given, which is kept anyway

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    inputs = {"query": given(key_dim), "key": given(key_dim), "value": given(value_dim), "g": given(), "beta": given()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        result = rule(**inputs, use_qk_l2norm_in_kernel=True)
    assert result[0].grad_fn is not None
    own = {it.untyped_storage()._cdata for it in inputs.values()}
    return sum(it.untyped_storage().nbytes() for place, it in kept.items() if place not in own)


@lru_cache(maxsize=256)
def _trace(model: _Model, row: _Row, *, is_compiled: bool, in_place: bool) -> ModelMemory | None:
    """Trace a model; None, once and for all, if its code does not run without data or in such parts."""
    try:
        return _model_memory(model, row, is_compiled=is_compiled, in_place=in_place)
    except Exception:  # a family's code may fail in any way on tensors without data; the need is unknown then
        logger.debug("passes of %s cannot be traced", model.name, exc_info=True)
        return None


def _model_memory(model: _Model, row: _Row, *, is_compiled: bool, in_place: bool) -> ModelMemory:
    causal_lm = _built(model)
    layers = decoder_layers(causal_lm)
    calls, outer_bytes = _layer_calls(causal_lm, layers, _model_inputs(causal_lm, row), row, model.dtype)
    is_compiled = is_compiled and can_be_compiled(causal_lm)
    kinds = [
        repr(
            (kind, [tuple(it.shape) if isinstance(it, Tensor) else it for it in tree_leaves((call.args, call.kwargs))])
        )
        for kind, call in zip(_kinds(model), calls, strict=True)
    ]
    found: dict[str, LayerMemory] = {}
    for kind, call in zip(kinds, calls, strict=True):
        if kind not in found:
            with _sequence_parts(call.layer, row.num_parts):
                found[kind] = trace_layer(call, is_compiled=is_compiled)
    given = (it for it in tree_leaves([(call.args, call.kwargs) for call in calls]) if isinstance(it, Tensor))
    shared = {it.untyped_storage()._cdata: it.untyped_storage() for it in given}
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    embedding, head = causal_lm.get_input_embeddings().weight, causal_lm.get_output_embeddings().weight
    root = {
        parameter: parameter.nbytes // (model.tensor_size if parameter is embedding or parameter is head else 1)
        for parameter in causal_lm.parameters()
        if parameter not in inside
    }
    # Passes that read a frozen model in place copy only the adapters.
    is_copied = (lambda it: model.lora is not None and it.requires_grad) if in_place else (lambda it: True)
    one_of_each = dict(zip(kinds, layers, strict=True)).values()
    in_experts = {parameter for experts in expert_modules(causal_lm) for parameter in experts.parameters(recurse=False)}
    of_root = [size for it, size in root.items() if is_copied(it)]
    return ModelMemory(
        num_tokens=row.num_tokens,
        num_sharing=row.num_sharing,
        hidden_bytes=calls[0].hidden.nbytes,
        outer_bytes=outer_bytes,
        shared_bytes=sum(it.nbytes() for it in shared.values()),
        layers=[found[kind] for kind in kinds],
        copies=[[(it.nbytes, it in in_experts) for it in layer.parameters() if is_copied(it)] for layer in one_of_each],
        expert_size=1,
        root_bytes=sum(of_root),
        root_cast_bytes=max(of_root, default=0),
        trained_root_bytes=sum(size for it, size in root.items() if it.requires_grad),
        output_bytes=root[head] if head.requires_grad else 0,
        num_columns=len(head) // model.tensor_size,
    )


def _model_inputs(causal_lm: Any, row: _Row) -> dict[str, Any]:
    shape, longest = (1, row.num_tokens), row.longest
    inputs: dict[str, Any] = {"input_ids": torch.zeros(shape, dtype=torch.int64, device="meta"), "use_cache": False}
    if row.is_packed:
        inputs["position_ids"] = torch.zeros(1, row.num_tokens, dtype=torch.int64, device="meta")
    bounds, lengths = None, ()
    if row.is_packed:
        bounds = torch.zeros(2 + row.num_tokens // longest, dtype=torch.int32, device="meta")
        lengths = (*(longest,) * (row.num_tokens // longest), row.num_tokens % longest)
    inputs |= sequence_arguments(causal_lm, lengths, bounds)
    if causal_lm.config._attn_implementation in TAKES_BOUNDS:
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return inputs


def _layer_calls(
    causal_lm: Any, layers: nn.ModuleList, inputs: Mapping[str, Any], row: _Row, dtype: torch.dtype
) -> tuple[list[LayerCall], int]:
    """Run the model without its layers; return their calls, and the bytes that stay for the backward pass."""
    calls: list[LayerCall] = []

    def recorded(layer: nn.Module) -> Any:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            args, kwargs = cast_inputs((args, kwargs), dtype)
            mine = hidden.detach()[:, : hidden.shape[1] // row.num_parts].clone()
            calls.append(LayerCall(layer, mine, args, kwargs))
            return hidden

        return forward

    one_of_each = list(dict.fromkeys(layers))
    own = [vars(layer).get("forward") for layer in one_of_each]
    for layer in one_of_each:
        layer.forward = recorded(layer)
    try:
        with _masks_without_values(is_packed=row.is_packed):
            outer_bytes = live_bytes(lambda: causal_lm.base_model(**inputs), causal_lm)
    finally:
        for layer, forward in zip(one_of_each, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
    return calls, outer_bytes - sum(call.hidden.nbytes for call in calls)


@contextmanager
def _masks_without_values(*, is_packed: bool) -> Iterator[None]:
    """Let `transformers` make masks of packed rows without a look at the values of positions."""
    tell: Any = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda positions: positions.clone() if is_packed else None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = tell


@contextmanager
def _sequence_parts(layer: nn.Module, num_parts: int) -> Iterator[None]:
    """Let a layer get one part of each row: it is gathered for attention and MLP, and their output is divided."""

    def gather(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (torch.cat([args[0]] * num_parts, dim=1), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": torch.cat([kwargs["hidden_states"]] * num_parts, dim=1)}

    def divide(_module: nn.Module, _args: Any, result: Any) -> Any:
        return tree_map(lambda it: it.chunk(num_parts, 1)[0].clone() if isinstance(it, Tensor) else it, result)

    inner = [part for part in layer.children() if num_parts > 1 and next(part.children(), None) is not None]
    hooks = [part.register_forward_pre_hook(gather, with_kwargs=True) for part in inner]
    hooks += [part.register_forward_hook(divide) for part in inner]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@lru_cache(maxsize=32)
def _kinds(model: _Model) -> tuple[str, ...]:
    """Describe each layer so that equal descriptions mean equal memory for equal arguments."""

    def described(layer: nn.Module) -> str:
        of_layer = [(name, tuple(it.shape), it.requires_grad) for name, it in layer.named_parameters()]
        windows = [getattr(part, "sliding_window", None) for part in layer.modules()]
        return repr((type(layer), of_layer, windows))

    return tuple(map(described, decoder_layers(_built(model))))


def _split(causal_lm: Any, tensor_size: int) -> None:
    """Give linear layers the sizes that one tensor-parallel rank has, by the model's plan."""
    plan = causal_lm.config.base_model_tp_plan or {}
    for name, module in causal_lm.base_model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style in (COLUMNS, ROWS) and isinstance(module, nn.Linear):
            rows, columns = module.weight.shape
            is_by_rows = style == COLUMNS  # of the weight
            _replace(module, "weight", (rows // tensor_size, columns) if is_by_rows else (rows, columns // tensor_size))
            if module.bias is not None and is_by_rows:
                _replace(module, "bias", (rows // tensor_size,))


def _replace(module: nn.Module, name: str, shape: Sequence[int]) -> None:
    old: Any = getattr(module, name)
    module.register_parameter(name, nn.Parameter(old.detach().new_empty(tuple(shape)), requires_grad=old.requires_grad))
