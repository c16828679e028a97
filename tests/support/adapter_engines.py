"""Greedy answers of engines in a process of its own: of one with merged weights, then of one that applies adapters.

python tests/support/adapter_engines.py FOLDER ANSWERS.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_process import engine_here, engine_settings, send_weights, with_graphs
from lora_cases import SERVED, merged, random_adapters
from matrix_cases import GREEDY, PROMPTS
from model_families import checkpoint_tensors, drawn_model, family_config
from tiny_models import make_tokenizer

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def answers(engine: Any) -> list[Any]:
    """Tokens and logprobs of greedy answers."""
    return [[one.token_ids, one.logprobs] for (one,) in engine.generate(PROMPTS, GREEDY)]


def main(folder: Path, path: Path) -> None:
    """Write tokens and logprobs with the adapters of seed 1, by an eager engine and by one with graphs.

    The second engine applies adapters. It answers with them, with those of seed 0, and with them again, and discards
    weights and adapters in a sleep before each.
    """
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    precision = str(dtype).removeprefix("torch.")
    model = drawn_model(family_config("qwen3", **SIZES), 0).bfloat16().float()
    model.to(dtype).save_pretrained(folder)
    model.float()
    make_tokenizer().save_pretrained(folder)
    # One engine of a process may sleep.
    engine = engine_here(engine_settings(folder, precision=precision, enable_sleep_mode=False))
    send_weights(engine, checkpoint_tensors(merged(model, random_adapters(model, 1))), 2**20)
    found = {"merged": answers(engine)}
    engine.shutdown()
    served = replace(SERVED, with_weights=True)
    engine = engine_here(engine_settings(folder, precision=precision, adapters=served, **with_graphs()))
    weights = {name: tensor.to(dtype) for name, tensor in checkpoint_tensors(model).items()}
    for name, seed in [("before", 1), ("between", 0), ("applied", 1)]:
        engine.finish_generation(discard_weights=True)
        engine.prepare_for_generation()
        send_weights(engine, weights | random_adapters(model, seed), 2**20)
        found[name] = answers(engine)
    path.write_text(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
