"""Builds a Hugging Face causal model on the meta device, and reads each rank's shard from the model's files."""

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutput

from nemo_offload_rl.backends.dtensor.experts import use_grouped_experts
from nemo_offload_rl.backends.dtensor.model import decoder_layers
from nemo_offload_rl.backends.dtensor.state_mixers import keep_sequences_apart, norms_in_torch
from nemo_offload_rl.backends.hf.model_folder import find_weight_files, is_hub_name
from nemo_offload_rl.backends.hf.weight_files import COMPUTED, HubNames, Piece, WeightFiles, check_same_tensors
from nemo_offload_rl.backends.mamba import compute_mamba_by_chunks
from nemo_offload_rl.backends.ranks import failing_together
from nemo_offload_rl.errors import UserError, first_line
from nemo_offload_rl.models.families import (
    dropout_rates,
    has_plain_rope_in_windows,
    masks_packed_rows,
    mends_latent_attention,
)
from nemo_offload_rl.models.rope import yarn_score_factor
from nemo_offload_rl.models.towers import PART_OF, is_of_towers, place_in_whole, placed
from nemo_offload_rl.residency import local_tensor

_META = torch.device("meta")
_PLAIN = (bool, int, float, str, type(None))
_SAMPLE_ROWS = 4096  # the block of the kernels for logprobs
_MULTIPLE = 16  # numbers that it divides get kernels of their own from Triton
_EXPERT_BIASES = ("e_score_correction_bias", "expert_bias")
# Wrong values of a config fail anywhere in a model's code.
BUILD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
    StrictDataclassError,
)


def build_causal_lm(config: Any, attention: str, *, dropout: bool = False) -> Any:
    """Build the float32 model with parameters on the meta device, and buffers with their values on the CPU.

    Args:
        config: Result of `load_config`.
        attention: Result of `choose_attention`.
        dropout: Keep the config's dropout rates; else they become 0.
    """
    config = copy.deepcopy(config)
    for key in () if dropout else dropout_rates(config.to_dict()):
        setattr(config, key, 0.0)
    norms_in_torch(config)
    with _META:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    use_grouped_experts(model)
    make_buffers_of_biases(model)
    _compute_buffers(model)
    if has_plain_rope_in_windows(config.to_dict()):
        _rotate_plainly_in_windows(model)
    if mends_latent_attention(config.to_dict()):
        mend_latent_attention(model)
    compute_mamba_by_chunks(model)
    if config.model_type == "falcon_h1":
        _hand_on_arguments(model)
    if not masks_packed_rows(config.to_dict()):
        model.base_model.register_forward_pre_hook(_with_masks_by_positions, with_kwargs=True)
    keep_sequences_apart(model, decoder_layers(model))
    _keep_keys_in_layers(model)
    # A padding row without gradient would depend on the vocabulary's split; padding gets no gradient anyway.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def take_sample(model: Any, *, first_differs: bool) -> None:
    """Leave one layer of each kind, and a small part of the vocabulary, of a model on the meta device.

    The size of that part has the remainder that Triton compiles kernels of the output layer for.

    Args:
        model: Result of `build_causal_lm`.
        first_differs: The first layer is a kind of its own, since its input has no gradient.
    """
    base = model.base_model
    layers = decoder_layers(model)
    name = next(name for name, child in base.named_children() if child is layers)
    kinds = [(_kind_of(layer), first_differs and index == 0) for index, layer in enumerate(layers)]
    kept = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    setattr(base, name, nn.ModuleList(layers[index] for index in kept))
    if getattr(base.config, "layer_types", None):
        base.config.layer_types = [base.config.layer_types[index] for index in kept]
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = output.weight is embedding.weight
    for module in (embedding, output):
        rows = min(len(module.weight), _SAMPLE_ROWS + len(module.weight) % _MULTIPLE)
        module.weight = nn.Parameter(module.weight[:rows].detach())
        if getattr(module, "bias", None) is not None:
            module.bias = nn.Parameter(module.bias[:rows].detach())
    embedding.num_embeddings = output.out_features = rows
    if is_tied:
        output.weight = embedding.weight


