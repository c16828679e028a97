"""The families of models that are trained: one record each, with what cannot be asked of `transformers`.

A model itself says where its layers, its embedding and its head are, and how tensor parallelism splits them; its
config.json says its sizes (`shape.py`). The records say who trains a family, and what needs care. Rules read them
before Ray starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DTENSOR, MEGATRON = "dtensor", "megatron"

type ModelConfig = Mapping[str, Any]
"""The contents of a config.json, overrides included."""


@dataclass(frozen=True)
class Refusal:
    """A setting of config.json for which a backend would compute another function than the model's.

    Attributes:
        key: Its name.
        accepted: Values that are trained; None stands for a config.json without the key too.
        reason: What follows the value in the message.
    """

    key: str
    accepted: tuple[object, ...]
    reason: str

    def problem(self, config: ModelConfig) -> str | None:
        """Why the model is refused, or None."""
        value = config.get(self.key)
        return None if value in self.accepted else f"{self.key} {json.dumps(value)}, {self.reason}"


def _no_window(config: ModelConfig) -> bool:
    return False


def _window_by_layer(config: ModelConfig) -> bool:
    if config.get("layer_types") is not None:
        return "sliding_attention" in config["layer_types"]
    # As transformers fills `layer_types` of the Qwen families.
    is_used = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    return is_used and config.get("max_window_layers", 0) < config.get("num_hidden_layers", 0)


def _window_everywhere(config: ModelConfig) -> bool:
    return config.get("sliding_window") is not None


@dataclass(frozen=True)
class ModelFamily:
    """One architecture.

    Attributes:
        model_type: As config.json names it.
        trained_by: Backends whose logprobs, gradients and exports are tested against Hugging Face.
        has_window: Whether a model of the family has layers that attend to the last tokens only.
        windows_trained_by: Those of `trained_by` that compute such layers.
        logits_divisor: Key of config.json with what the output layer's logits are divided by; None for nothing.
        refused: By backend, settings with which it does not train the family.
    """

    model_type: str
    trained_by: tuple[str, ...]
    has_window: Callable[[ModelConfig], bool] = _no_window
    windows_trained_by: tuple[str, ...] = (DTENSOR,)
    logits_divisor: str | None = None
    refused: Mapping[str, tuple[Refusal, ...]] = field(default_factory=dict)


_BIAS_LEFT_OUT = "whose biases that backend would leave out"
_ATTENTION_BIAS = Refusal("attention_bias", (None, False), _BIAS_LEFT_OUT)
_MLP_BIAS = Refusal("mlp_bias", (None, False), _BIAS_LEFT_OUT)
_DENSE_LAYERS = tuple(
    Refusal(key, accepted, "and that backend has experts in every layer")
    for key, accepted in (("mlp_only_layers", (None, [])), ("decoder_sparse_step", (None, 1)))
)

FAMILIES: Mapping[str, ModelFamily] = {
    family.model_type: family
    for family in (
        ModelFamily("granite", (DTENSOR,), logits_divisor="logits_scaling"),
        ModelFamily("llama", (DTENSOR, MEGATRON), refused={MEGATRON: (_ATTENTION_BIAS, _MLP_BIAS)}),
        ModelFamily(
            "mistral",
            (DTENSOR, MEGATRON),
            has_window=_window_everywhere,
            windows_trained_by=(DTENSOR, MEGATRON),
            refused={MEGATRON: (_ATTENTION_BIAS,)},
        ),
        ModelFamily("olmo2", (DTENSOR,)),
        ModelFamily("qwen2", (DTENSOR, MEGATRON), has_window=_window_by_layer),
        ModelFamily("qwen3", (DTENSOR, MEGATRON), has_window=_window_by_layer, refused={MEGATRON: (_ATTENTION_BIAS,)}),
        ModelFamily(
            "qwen3_moe",
            (MEGATRON,),
            has_window=_window_by_layer,
            refused={MEGATRON: (_ATTENTION_BIAS, *_DENSE_LAYERS)},
        ),
        ModelFamily("smollm3", (DTENSOR,), has_window=_window_by_layer),
    )
}
"""By model type."""


def unsupported_family(config: ModelConfig, backend: str) -> str | None:
    """Why a backend does not train models of this type, or None.

    Args:
        config: The contents of a config.json.
        backend: `DTENSOR` or `MEGATRON`.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and backend in family.trained_by:
        return None
    trained = ", ".join(name for name, known in FAMILIES.items() if backend in known.trained_by)
    return f"model_type {config.get('model_type')}, and that backend trains {trained}"


def unsupported_settings(config: ModelConfig, backend: str) -> str | None:
    """Which setting of a family that is trained a backend refuses, and why, or None."""
    if config.get("quantization_config"):
        return "quantization_config, and that backend reads no quantized weights"
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    if backend not in family.windows_trained_by and family.has_window(config):
        return "layers with a sliding window, which that backend would leave out"
    problems = (refusal.problem(config) for refusal in family.refused.get(backend, ()))
    return next((problem for problem in problems if problem is not None), None)


def has_sliding_window(config: ModelConfig) -> bool:
    """Whether some layers attend to the last tokens only."""
    family = FAMILIES.get(str(config.get("model_type")))
    return (_window_by_layer if family is None else family.has_window)(config)


def logits_divisor(config: ModelConfig) -> float:
    """What the output layer's logits are divided by."""
    family = FAMILIES.get(str(config.get("model_type")))
    return 1.0 if family is None or family.logits_divisor is None else float(config[family.logits_divisor])
