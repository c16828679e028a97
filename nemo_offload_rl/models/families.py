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

from nemo_offload_rl.models.rope import rope_type

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


def _window_in_some_layers(config: ModelConfig) -> bool:
    if config.get("layer_types") is not None:
        return len(set(config["layer_types"])) > 1
    return _window_by_layer(config) and config.get("max_window_layers", 0) > 0


def _window_unless_types_say_no(config: ModelConfig) -> bool:
    types = config.get("layer_types")
    return config.get("sliding_window") is not None and (types is None or "sliding_attention" in types)


def _window_everywhere(config: ModelConfig) -> bool:
    return config.get("sliding_window") is not None


def _all_served(config: ModelConfig) -> str | None:
    return None


def _windows_in_all_layers_or_none(config: ModelConfig) -> str | None:
    if not _window_in_some_layers(config):
        return None
    return "layers with a sliding window beside layers without, which the engine does not serve of its family"


def _gpt_oss_as_published(config: ModelConfig) -> str | None:
    types, turns = config.get("layer_types"), ("sliding_attention", "full_attention")
    if types is not None and list(types) != [turns[layer % 2] for layer in range(len(types))]:
        return "layer_types other than sliding_attention and full_attention in turns, which the engine takes them to be"
    if rope_type(config) != "yarn":
        return f"rope_type {rope_type(config)}, where the engine knows yarn alone for its family"
    return None


@dataclass(frozen=True)
class ModelFamily:
    """One architecture.

    Attributes:
        model_type: As config.json names it.
        title: What people call its models, for docs/reference/models.md.
        trained_by: Backends whose logprobs, gradients and exports are tested against Hugging Face.
        has_window: Whether a model of the family has layers that attend to the last tokens only.
        windows_trained_by: Those of `trained_by` that compute such layers.
        unserved: What of a config vLLM 0.25.1 does not serve, or None.
        logits_divisor: Key of config.json with what the output layer's logits are divided by; None for nothing.
        has_expert_bias: Whether a bias of each expert takes part in choosing experts.
        activations: Values of hidden_act that the Megatron backend computes.
        unsplit_by: Those of `trained_by` that keep each layer whole, without tensor parallelism.
        rotates_part: Whether partial_rotary_factor has the first part of each head rotated only.
        logits_factor: Key of config.json with what they are multiplied by; None for nothing.
        logits_softcap: Key of config.json with c where they become c tanh(logits / c); None for nothing.
        attention_softcap: The same for attention scores before the softmax.
        has_sinks: Whether the softmax of attention scores has a learned score more for each head.
        tells_attention_bounds: Whether transformers' model tells its attention where the rows of a packed row begin.
        refused: By backend, settings with which it does not train the family.
    """

    model_type: str
    title: str
    trained_by: tuple[str, ...]
    has_window: Callable[[ModelConfig], bool] = _no_window
    windows_trained_by: tuple[str, ...] = (DTENSOR,)
    unserved: Callable[[ModelConfig], str | None] = _all_served
    logits_divisor: str | None = None
    has_expert_bias: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    unsplit_by: tuple[str, ...] = ()
    rotates_part: bool = False
    logits_factor: str | None = None
    logits_softcap: str | None = None
    attention_softcap: str | None = None
    has_sinks: bool = False
    tells_attention_bounds: bool = True
    refused: Mapping[str, tuple[Refusal, ...]] = field(default_factory=dict)


_NOT_IN_ENGINE = "which the engine would leave out"
_BIAS_LEFT_OUT = "whose biases that backend would leave out"
_ATTENTION_BIAS = Refusal("attention_bias", (None, False), _BIAS_LEFT_OUT)
_MLP_BIAS = Refusal("mlp_bias", (None, False), _BIAS_LEFT_OUT)
_DEEPSEEK = (
    Refusal("attention_bias", (None, False), _NOT_IN_ENGINE),
    Refusal("moe_layer_freq", (None, 1), "where the model library takes 1"),
    Refusal("rope_interleave", (None, True), "where the engine takes pairs that are neighbours"),
    Refusal("scoring_func", ("sigmoid",), "where the model library takes sigmoid"),
    Refusal("tie_word_embeddings", (None, False), "where the engine would have two matrices"),
    Refusal("topk_method", ("noaux_tc",), "where the model library takes noaux_tc"),
)
_GPT_OSS = (
    Refusal("attention_bias", (None, True), "and the engine has biases of all projections"),
    Refusal("rms_norm_eps", (None, 1e-5), "for which the engine would take 1e-05"),
    Refusal("tie_word_embeddings", (None, False), "where the engine would have two matrices"),
)
_OLMOE = (
    Refusal("attention_bias", (None, False), _NOT_IN_ENGINE),
    Refusal("clip_qkv", (None,), _NOT_IN_ENGINE),
    Refusal("norm_topk_prob", (None, False), _NOT_IN_ENGINE),
    Refusal("rms_norm_eps", (None, 1e-5), "for which the engine would take 1e-05"),
    Refusal("tie_word_embeddings", (None, False), "where the engine would have two matrices"),
)

