"""Greedy answers of an engine that applies adapters, or has them merged into its weights, in a process of its own.

python tests/support/adapter_engines.py FOLDER applied|merged ANSWERS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from engine_process import engine_here, engine_settings, send_weights
from lora_cases import SERVED, merged, random_adapters
from matrix_cases import GREEDY, PROMPTS
from model_families import checkpoint_tensors, drawn_model, family_config
from tiny_models import make_tokenizer
from torch import Tensor

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def main(folder: Path, way: str, path: Path) -> None:
    """Write tokens and logprobs with the adapters of seed 1, after a sleep of an engine that had those of seed 0."""
    on_gpu = torch.cuda.is_available()
    changes = {"precision": "bfloat16", "enforce_eager": False} if on_gpu else {}
    model = drawn_model(family_config("qwen3", **SIZES), 0).bfloat16().float()
    model.to(torch.bfloat16 if on_gpu else torch.float32).save_pretrained(folder)
    model.float()
    make_tokenizer().save_pretrained(folder)
    engine = engine_here(engine_settings(folder, adapters=SERVED if way == "applied" else None, **changes))
    for seed in range(2):
        engine.finish_generation(discard_weights=True)
        engine.prepare_for_generation()
        adapters = random_adapters(model, seed)
        sent: dict[str, Tensor] = adapters if way == "applied" else checkpoint_tensors(merged(model, adapters))
        send_weights(engine, sent, 2**20)
        answers = [[one.token_ids, one.logprobs] for (one,) in engine.generate(PROMPTS, GREEDY)]
    path.write_text(json.dumps(answers))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
