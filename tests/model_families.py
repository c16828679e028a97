"""Tiny models of every family that is trained, with sizes that vLLM runs on a CPU: attention heads of 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB_SIZE, make_tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from nemo_offload_rl.models.families import DTENSOR, MEGATRON
from nemo_offload_rl.policy.backends.dtensor.supported import unsupported as dtensor_refuses
from nemo_offload_rl.policy.backends.megatron.supported import unsupported as megatron_refuses

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,  # wide logits, so that greedy choices have clear margins
    "pad_token_id": 256,
    "eos_token_id": 257,
    "bos_token_id": None,
    "dtype": "float32",
}
_NARROW = {"hidden_size": 128, "intermediate_size": 96}
_QWEN3 = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
_MOE = {**_QWEN3, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
# A divisor of the logits that leaves greedy choices their margins.
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "granite": (GraniteConfig, {**_NARROW, **_GRANITE}),
    "llama": (LlamaConfig, _NARROW),
    "llama-bias": (LlamaConfig, {**_NARROW, "attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, {**_NARROW, "head_dim": 32, "sliding_window": None}),
    "mistral-window": (MistralConfig, {**_NARROW, "head_dim": 32, "sliding_window": 64}),
    "olmo2": (Olmo2Config, _NARROW),
    "qwen2": (Qwen2Config, _NARROW),  # queries, keys and values have biases
    "qwen3": (Qwen3Config, _QWEN3),
    "qwen3_moe": (Qwen3MoeConfig, _MOE),
    # Of its two layers one has no rotary embeddings; its own padding token is beyond this vocabulary.
    "smollm3": (SmolLM3Config, {**_NARROW, "no_rope_layer_interval": 2, "pad_token_id": 256}),
}
"""Class and sizes by name; a name may end in `-tied`. Each record of `models/families.py` is in it."""


def trained_by(family: str) -> list[str]:
    """Backends that train the model of a name."""
    config = family_config(family).to_dict()
    checks = {DTENSOR: dtensor_refuses, MEGATRON: megatron_refuses}
    return [backend for backend, refuses in checks.items() if refuses(config) is None]


def family_config(family: str) -> PreTrainedConfig:
    """The configuration of a family."""
    kind, sizes = FAMILIES[family.removesuffix("-tied")]
    return kind(**{**_SIZES, **sizes, "tie_word_embeddings": family.endswith("-tied")})


def make_family(family: str, seed: int) -> Any:
    """A float32 model in eval mode, drawn from `seed`."""
    return drawn_model(family_config(family), seed)


def drawn_model(config: PreTrainedConfig, seed: int) -> Any:
    """A float32 model in eval mode, drawn from `seed`; vectors too, which would all start as zero or one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.float().eval()


def save_family_folder(path: Path, family: str, seed: int = 0) -> Any:
    """Write weights, config and tokenizer to `path`, as Hugging Face and vLLM read them."""
    model = make_family(family, seed)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return model


def checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors of a model by the names of its family's checkpoints, which have each expert on its own."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        place, _, own_name = name.rpartition(".experts.")
        if not place:
            tensors[name] = parameter.detach()
            continue
        for expert, weight in enumerate(parameter.detach()):
            parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            parts = parts if own_name == "gate_up_proj" else {"down_proj": weight}
            tensors |= {f"{place}.experts.{expert}.{part}.weight": tensor for part, tensor in parts.items()}
    return tensors