FAMILIES: Mapping[str, ModelFamily] = {
    family.model_type: family
    for family in (
        ModelFamily("arcee", "Arcee", (DTENSOR,)),
        ModelFamily("cohere", "Command R", (DTENSOR,), logits_factor="logit_scale"),
        ModelFamily(
            "cohere2",
            "Command R7B, Command A",
            (DTENSOR,),
            has_window=_window_unless_types_say_no,
            logits_factor="logit_scale",
        ),
        ModelFamily("cwm", "CWM", (DTENSOR,), has_window=_window_unless_types_say_no),
        ModelFamily(
            "deepseek_v3",
            "DeepSeek-V3, Moonlight",
            (DTENSOR, MEGATRON),
            has_expert_bias=True,
            refused={DTENSOR: _DEEPSEEK, MEGATRON: _DEEPSEEK},
        ),
        ModelFamily("ernie4_5", "ERNIE 4.5", (DTENSOR,)),
        ModelFamily("exaone4", "EXAONE 4", (DTENSOR,), has_window=_window_unless_types_say_no),
        ModelFamily(
            "exaone_moe",
            "K-EXAONE",
            (MEGATRON,),
            has_window=_window_unless_types_say_no,
            windows_trained_by=(MEGATRON,),
            has_expert_bias=True,
            refused={MEGATRON: (Refusal("norm_topk_prob", (None, True), "and that backend normalizes them"),)},
        ),
        ModelFamily("gemma", "Gemma", (DTENSOR, MEGATRON), activations=("gelu_pytorch_tanh",)),
        ModelFamily(
            "gemma2",
            "Gemma 2",
            (DTENSOR,),
            has_window=_window_unless_types_say_no,
            logits_softcap="final_logit_softcapping",
            attention_softcap="attn_logit_softcapping",
        ),
        ModelFamily(
            "gemma3_text",
            "Gemma 3 (text)",
            (DTENSOR,),
            has_window=_window_unless_types_say_no,
            logits_softcap="final_logit_softcapping",
            refused={DTENSOR: (Refusal("attn_logit_softcapping", (None,), _NOT_IN_ENGINE),)},
        ),
        ModelFamily("glm", "GLM-4-9B, GLM-Edge", (DTENSOR,)),
        ModelFamily("glm4", "GLM-4-0414", (DTENSOR,)),
        ModelFamily("glm4_moe", "GLM-4.5", (DTENSOR, MEGATRON), has_expert_bias=True, rotates_part=True),
        ModelFamily(
            "gpt_oss",
            "gpt-oss (16-bit folders)",
            (DTENSOR, MEGATRON),
            has_window=_window_everywhere,
            windows_trained_by=(DTENSOR, MEGATRON),
            unserved=_gpt_oss_as_published,
            has_sinks=True,
            refused={DTENSOR: _GPT_OSS, MEGATRON: _GPT_OSS},
        ),
        ModelFamily("granite", "Granite", (DTENSOR,), logits_divisor="logits_scaling"),
        ModelFamily(
            "hunyuan_v1_dense",
            "Hunyuan (dense)",
            (DTENSOR,),
            refused={
                DTENSOR: (Refusal("use_qk_norm", (True,), "without which the engine has no norms of queries and keys"),)
            },
        ),
        ModelFamily(
            "hy_v3",
            "Hunyuan 3",
            (MEGATRON,),
            has_expert_bias=True,
            refused={MEGATRON: (_ATTENTION_BIAS, _MLP_BIAS)},
        ),
        ModelFamily("hyperclovax", "HyperCLOVA X", (DTENSOR,), logits_factor="logits_scaling"),
        ModelFamily("jais2", "Jais 2", (DTENSOR,)),
        ModelFamily("llama", "Llama 2, 3", (DTENSOR, MEGATRON), refused={MEGATRON: (_ATTENTION_BIAS, _MLP_BIAS)}),
        ModelFamily(
            "mistral",
            "Mistral",
            (DTENSOR, MEGATRON),
            has_window=_window_everywhere,
            windows_trained_by=(DTENSOR, MEGATRON),
            refused={MEGATRON: (_ATTENTION_BIAS,)},
        ),
        ModelFamily("mixtral", "Mixtral", (DTENSOR,), has_window=_window_everywhere),
        ModelFamily(
            "nemotron",
            "Nemotron",
            (MEGATRON,),
            activations=("relu2",),
            rotates_part=True,
            refused={MEGATRON: (_ATTENTION_BIAS, _MLP_BIAS)},
        ),
        ModelFamily("olmo2", "OLMo 2", (DTENSOR,)),
        ModelFamily(
            "olmoe",
            "OLMoE",
            (DTENSOR, MEGATRON),
            unsplit_by=(MEGATRON,),
            refused={DTENSOR: _OLMOE, MEGATRON: _OLMOE},
        ),
        ModelFamily("olmo3", "OLMo 3", (DTENSOR,), has_window=_window_unless_types_say_no),
        ModelFamily("phi3", "Phi-3, Phi-4", (DTENSOR,), has_window=_window_everywhere),
        ModelFamily(
            "qwen2",
            "Qwen2, Qwen2.5",
            (DTENSOR, MEGATRON),
            has_window=_window_by_layer,
            unserved=_windows_in_all_layers_or_none,
        ),
        ModelFamily(
            "qwen2_moe",
            "Qwen1.5-MoE, Qwen2-MoE",
            (DTENSOR,),
            refused={
                DTENSOR: (
                    Refusal("use_sliding_window", (None, False), "whose windows the engine puts elsewhere"),
                    Refusal("qkv_bias", (None, True), "and the engine has biases of queries, keys and values"),
                )
            },
        ),
        ModelFamily(
            "qwen3", "Qwen3", (DTENSOR, MEGATRON), has_window=_window_by_layer, refused={MEGATRON: (_ATTENTION_BIAS,)}
        ),
        ModelFamily(
            "qwen3_moe",
            "Qwen3-MoE",
            (DTENSOR, MEGATRON),
            has_window=_window_by_layer,
            refused={MEGATRON: (_ATTENTION_BIAS,)},
        ),
        ModelFamily("seed_oss", "Seed-OSS", (DTENSOR,)),
        ModelFamily("smollm3", "SmolLM3", (DTENSOR,), has_window=_window_by_layer),
        ModelFamily(
            "stablelm",
            "StableLM 2",
            (DTENSOR,),
            tells_attention_bounds=False,
            refused={
                DTENSOR: tuple(
                    Refusal(key, (None, False), _NOT_IN_ENGINE) for key in ("qk_layernorm", "use_parallel_residual")
                )
            },
        ),
        ModelFamily("starcoder2", "StarCoder 2", (DTENSOR,), has_window=_window_everywhere),
    )
}
"""By model type."""