def _kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return all that tells a layer's code from another's: classes, constants except its number, and shapes."""
    return tuple(
        (name, type(part), tuple(part._parameters), tuple(it.shape for it in part.parameters(recurse=False)), constants)
        for name, part in layer.named_modules()
        for constants in [tuple(it for it in vars(part).items() if it[0] != "layer_idx" and isinstance(it[1], _PLAIN))]
    )


def make_buffers_of_biases(model: nn.Module) -> None:
    """Make buffers of the biases with which routers choose experts, which ERNIE and Trinity have as parameters."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name in _EXPERT_BIASES:
                delattr(module, name)
                module.register_buffer(name, parameter.data)


def mend_latent_attention(model: Any) -> None:
    """Give latent attention YaRN's factor of scores, and its norms the model's epsilon, as published and in vLLM.

    transformers 5.12.1 has neither the factor for DeepSeek-V2, nor the epsilon for GLM-4.7-Flash.
    """
    factor = yarn_score_factor(model.config.to_dict())
    layers: Any = decoder_layers(model)
    for attention in (layer.self_attn for layer in layers):
        attention.scaling = attention.qk_head_dim**-0.5 * factor
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if hasattr(attention, name):
                getattr(attention, name).variance_epsilon = model.config.rms_norm_eps


def _hand_on_arguments(model: Any) -> None:
    """Let Falcon-H1 call its layers with all arguments, and its layers return hidden states, as in other families."""
    model.base_model.forward = partial(_forward_of_falcon, model.base_model)
    for layer in decoder_layers(model):
        layer.forward = partial(_first_of, layer.forward)


def _forward_of_falcon(
    base_model: Any,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool = False,
    **others: Any,
) -> BaseModelOutput:
    hidden: Any = inputs_embeds
    if hidden is None:
        hidden = base_model.embed_tokens(input_ids) * base_model.embedding_multiplier
    # Positions tell the mask where rows begin; without them there is one row.
    mask = create_causal_mask(base_model.config, hidden, None, None, position_ids)
    if position_ids is None:
        position_ids = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
    rotation = base_model.rotary_emb(hidden, position_ids=position_ids)
    for layer in base_model.layers:
        hidden = layer(hidden, attention_mask=mask, position_ids=position_ids, position_embeddings=rotation, **others)
    return BaseModelOutput(last_hidden_state=base_model.final_layernorm(hidden))


def _first_of(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)[0]


def _keep_keys_in_layers(model: Any) -> None:
    """Make Gemma 4's layers pass on hidden states alone, and no keys and values that no later layer reads."""
    layers: Any = decoder_layers(model)
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in layers]
    if any(getattr(attention, "is_kv_shared_layer", False) for attention in attentions):
        return
    if storing := [attention for attention in attentions if getattr(attention, "store_full_length_kv", False)]:
        for attention in storing:
            attention.store_full_length_kv = False
        model.base_model.register_forward_pre_hook(_without_shared_keys, with_kwargs=True)


def _without_shared_keys(
    _base_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "shared_kv_states": None}


