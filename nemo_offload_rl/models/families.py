"""Records of the families of models that are trained, with facts that `transformers` does not have.

The model itself has its layers, embedding and head, and how tensor parallelism splits them; its config.json has its
sizes (`shape.py`). A record has the backends that train a family, and the settings that they refuse. Rules read the
records before Ray starts.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nemo_offload_rl.models import windows
from nemo_offload_rl.models.rope import rope_type, rotated_parts, uncomputed_rope
from nemo_offload_rl.models.towers import PART_OF
from nemo_offload_rl.models.windows import ModelConfig

DTENSOR, MEGATRON = "dtensor", "megatron"
_DRAWS = ("dropout", "drop", "pdrop", "jitter_noise")  # ends of keys for random changes in training


@dataclass(frozen=True)
class Refusal:
    """A setting of config.json with which a backend would compute something else than the model.

    Attributes:
        key: Its name.
        accepted: Values that are trained; None also stands for a config.json without the key.
        reason: The text after the value in the message.
        refused: If given, the only values that are not trained; `accepted` is then not read.
    """

    key: str
    accepted: tuple[object, ...]
    reason: str
    refused: tuple[object, ...] = ()

    def problem(self, config: ModelConfig) -> str | None:
        """Return the reason to refuse a model, or None."""
        value = config.get(self.key)
        if isinstance(value, list) and value and value == [value[0]] * len(value):  # the same in all layers
            value = value[0]
        if value not in self.refused if self.refused else value in self.accepted:
            return None
        return f"{self.key} {json.dumps(value)}, {self.reason}"


@dataclass(frozen=True)
class ModelFamily:
    """One architecture.

    Attributes:
        model_type: Its name in config.json.
        title: Common name of its models, for docs/reference/models.md.
        trained_by: Backends whose logprobs, gradients and exports are tested against Hugging Face.
        has_window: Tells whether a model has layers that attend only to the last tokens.
        windows_trained_by: Backends of `trained_by` that compute such layers.
        logits_divisor: Key of config.json with the divisor of the output layer's logits; None for none.
        has_expert_bias: Whether a bias of each expert takes part in choosing experts.
        activations: Values of `activation_key` that the Megatron backend and the engine compute; empty for all.
        activation_key: Key of config.json with the activation function of MLPs.
        unsplit_by: Backends of `trained_by` without tensor parallelism.
        rotates_part: Whether partial_rotary_factor restricts rotation to the first part of each head.
        ropes_by_layer_type: Whether `rope_parameters` can have settings for each type of layers.
        scales_full_layers_only: Whether layers with a window always have plain rotary embeddings.
        logits_factor: Key of config.json with the factor of the logits; None for none.
        logits_softcap: Key of config.json with c of c tanh(logits / c); None for none.
        attention_softcap: The same for attention scores before the softmax.
        has_sinks: Whether the softmax of attention scores has one more, learned score for each head.
        tells_attention_bounds: Whether transformers' model tells its attention where the rows of a packed row begin.
        masks_packed_rows: Whether transformers' model makes its masks of packed rows from positions.
        is_served: Whether vLLM 0.25.1 has the family.
        mends_latent_attention: Whether transformers' latent attention leaves out YaRN's factor of scores, or has norms
            of latent states with another epsilon than the model's.
        state_mixer: End of the class names of transformers' modules that carry a state along a row (linear attention,
            Mamba, short convolutions); None without.
        serves_adapters: Whether vLLM 0.25.1 applies adapters to all linear layers of a dense model of the family.
        refused: By backend, the settings that it refuses.
    """

    model_type: str
    title: str
    trained_by: tuple[str, ...]
    has_window: Callable[[ModelConfig], bool] = windows.nowhere
    windows_trained_by: tuple[str, ...] = (DTENSOR,)
    logits_divisor: str | None = None
    has_expert_bias: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    activation_key: str = "hidden_act"
    unsplit_by: tuple[str, ...] = ()
    rotates_part: bool = False
    ropes_by_layer_type: bool = False
    scales_full_layers_only: bool = False
    logits_factor: str | None = None
    logits_softcap: str | None = None
    attention_softcap: str | None = None
    has_sinks: bool = False
    tells_attention_bounds: bool = True
    masks_packed_rows: bool = True
    is_served: bool = True
    mends_latent_attention: bool = False
    state_mixer: str | None = None
    serves_adapters: bool = True
    refused: Mapping[str, tuple[Refusal, ...]] = field(default_factory=dict)


_NOT_IN_ENGINE = "which the engine would leave out"
_BIAS_LEFT_OUT = "whose biases that backend would leave out"
_ATTENTION_BIAS = Refusal("attention_bias", (None, False), _BIAS_LEFT_OUT)
_MLP_BIAS = Refusal("mlp_bias", (None, False), _BIAS_LEFT_OUT)
_AS_MINISTRAL = Refusal("layer_types", (None,), "for which the model library would load it as model_type ministral")
_NORMALIZED = Refusal("norm_topk_prob", (None, True), "but that backend normalizes the weights of experts")
_SCALED = Refusal("routed_scaling_factor", (None, 1), "which only that backend would apply")
_DEEPSEEK = (
    Refusal("attention_bias", (None, False), _NOT_IN_ENGINE),
    Refusal("moe_layer_freq", (None, 1), "but the model library takes 1"),
    Refusal("rope_interleave", (None, True), "but the engine rotates pairs of neighbours"),
    Refusal("scoring_func", ("sigmoid",), "but the model library takes sigmoid"),
    Refusal("tie_word_embeddings", (None, False), "but the engine would have two matrices"),
    Refusal("topk_method", ("noaux_tc",), "but the model library takes noaux_tc"),
)
_AFMOE = (
    Refusal("n_group", (None, 1), "but the model library has no groups of experts"),
    Refusal("route_norm", (None, True), "but the model library normalizes the weights of experts"),
    Refusal("score_func", (None, "sigmoid"), "but the model library takes sigmoid"),
)
_DEEPSEEK_V2 = (
    Refusal("moe_layer_freq", (None, 1), "but the model library takes 1"),
    Refusal("norm_topk_prob", (None, False), "but the model library leaves the weights of experts as they are"),
    Refusal("scoring_func", (None, "softmax"), "but the model library takes softmax"),
    Refusal("topk_method", (None, "greedy"), "but the model library computes only greedy"),
)
_MINIMAX_M2 = (
    Refusal("qk_norm_type", (None, "per_layer"), "but the model library takes per_layer"),
    Refusal("scoring_func", (None, "sigmoid"), "but the model library takes sigmoid"),
    Refusal("shared_intermediate_size", (None, 0), "but the model library has no shared experts in its family"),
    Refusal("use_qk_norm", (None, True), "but the model library has norms of queries and keys"),
    Refusal("use_routing_bias", (None, True), "but the model library chooses experts with a bias"),
)
_HUNYUAN_MOE = (
    Refusal("norm_topk_prob", (None, True), "but the model library normalizes the weights of experts"),
    Refusal("num_shared_expert", (None, 1), "but the model library has one shared expert"),
    Refusal("use_cla", (None, False), "but the model library has keys and values in every layer"),
    Refusal("use_mixed_mlp_moe", (None, True), "but the model library has a shared expert"),
    Refusal("use_qk_norm", (None, True), "but the model library has norms of queries and keys"),
)
_GEMMA_4 = (
    Refusal("use_bidirectional_attention", (None, False, "vision"), "but tokens of that backend see no later ones"),
)
_ONE_DENSE_LAYER = Refusal("first_k_dense_replace", (None, 1), "but the model library takes 1")
_GPT_OSS = (
    Refusal("attention_bias", (None, True), "but the engine has biases in all projections"),
    Refusal("rms_norm_eps", (None, 1e-5), "but the engine takes 1e-05"),
    Refusal("tie_word_embeddings", (None, False), "but the engine would have two matrices"),
)
_NEMOTRON_H = (
    Refusal("attention_bias", (None, False), "but the model library has no biases of attention"),
    Refusal("residual_in_fp32", (None, False), "but the model library adds in the type of the model"),
    Refusal("sliding_window", (None,), "but the model library has no windows"),
)
_NEMOTRON_H_SIZES = (
    Refusal("conv_kernel", (None, 4), "but that backend has convolutions of 4"),
    Refusal("layer_norm_epsilon", (None, 1e-5), "but that backend has norms of 1e-05 in Mamba layers"),
    Refusal("mamba_hidden_act", (None, "silu"), "but that backend computes silu in Mamba layers"),
    Refusal("mamba_proj_bias", (None, False), _BIAS_LEFT_OUT),
    Refusal("mlp_bias", (None, False), _BIAS_LEFT_OUT),
    Refusal("mlp_hidden_act", (None, "relu2"), "but that backend computes relu2"),
    Refusal("n_shared_experts", (None, 1), "whose sizes that backend would not add up"),
    Refusal("time_step_limit", (None, [0.0, math.inf], (0.0, math.inf)), "which that backend would leave out"),
    Refusal("use_bias", (None, False), _BIAS_LEFT_OUT),
    Refusal("use_conv_bias", (None, True), "but that backend has biases of convolutions"),
)
_OLMOE = (
    Refusal("attention_bias", (None, False), _NOT_IN_ENGINE),
    Refusal("clip_qkv", (None,), _NOT_IN_ENGINE),
    Refusal("norm_topk_prob", (None, False), _NOT_IN_ENGINE),
    Refusal("rms_norm_eps", (None, 1e-5), "but the engine takes 1e-05"),
    Refusal("tie_word_embeddings", (None, False), "but the engine would have two matrices"),
)
_QWEN3_5 = (Refusal("attn_output_gate", (None, True), "but the model library has output gates of attention"),)
_ALL_MIXTURES = (
    Refusal("decoder_sparse_step", (None, 1), "but that backend has experts in every layer"),
    Refusal("mlp_only_layers", (None, []), "but that backend has experts in every layer"),
)
_NORMALIZES = Refusal("norm_topk_prob", (None, True), "but the model library normalizes the weights of experts")

FAMILIES: Mapping[str, ModelFamily] = {
    family.model_type: family
    for family in (
        ModelFamily(
            "afmoe",
            "Trinity",
            (DTENSOR,),
            has_window=windows.unless_types_say_no,
            masks_packed_rows=False,
            has_expert_bias=True,
            refused={DTENSOR: _AFMOE},
        ),
        ModelFamily("arcee", "Arcee", (DTENSOR,), activations=("relu2",)),
        ModelFamily("cohere", "Command R", (DTENSOR,), logits_factor="logit_scale"),
        ModelFamily(
            "cohere2",
            "Command R7B, Command A",
            (DTENSOR,),
            has_window=windows.unless_types_say_no,
            logits_factor="logit_scale",
        ),
        ModelFamily("cwm", "CWM", (DTENSOR,), has_window=windows.unless_types_say_no),
        ModelFamily(
            "deepseek_v2",
            "DeepSeek-V2-Lite",
            (DTENSOR, MEGATRON),
            mends_latent_attention=True,
            refused={DTENSOR: _DEEPSEEK_V2, MEGATRON: _DEEPSEEK_V2},
        ),
        ModelFamily(
            "deepseek_v3",
            "DeepSeek-V3, Moonlight",
            (DTENSOR, MEGATRON),
            has_expert_bias=True,
            refused={DTENSOR: _DEEPSEEK, MEGATRON: (*_DEEPSEEK, _NORMALIZED)},
        ),
        ModelFamily(
            "dots1",
            "dots.llm1",
            (DTENSOR,),
            has_window=windows.unless_types_say_no,
            has_expert_bias=True,
            is_served=False,
        ),
        ModelFamily("ernie4_5", "ERNIE 4.5", (DTENSOR,)),
        ModelFamily("ernie4_5_moe", "ERNIE 4.5 (experts)", (DTENSOR,), has_expert_bias=True),
        ModelFamily("exaone4", "EXAONE 4", (DTENSOR,), has_window=windows.unless_types_say_no),
        ModelFamily(
            "exaone_moe",
            "K-EXAONE",
            (DTENSOR, MEGATRON),
            has_window=windows.unless_types_say_no,
            windows_trained_by=(DTENSOR, MEGATRON),
            has_expert_bias=True,
            refused={MEGATRON: (_NORMALIZED,)},
        ),
        ModelFamily(
            "falcon_h1", "Falcon-H1", (DTENSOR,), logits_factor="lm_head_multiplier", state_mixer="FalconH1Mixer"
        ),
        ModelFamily(
            "gemma",
            "Gemma",
            (DTENSOR, MEGATRON),
            activations=("gelu_pytorch_tanh",),
            refused={
                MEGATRON: (
                    _ATTENTION_BIAS,
                    Refusal("tie_word_embeddings", (None, True), "but that backend has one matrix for both"),
                )
            },
        ),
        ModelFamily(
            "gemma2",
            "Gemma 2",
            (DTENSOR,),
            activations=("gelu_pytorch_tanh",),
            activation_key="hidden_activation",
            has_window=windows.unless_types_say_no,
            logits_softcap="final_logit_softcapping",
            attention_softcap="attn_logit_softcapping",
        ),
        ModelFamily(
            "gemma3_text",
            "Gemma 3 (text)",
            (DTENSOR,),
            activations=("gelu_pytorch_tanh",),
            activation_key="hidden_activation",
            has_window=windows.unless_types_say_no,
            ropes_by_layer_type=True,
            logits_softcap="final_logit_softcapping",
            refused={DTENSOR: (Refusal("attn_logit_softcapping", (None,), _NOT_IN_ENGINE),)},
        ),
        ModelFamily(
            "gemma4_text",
            "Gemma 4 (text)",
            (DTENSOR,),
            activations=("gelu_pytorch_tanh",),
            activation_key="hidden_activation",
            has_window=windows.unless_types_say_no,
            rotates_part=True,
            ropes_by_layer_type=True,
            logits_softcap="final_logit_softcapping",
            serves_adapters=False,
            refused={DTENSOR: _GEMMA_4},
        ),
        ModelFamily("glm", "GLM-4-9B, GLM-Edge", (DTENSOR,), rotates_part=True, serves_adapters=False),
        ModelFamily("glm4", "GLM-4-0414", (DTENSOR,), rotates_part=True, serves_adapters=False),
        ModelFamily(
            "glm4_moe",
            "GLM-4.5",
            (DTENSOR, MEGATRON),
            has_expert_bias=True,
            rotates_part=True,
            refused={
                MEGATRON: (
                    _NORMALIZED,
                    Refusal("tie_word_embeddings", (None, False), "but that backend has two matrices"),
                )
            },
        ),
        ModelFamily(
            "glm4_moe_lite",
            "GLM-4.7-Flash",
            (DTENSOR, MEGATRON),
            has_expert_bias=True,
            mends_latent_attention=True,
            refused={DTENSOR: (_ONE_DENSE_LAYER,), MEGATRON: (_ONE_DENSE_LAYER, _NORMALIZED)},
        ),
        ModelFamily(
            "gpt_oss",
            "gpt-oss",
            (DTENSOR, MEGATRON),
            has_window=windows.everywhere,
            windows_trained_by=(DTENSOR, MEGATRON),
            has_sinks=True,
            refused={DTENSOR: _GPT_OSS, MEGATRON: (*_GPT_OSS, _SCALED)},
        ),
        ModelFamily("granite", "Granite", (DTENSOR,), logits_divisor="logits_scaling"),
        ModelFamily(
            "granitemoehybrid",
            "Granite 4",
            (DTENSOR,),
            logits_divisor="logits_scaling",
            masks_packed_rows=False,
            state_mixer="MambaLayer",
        ),
        ModelFamily(
            "hunyuan_v1_dense",
            "Hunyuan (dense)",
            (DTENSOR,),
            refused={
                DTENSOR: (Refusal("use_qk_norm", (True,), "without which the engine has no norms of queries and keys"),)
            },
        ),
        ModelFamily("hunyuan_v1_moe", "Hunyuan-A13B", (DTENSOR,), refused={DTENSOR: _HUNYUAN_MOE}),
        ModelFamily(
            "hy_v3",
            "Hunyuan 3",
            (DTENSOR, MEGATRON),
            has_expert_bias=True,
            refused={MEGATRON: (_ATTENTION_BIAS, _MLP_BIAS)},
        ),
        ModelFamily("hyperclovax", "HyperCLOVA X", (DTENSOR,), logits_factor="logits_scaling"),
        ModelFamily("jais2", "Jais 2", (DTENSOR,), activations=("relu2",)),
        ModelFamily("lfm2", "LFM2", (DTENSOR,), activations=(), state_mixer="ShortConv"),
        ModelFamily(
            "lfm2_moe", "LFM2 mixtures", (DTENSOR,), activations=(), has_expert_bias=True, state_mixer="ShortConv"
        ),
        ModelFamily("llama", "Llama 2, 3", (DTENSOR, MEGATRON), refused={MEGATRON: (_ATTENTION_BIAS, _MLP_BIAS)}),
        ModelFamily(
            "minimax_m2",
            "MiniMax-M2",
            (DTENSOR, MEGATRON),
            has_expert_bias=True,
            rotates_part=True,
            unsplit_by=(MEGATRON,),
            refused={DTENSOR: _MINIMAX_M2, MEGATRON: _MINIMAX_M2},
        ),
        ModelFamily("ministral3", "Ministral 3 (text)", (DTENSOR,), has_window=windows.everywhere),
        ModelFamily(
            "mistral",
            "Mistral",
            (DTENSOR, MEGATRON),
            has_window=windows.everywhere,
            windows_trained_by=(DTENSOR, MEGATRON),
            refused={DTENSOR: (_AS_MINISTRAL,), MEGATRON: (_ATTENTION_BIAS, _AS_MINISTRAL)},
        ),
        ModelFamily("mixtral", "Mixtral", (DTENSOR,), has_window=windows.everywhere),
        ModelFamily(
            "nemotron",
            "Nemotron",
            (MEGATRON,),
            activations=("relu2",),
            rotates_part=True,
            refused={
                MEGATRON: (_ATTENTION_BIAS, _MLP_BIAS, Refusal("rms_norm_eps", (None,), "but the model has norm_eps"))
            },
        ),
        ModelFamily(
            "nemotron_h",
            "Nemotron-H, Nemotron 3",
            (DTENSOR, MEGATRON),
            activations=("relu2",),
            activation_key="mlp_hidden_act",
            has_expert_bias=True,
            state_mixer="Mamba2Mixer",
            refused={DTENSOR: _NEMOTRON_H, MEGATRON: (*_NEMOTRON_H, *_NEMOTRON_H_SIZES, _NORMALIZED)},
        ),
        ModelFamily("olmo2", "OLMo 2", (DTENSOR,)),
        ModelFamily("olmo_hybrid", "OLMo Hybrid", (DTENSOR,), state_mixer="GatedDeltaNet"),
        ModelFamily(
            "olmoe",
            "OLMoE",
            (DTENSOR, MEGATRON),
            unsplit_by=(MEGATRON,),
            refused={DTENSOR: _OLMOE, MEGATRON: (*_OLMOE, _SCALED)},
        ),
        ModelFamily(
            "olmo3", "OLMo 3", (DTENSOR,), has_window=windows.unless_types_say_no, scales_full_layers_only=True
        ),
        ModelFamily("phi3", "Phi-3, Phi-4", (DTENSOR,), has_window=windows.everywhere, rotates_part=True),
        ModelFamily(
            "qwen2",
            "Qwen2, Qwen2.5",
            (DTENSOR, MEGATRON),
            has_window=windows.by_layer,
        ),
        ModelFamily(
            "qwen2_moe",
            "Qwen1.5-MoE, Qwen2-MoE",
            (DTENSOR,),
            refused={
                DTENSOR: (
                    Refusal("use_sliding_window", (None, False), "whose windows the engine would give to other layers"),
                    Refusal("qkv_bias", (None, True), "but the engine has biases of queries, keys and values"),
                )
            },
        ),
        ModelFamily(
            "qwen3", "Qwen3", (DTENSOR, MEGATRON), has_window=windows.by_layer, refused={MEGATRON: (_ATTENTION_BIAS,)}
        ),
        ModelFamily(
            "qwen3_moe",
            "Qwen3-MoE",
            (DTENSOR, MEGATRON),
            has_window=windows.where_used,
            refused={MEGATRON: (_ATTENTION_BIAS, _SCALED)},
        ),
        ModelFamily(
            "qwen3_5_moe_text",
            "Qwen3.5 (text, experts)",
            (DTENSOR, MEGATRON),
            rotates_part=True,
            state_mixer="GatedDeltaNet",
            refused={DTENSOR: (*_QWEN3_5, _NORMALIZES), MEGATRON: (*_QWEN3_5, _ATTENTION_BIAS, _NORMALIZED)},
        ),
        ModelFamily(
            "qwen3_5_text",
            "Qwen3.5 (text)",
            (DTENSOR, MEGATRON),
            rotates_part=True,
            state_mixer="GatedDeltaNet",
            refused={DTENSOR: _QWEN3_5, MEGATRON: (*_QWEN3_5, _ATTENTION_BIAS)},
        ),
        ModelFamily(
            "qwen3_next",
            "Qwen3-Next",
            (DTENSOR, MEGATRON),
            rotates_part=True,
            state_mixer="GatedDeltaNet",
            refused={DTENSOR: _QWEN3_5, MEGATRON: (*_QWEN3_5, _ATTENTION_BIAS, _NORMALIZED, *_ALL_MIXTURES)},
        ),
        ModelFamily("seed_oss", "Seed-OSS", (DTENSOR,)),
        ModelFamily(
            "smollm3",
            "SmolLM3",
            (DTENSOR,),
            has_window=windows.by_layer,
            activations=(),
            serves_adapters=False,
        ),
        ModelFamily("solar_open", "Solar Open", (DTENSOR,), has_expert_bias=True, is_served=False),
        ModelFamily(
            "stablelm",
            "StableLM 2",
            (DTENSOR,),
            rotates_part=True,
            tells_attention_bounds=False,
            serves_adapters=False,
            refused={
                DTENSOR: tuple(
                    Refusal(key, (None, False), _NOT_IN_ENGINE) for key in ("qk_layernorm", "use_parallel_residual")
                )
            },
        ),
        ModelFamily(
            "starcoder2",
            "StarCoder 2",
            (DTENSOR,),
            has_window=windows.everywhere,
            activations=(),
            serves_adapters=False,
        ),
    )
}
"""By model type."""


def family_of(config: ModelConfig) -> ModelFamily | None:
    """Return the family of a config.json; None if it is unknown."""
    return FAMILIES.get(str(config.get("model_type")))


def refused_settings(family: ModelFamily, backend: str) -> list[str]:
    """List the settings that a backend refuses of a family that it trains, in a few words each."""
    refuses = family.has_window is not windows.nowhere and backend not in family.windows_trained_by
    keys = [f"`{refusal.key}`" for refusal in family.refused.get(backend, ())]
    rollouts = [] if family.is_served else ["rollouts (not in vLLM)"]
    return rollouts + (["sliding windows"] if refuses else []) + keys


def unsupported_family(config: ModelConfig, backend: str) -> str | None:
    """Return why a backend does not train models of this type, or None."""
    family = family_of(config)
    if family is not None and backend in family.trained_by:
        return None
    if PART_OF in config and family is not None:
        return f"model_type {config[PART_OF]}, whose language model {family.model_type} that backend does not train"
    text = config.get("text_config")
    inner = family_of(text) if isinstance(text, Mapping) else None
    if inner is not None and backend in inner.trained_by:
        return (
            f"model_type {config.get('model_type')}, which reads more than text, but that backend trains only the "
            f"language model, in a folder of model_type {inner.model_type}"
        )
    trained = ", ".join(name for name, known in FAMILIES.items() if backend in known.trained_by)
    return f"model_type {config.get('model_type')}, but that backend trains {trained}"


def quantization_problem(config: ModelConfig) -> str | None:
    """Return, in a few words, why the weights of a config.json cannot be read as bfloat16; None if they can be."""
    settings = config.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method not in ("fp8", "mxfp4"):
        return f"quantization_config with quant_method {method}, but only fp8, mxfp4 and 16-bit weights can be read"
    block = settings.get("weight_block_size")
    if block is not None and not (len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        return f"quantization_config with weight_block_size {block}, which is no pair of sizes"
    return None


def unsupported_settings(config: ModelConfig, backend: str) -> str | None:
    """Return the first setting that a backend refuses, and why, or None; the backend trains the family."""
    if (reason := quantization_problem(config)) is not None:
        return reason
    family = family_of(config)
    if family is None:
        return None
    if "sliding_attention" in (config.get("layer_types") or ()) and not windows.is_used(config, if_absent=True):
        return "layer_types with sliding_attention, but no sliding_window that is used"
    parts = sorted(rotated_parts(config))
    if len(parts) > 1:
        return f"partial_rotary_factor {parts[0]} and {parts[1]}, inside and outside rope_parameters, which differ"
    if parts not in ([], [1]) and not family.rotates_part:
        return f"partial_rotary_factor {parts[0]}, but models of its family rotate whole heads"
    if (reason := uncomputed_rope(config, by_layer_type=family.ropes_by_layer_type)) is not None:
        return reason
    if backend not in family.windows_trained_by and family.has_window(config):
        return "layers with a sliding window, which that backend would leave out"
    problems = (refusal.problem(config) for refusal in family.refused.get(backend, ()))
    return next((problem for problem in problems if problem is not None), None)


def has_sliding_window(config: ModelConfig, longest: int) -> bool:
    """Tell whether, in rows of up to `longest` tokens, some layers attend only to the last tokens."""
    family = family_of(config)
    has_window = (windows.by_layer if family is None else family.has_window)(config)
    return has_window and (config.get("sliding_window") or 0) < longest


def has_plain_rope_in_windows(config: ModelConfig) -> bool:
    """Tell whether layers with a sliding window have plain rotary embeddings, and others scaled ones (OLMo 3).

    transformers 5.12.1 scales all layers (huggingface/transformers#45945), vLLM only those with full attention, as in
    OLMo 3's training (arXiv 2512.13961): scaled in all layers it loses 4 points of MMLU (vllm-project/vllm#43419).
    """
    family = family_of(config)
    if family is None or not family.scales_full_layers_only:
        return False
    return family.has_window(config) and rope_type(config) != "default"


def dropout_rates(config: ModelConfig) -> dict[str, float]:
    """Return the rates above 0 of dropout and other random changes in training, by key of config.json."""
    rates = {name: value for name, value in config.items() if name.endswith(_DRAWS) and isinstance(value, int | float)}
    return {name: rate for name, rate in rates.items() if rate}


def has_expert_bias(config: ModelConfig) -> bool:
    """Whether a bias of each expert takes part in choosing experts."""
    family = family_of(config)
    return family is not None and family.has_expert_bias


def has_attention_sinks(config: ModelConfig) -> bool:
    """Whether the softmax of attention scores has one more, learned score for each head."""
    family = family_of(config)
    return family is not None and family.has_sinks


def tells_attention_bounds(config: ModelConfig) -> bool:
    """Whether transformers' model tells its attention where the rows of a packed row begin."""
    family = family_of(config)
    return family is None or family.tells_attention_bounds


def masks_packed_rows(config: ModelConfig) -> bool:
    """Whether transformers' model makes its masks of packed rows from positions."""
    family = family_of(config)
    return family is None or family.masks_packed_rows


def mends_latent_attention(config: ModelConfig) -> bool:
    """Whether transformers' latent attention differs from the published one (see `ModelFamily`)."""
    family = family_of(config)
    return family is not None and family.mends_latent_attention


def state_mixer(config: ModelConfig) -> str | None:
    """Return the end of the class names of modules that carry a state along a row; None if the family has none."""
    family = family_of(config)
    return None if family is None else family.state_mixer


def has_shared_keys(config: ModelConfig) -> bool:
    """Tell whether layers attend to keys and values of earlier ones (Gemma 4 E2B and E4B)."""
    return bool(config.get("num_kv_shared_layers"))


def unread_tensors(config: ModelConfig) -> str | None:
    """Return a pattern of the names of published weights that no layer reads but vLLM asks for; None for none."""
    if not has_shared_keys(config):
        return None
    num_layers, num_sharing = config["num_hidden_layers"], config["num_kv_shared_layers"]
    layers = "|".join(str(layer) for layer in range(num_layers - num_sharing, num_layers))
    return rf"layers\.({layers})\.self_attn\.[kv]_(proj|norm)\."


def logits_divisor(config: ModelConfig) -> float:
    """Return the divisor of the output layer's logits."""
    family = family_of(config)
    if family is None:
        return 1.0
    if family.logits_factor is not None:
        return 1 / float(config[family.logits_factor])
    return 1.0 if family.logits_divisor is None else float(config[family.logits_divisor])


def logits_softcap(config: ModelConfig) -> float | None:
    """Return c of c tanh(logits / c), applied to the output layer's logits before `logits_divisor`; None for none."""
    family = family_of(config)
    return None if family is None else _positive(config, family.logits_softcap)


def attention_softcap(config: ModelConfig) -> float | None:
    """Return c of c tanh(scores / c), applied to attention scores; None for none."""
    family = family_of(config)
    return None if family is None else _positive(config, family.attention_softcap)


def _positive(config: ModelConfig, key: str | None) -> float | None:
    value = None if key is None else config.get(key)
    return None if value is None else float(value)
