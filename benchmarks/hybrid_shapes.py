"""Models with states along a row or with latent attention, in shapes near published ones: config.json, random weights.

Hidden sizes, heads and layers of Qwen3.5, Nemotron-H, Moonlight and GLM-4.7-Flash as their config.json files give them;
`12-layers` are cut to 12 layers, and mixtures to 64 experts, with latent attention to 32. Weights are drawn as
transformers initializes them, but for the routers' (`widen_routers`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen3_shapes import ROUTER_STD, STD

_QWEN3_5: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 256,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 65536,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}
_NEMOTRON_H: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "chunk_size": 128,
    "mlp_hidden_act": "relu2",
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
_LATENT: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 32,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_MOONLIGHT: dict[str, Any] = {
    **_LATENT,
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.446,
}
HYBRID_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-tiny": {
        **_QWEN3_5,
        "model_type": "qwen3_5_text",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "qwen3.5-4B": {
        **_QWEN3_5,
        "model_type": "qwen3_5_text",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "qwen3.5-12-layers": {
        **_QWEN3_5,
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    },
    "moonlight-12-layers": _MOONLIGHT,
    "moonlight-tiny": {
        **_MOONLIGHT,
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
    },
    "glm-4.7-flash-12-layers": {
        **_LATENT,
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
    },
    "nemotron-h-8B": {
        **_NEMOTRON_H,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
    "nemotron-h-12-layers": {  # of the shape above
        **_NEMOTRON_H,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-M-M",
    },
}


def _config(name: str) -> Any:
    from transformers import AutoConfig

    settings = {"dtype": "bfloat16", "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    return AutoConfig.for_model(**HYBRID_SHAPES[name], **settings)


def num_parameters(name: str) -> int:
    """Count the parameters of a shape; a tied embedding counts once."""
    return sum(parameter.numel() for parameter in _model(name, "meta").parameters())


def _model(name: str, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(_config(name), dtype=torch.bfloat16)


def widen_routers(model: Any) -> None:
    """Make the weights of routers wider, as those of `qwen3_shapes.ROUTER_STD` are."""
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(ROUTER_STD / STD)


def is_written(path: Path, name: str) -> bool:
    """Tell whether the folder has all of a model of this shape: the tokenizer is written last."""
    done = path / "tokenizer_config.json"
    return done.exists() and HYBRID_SHAPES[name].items() <= json.loads((path / "config.json").read_text()).items()


def write_model(path: Path, name: str, device: str) -> None:
    """Write a Hugging Face folder: random weights in bfloat16, and the demo's tokenizer."""
    import torch
    from make_model import make_tokenizer  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    model = _model(name, device)
    widen_routers(model)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    print(f"model: {model.num_parameters() / 1e9:.2f} B parameters in {path}", flush=True)
