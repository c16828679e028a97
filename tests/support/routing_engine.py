"""Sampled responses of an engine that tells their experts, in a process of its own.

python tests/support/routing_engine.py FOLDER ANSWERS.pt
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from engine_process import engine_here, engine_settings, with_graphs
from matrix_cases import PROMPTS
from model_families import drawn_model, family_config
from tiny_models import make_tokenizer

from nemo_offload_rl.keys.generation import SamplingSettings

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "moe_intermediate_size": 256}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 4, "initializer_range": 0.05}
# On a GPU prompts are computed in chunks, and the cache holds two or three of the longest responses.
ON_GPU: dict[str, Any] = {"precision": "bfloat16", "kv_cache_memory_gib": 2**-8}
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 256}


def main(folder: Path, path: Path) -> None:
    """Write [prompt, completions] for each prompt, the longest ones twice, so that their blocks are in the cache."""
    on_gpu = torch.cuda.is_available()
    model = drawn_model(family_config("qwen3_moe", **SIZES, **EXPERTS), 0)
    model.to(torch.bfloat16 if on_gpu else torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    changes = with_graphs(load_format="auto", **(CHUNKS if on_gpu else {})) | (ON_GPU if on_gpu else {})
    engine = engine_here(engine_settings(folder, returns_routed_experts=True, **changes))
    prompts = [*PROMPTS, *PROMPTS[2:]]
    found = engine.generate(prompts, SamplingSettings(max_new_tokens=64, temperature=1.0, seed=1), 8)
    torch.save(list(zip(prompts, found, strict=True)), path)
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
