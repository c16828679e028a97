"""Model FLOPs utilisation: the share of a GPU's arithmetic that a step uses, estimated from the model's sizes.

Products with weights and inside attention count, a multiplication and an addition as two; recomputed activations do
not, as usual for this figure (arXiv 2204.02311, appendix B). Of a mixture's experts only those that a token goes
through count. The output layer counts for every token, though prompts need no logits.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.models.towers import PART_OF, is_of_towers, language_config, place_in_whole

# Dense bf16 FLOP/s by a part of the GPU's name, from data sheets of NVIDIA.
_PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12}

_EXPERTS = ".experts."  # in names of their weights
_OUTPUT = "lm_head.weight"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_PREDICTING = "mtp."  # names of layers that predict further tokens begin with this, or have a number after the last


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model for the count."""

    num_parameters: int
    num_active: int  # parameters that a token goes through: all except a mixture's other experts
    num_layers: int
    attention_width: int  # heads times their size
    num_in_experts: int = 0  # parameters of a mixture's experts, shared ones aside
    ties_embeddings: bool = False  # the output layer's matrix is the embedding's

    def forward_flops(self, lengths: Sequence[int]) -> float:
        """FLOPs of one forward pass over sequences of these lengths, each attending to itself."""
        weights = 2.0 * self.num_active * sum(lengths)
        # Two products of [length, length] with the heads; causal masks leave half of them.
        attention = 2.0 * self.num_layers * self.attention_width * sum(length**2 for length in lengths)
        return weights + attention


def read_model_sizes(model_name: str) -> ModelSizes | None:
    """Sizes of a local Hugging Face folder with safetensors, without reading weights; None for anything else.

    Of a folder that reads images too, they are the language model's.
    """
    folder = Path(model_name)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the check of the folder reports it
        return None
    if not isinstance(config, dict):
        return None
    try:
        tensors, language = list(_tensors(files)), language_config(config)
        if PART_OF in language:
            place = place_in_whole(name for name, _ in tensors)
            tensors = [it for it in tensors if not is_of_towers(it[0], place)]
        return count_sizes(language, tensors)
    except (OSError, SafetensorError):  # the check of the weights reports it
        return None


def count_sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> ModelSizes | None:
    """Count the parameters of a model; None if its config.json does not tell its layers.

    Files may have more than the model: a tied output layer, which is counted once, and layers that predict further
    tokens, which are neither loaded nor trained.

    Args:
        config: Contents of its config.json.
        tensors: Name and number of elements of each tensor.
    """
    shape = ModelShape.of(config)
    if shape.num_layers is None or shape.num_heads is None or shape.head_dim is None:
        return None
    active_share = shape.num_active_experts / shape.num_experts if shape.num_experts else 1.0
    num_dense = num_in_experts = num_active = 0
    ties_embeddings, has_output = bool(config.get("tie_word_embeddings")), False
    for name, num_elements in tensors:
        has_output |= name.endswith(_OUTPUT)
        layer = _LAYER.search(name)
        if (
            (name.endswith(_OUTPUT) and ties_embeddings)
            or name.startswith(_PREDICTING)
            or (layer is not None and int(layer[1]) >= shape.num_layers)
        ):
            continue
        if _EXPERTS in name:
            num_in_experts += num_elements
            num_active += round(num_elements * active_share)
        else:
            num_dense += num_elements
    width = shape.num_heads * shape.head_dim
    return ModelSizes(
        num_parameters=num_dense + num_in_experts,
        num_active=num_dense + num_active,
        num_layers=shape.num_layers,
        attention_width=width,
        num_in_experts=num_in_experts,
        ties_embeddings=ties_embeddings or not has_output,
    )


def _tensors(files: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """(name, number of elements), from the files' headers."""
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                yield name, math.prod(opened.get_slice(name).get_shape())


def peak_flops(gpu_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU; None for one that is not in the table."""
    return next((peak for part, peak in _PEAKS.items() if part in gpu_name), None)


@dataclass(frozen=True)
class ModelSpeed:
    """A model's sizes, and the peak of the GPUs that train it."""

    sizes: ModelSizes
    peak_flops: float  # of all GPUs that train, together

    def training_mfu(self, lengths: Sequence[int], seconds: float) -> float:
        """Share of the peak that forward and backward over these sequences used: three forward passes' worth."""
        return 3 * self.sizes.forward_flops(lengths) / (seconds * self.peak_flops)


def read_model_speed(model_name: str, gpu_name: str | None, num_gpus: int) -> ModelSpeed | None:
    """The speed of a run's model; None if its sizes or the GPU's peak are unknown."""
    sizes, peak = read_model_sizes(model_name), peak_flops(gpu_name) if gpu_name else None
    return None if sizes is None or peak is None else ModelSpeed(sizes, peak * num_gpus)