def _with_masks_by_positions(
    base_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the masks that the model's own code makes without positions, which tell where rows of a packed row begin."""
    if (positions := kwargs.get("position_ids")) is None:
        return args, kwargs
    given = kwargs["inputs_embeds"] if "inputs_embeds" in kwargs else kwargs["input_ids"].unsqueeze(-1).float()
    asked = {"config": base_model.config, "inputs_embeds": given, "attention_mask": None, "past_key_values": None}
    mask = create_causal_mask(**asked, position_ids=positions)
    if getattr(base_model.config, "sliding_window", None) is not None:
        in_windows = create_sliding_window_causal_mask(**asked, position_ids=positions)
        mask = {"full_attention": mask, "sliding_attention": in_windows}
    return args, {**kwargs, "attention_mask": mask}


class _TwoRotations(nn.Module):
    """Rotary embeddings for a model with plain rotation in window layers: (cos, sin) scaled, then (cos, sin) plain.

    Args:
        scaled: The model's own rotary embedding.
        plain: One of the same class without scaling.
    """

    def __init__(self, scaled: nn.Module, plain: nn.Module) -> None:
        super().__init__()
        self.scaled, self.plain = scaled, plain

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        return (*self.scaled(hidden, position_ids), *self.plain(hidden, position_ids))


def _rotate_plainly_in_windows(model: Any) -> None:
    """Give window layers plain rotation and the others scaled rotation, if the model computes one for all."""
    own = model.base_model.rotary_emb
    if "inv_freq" not in dict(own.named_buffers(recurse=False)):
        return  # this release of transformers already tells layer types apart
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    model.base_model.rotary_emb = _TwoRotations(own, type(own)(config))
    layers: Any = decoder_layers(model)
    for layer, kind in zip(layers, config.layer_types, strict=True):
        choose = partial(_with_rotation, slice(2, 4) if kind == "sliding_attention" else slice(2))
        layer.self_attn.register_forward_pre_hook(choose, with_kwargs=True)


def _with_rotation(
    which: slice, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "position_embeddings": kwargs["position_embeddings"][which]}


@torch.no_grad()
def _compute_buffers(model: Any) -> None:
    """Compute the values of buffers that no file has: rotary frequencies, and a family's constant factors."""
    having = [(name, module) for name, module in model.named_modules() if module._buffers]
    for _, module in having:
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else torch.full_like(buffer, float("nan"), device="cpu")
    for module in (model.base_model, *(module for _, module in having)):  # Falcon-H1's model fills those of its layers
        model._init_weights(module)  # parameters stay on the meta device, without values
    for name, module in having:
        missing = [key for key, buffer in module.named_buffers(recurse=False) if buffer.isnan().any()]
        assert not missing, f"transformers gives no value to {name}.{missing[0]}"


def weight_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return buffers that are in the model's files, always in float32: biases with which routers choose experts."""
    return [
        (f"{place}.{key}", buffer)
        for place, part in module.named_modules()
        for key, buffer in part.named_buffers(recurse=False)
        if key not in part._non_persistent_buffers_set
    ]


@dataclass(frozen=True)
class WeightSources:
    """Places of a model's parameters in its files.

    Attributes:
        files: The model's files.
        pieces: A parameter's name -> the files' tensors that make it up.
        repeats: A tied parameter's name -> the name of its second copy in the files, if they have two.
    """

    files: WeightFiles
    pieces: Mapping[str, Sequence[Piece]]
    repeats: Mapping[str, str]

    def has_all_in(self, name: str, dtype: torch.dtype) -> bool:
        """Tell whether all of the files' tensors of a parameter have this type."""
        return all(self.files.dtypes[piece.name] is dtype for piece in self.pieces[name])


def check_weights(config: Any, model_name: str, *, compares_names: bool) -> None:
    """Refuse a local folder of safetensors whose headers differ from the config; reads no weights.

    Args:
        config: Result of `load_config`.
        model_name: The folder; hub names pass unchecked.
        compares_names: Refuse tensors that only one of the two has, too; else the model may be one that
            `transformers` cannot build.

    Raises:
        UserError: The files cannot be read, or differ; the message names the first tensor and its file.
    """
    if is_hub_name(model_name) or any(path.suffix == ".bin" for path in find_weight_files(model_name)):
        return
    try:
        norms_in_torch(config)
        with _META:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except BUILD_ERRORS as error:
        if not compares_names:
            return
        raise UserError(
            f"no model can be built from config.json of {model_name} ({first_line(error)}); correct it, or "
            "policy.hf_config_overrides"
        ) from error
    find_weights(model, model_name, compares_names=compares_names)


def find_weights(causal_lm: Any, model_name: str, *, compares_names: bool = True) -> WeightSources:
    """Look for every parameter in the headers of the model's files; reads no weights.

    Of a folder that reads images too, only the language model's tensors are compared.

    Args:
        causal_lm: Unchanged result of `build_causal_lm`.
        model_name: Folder or hub name.
        compares_names: Refuse parameters without a tensor, and tensors without a parameter.

    Raises:
        UserError: The files cannot be read, or their names and shapes differ from the model's.
    """
    files = WeightFiles(model_name)
    place = place_in_whole(files.shapes) if hasattr(causal_lm.config, PART_OF) else {}
    hub = HubNames(causal_lm.config.model_type, place)
    tensors = [*causal_lm.named_parameters(), *weight_buffers(causal_lm)]
    pieces = {name: _pieces(hub, files, name, tensor.shape) for name, tensor in tensors}
    found = {name: shape for name, shape in files.shapes.items() if not (place and is_of_towers(name, place))}
    repeats = {}
    for own_name, kept in causal_lm.all_tied_weights_keys.items():
        copied, (piece,) = placed(own_name, place), pieces[kept]
        if copied in found and piece.name in found:
            repeats[kept] = copied
        elif copied in found:
            pieces[kept] = [replace(piece, name=copied)]
            continue
        found.pop(copied, None)
    wanted = {piece.name: piece.shape for several in pieces.values() for piece in several}
    if not compares_names:
        wanted = {name: shape for name, shape in wanted.items() if name in found}
        found = {name: found[name] for name in wanted}
    harmless = [*(causal_lm._keys_to_ignore_on_load_unexpected or ()), COMPUTED]
    check_same_tensors(model_name, wanted, found, harmless, files.paths)
    return WeightSources(files, pieces, repeats)


def _pieces(hub: HubNames, files: WeightFiles, name: str, shape: torch.Size) -> list[Piece]:
    """Return the files' tensors of a parameter; a single one if the files have stacked experts."""
    pieces = hub.pieces(name, shape)
    if hub.of(name) not in files.shapes and (other := hub.other(name)) in files.shapes:
        return [Piece(other, tuple(shape), (0,) * len(shape), tuple(shape))]
    if len(pieces) > 1 and hub.of(name) in files.shapes:
        *front, rows, columns = shape
        is_transposed = tuple(files.shapes[hub.of(name)]) == (*front, columns, rows) and rows != columns
        there = (*front, columns, rows) if is_transposed else tuple(shape)
        return [Piece(hub.of(name), there, (0,) * len(shape), tuple(shape), is_transposed)]
    return pieces


def materialize(module: nn.Module, device: torch.device, empty: Container[Tensor] = ()) -> None:
    """Allocate this rank's shards of parameters on the meta device, on `device` and without values.

    Args:
        module: The model.
        device: Device of the model from now on.
        empty: Parameters whose memory is freed at once, since they pass through the device part by part.
    """

    def on_device(tensor: Tensor) -> Tensor:
        made = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        if tensor in empty:
            local_tensor(made.detach()).untyped_storage().resize_(0)
        return made

    module._apply(on_device)


def read_weights(parameters: Iterable[tuple[str, Tensor]], sources: WeightSources) -> None:
    """Read this rank's shard of each parameter; every rank calls it, and an error on one is raised on all.

    In addition to the shards, host memory holds at most a part of one tensor.

    Args:
        parameters: DTensors and buffers, by the names that `find_weights` saw.
        sources: Result of `find_weights`.

    Raises:
        UserError: A file cannot be read, or tied weights differ in the files.
    """
    with failing_together(UserError):
        for name, parameter in parameters:
            with sources.files.held_open():
                _read(name, parameter, sources)


@torch.no_grad()
def _read(name: str, parameter: Tensor, sources: WeightSources) -> None:
    local = local_tensor(parameter.detach())
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * local.dim()), sizes=local.shape)
    if isinstance(parameter, DTensor):
        (chunk,) = parameter.__create_chunk_list__()
    if not local.numel():
        return

    def read(piece: Piece, begins: Sequence[int], sizes: Sequence[int]) -> Tensor:
        # Moved in the file's dtype: fewer bytes, and no second copy on the host.
        if piece.is_transposed:
            begins, sizes = ((*each[:-2], each[-1], each[-2]) for each in (begins, sizes))
            return sources.files.read(piece.name, begins, sizes, local.device).transpose(-1, -2)
        stacked = len(begins) - len(piece.shape)  # the dimension of the experts, which the file's tensors lack
        return sources.files.read(piece.name, begins[stacked:], sizes[stacked:], local.device)

    repeat = sources.repeats.get(name)
    for piece in sources.pieces[name]:
        begins = [max(pair) for pair in zip(chunk.offsets, piece.offsets, strict=True)]
        here, there = _ends(chunk.offsets, chunk.sizes), _ends(piece.offsets, piece.sizes)
        sizes = [min(ends) - begin for begin, *ends in zip(begins, here, there, strict=True)]
        if min(sizes, default=1) <= 0:
            continue
        inside = [begin - offset for begin, offset in zip(begins, piece.offsets, strict=True)]
        where = [begin - offset for begin, offset in zip(begins, chunk.offsets, strict=True)]
        part = local[tuple(slice(begin, begin + size) for begin, size in zip(where, sizes, strict=True))]
        part.copy_(read(piece, inside, sizes).view(part.shape))
        if repeat is not None and not torch.equal(
            part, read(replace(piece, name=repeat), inside, sizes).to(part.dtype)
        ):
            raise UserError(
                f"The files of the model have {piece.name} and {repeat} with different values, but its config ties "
                "them; set policy.hf_config_overrides.tie_word_embeddings=false to train both"
            )


def _ends(offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [offset + size for offset, size in zip(offsets, sizes, strict=True)]