def refused_settings(family: ModelFamily, backend: str) -> list[str]:
    """What a backend refuses of a family that it trains, in a few words each."""
    windows = family.has_window is not _no_window and backend not in family.windows_trained_by
    keys = [f"`{refusal.key}`" for refusal in family.refused.get(backend, ())]
    return (["sliding windows"] if windows else []) + keys


def unsupported_family(config: ModelConfig, backend: str) -> str | None:
    """Why a backend does not train models of this type, or None.

    Args:
        config: The contents of a config.json.
        backend: `DTENSOR` or `MEGATRON`.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and backend in family.trained_by:
        return None
    text = config.get("text_config")
    if (
        isinstance(text, Mapping)
        and (inner := FAMILIES.get(str(text.get("model_type"))))
        and backend in inner.trained_by
    ):
        return (
            f"model_type {config.get('model_type')}, which reads more than text, and that backend trains the language "
            f"model alone, a folder of model_type {inner.model_type}"
        )
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


def unserved(config: ModelConfig) -> str | None:
    """What of the config vLLM 0.25.1 does not serve, or None."""
    family = FAMILIES.get(str(config.get("model_type")))
    return None if family is None else family.unserved(config)


def has_sliding_window(config: ModelConfig) -> bool:
    """Whether some layers attend to the last tokens only."""
    family = FAMILIES.get(str(config.get("model_type")))
    return (_window_by_layer if family is None else family.has_window)(config)


def has_expert_bias(config: ModelConfig) -> bool:
    """Whether a bias of each expert takes part in choosing experts."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.has_expert_bias


def rotates_part(config: ModelConfig) -> bool:
    """Whether partial_rotary_factor counts in models of this type."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.rotates_part


def has_attention_sinks(config: ModelConfig) -> bool:
    """Whether the softmax of attention scores has a learned score more for each head."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.has_sinks


def tells_attention_bounds(config: ModelConfig) -> bool:
    """Whether transformers' model tells its attention where the rows of a packed row begin."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is None or family.tells_attention_bounds


def logits_divisor(config: ModelConfig) -> float:
    """What the output layer's logits are divided by."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return 1.0
    if family.logits_factor is not None:
        return 1 / float(config[family.logits_factor])
    return 1.0 if family.logits_divisor is None else float(config[family.logits_divisor])


def logits_softcap(config: ModelConfig) -> float | None:
    """The c of c tanh(logits / c) that the output layer's logits become, before `logits_divisor`; None for nothing."""
    family = FAMILIES.get(str(config.get("model_type")))
    return None if family is None else _positive(config, family.logits_softcap)


def attention_softcap(config: ModelConfig) -> float | None:
    """The same of attention scores."""
    family = FAMILIES.get(str(config.get("model_type")))
    return None if family is None else _positive(config, family.attention_softcap)


def _positive(config: ModelConfig, key: str | None) -> float | None:
    value = None if key is None else config.get(key)
    return None if value is None else float(value)
