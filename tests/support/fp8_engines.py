"""Greedy answers of engines with 8-bit weights, in a process of its own: from a quantized checkpoint, then by refits.

python tests/support/fp8_engines.py FOLDER FAMILY ANSWERS.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_process import engine_here, engine_settings, send_weights, with_graphs
from matrix_cases import GREEDY, PROMPTS
from model_families import checkpoint_name, checkpoint_tensors, drawn_model, family_config
from safetensors.torch import save_file
from tiny_models import make_tokenizer
from torch import Tensor

from nemo_offload_rl.generation.vllm.fp8_loading import quantize_blocks

# Whole blocks of 128 in every layer, and for two workers in half of each.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
SIZES |= {"head_dim": 64}


def save_model(folder: Path, family: str, seed: int) -> Any:
    """A model of these sizes, as Hugging Face saves it."""
    experts = {"moe_intermediate_size": 256} if "moe" in family else {}
    model = drawn_model(family_config(family, **SIZES, **experts), seed)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


def sent(model: Any) -> dict[str, Tensor]:
    """A policy's weights in bfloat16."""
    return {name: tensor.bfloat16() for name, tensor in checkpoint_tensors(model).items()}


def stacked(model: Any) -> dict[str, Tensor]:
    """The same with the experts of a layer in one tensor for each projection."""
    return {checkpoint_name(model, name): parameter.detach().bfloat16() for name, parameter in model.named_parameters()}


def save_quantized(folder: Path, tensors: Mapping[str, Tensor], kept: Sequence[str]) -> None:
    """Turn a model's folder into a checkpoint in 8 bits, which vLLM loads by itself.

    Modules whose name has one of the texts `kept` in it are not quantized.
    """
    modules = [name.removesuffix(".weight") for name in tensors if any(part in name for part in kept)]
    saved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") and name.removesuffix(".weight") not in modules:
            saved[name], saved[f"{name}_scale_inv"] = quantize_blocks(tensor)
        else:
            saved[name] = tensor.contiguous()
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "ignored_layers": modules,
    }
    (folder / "config.json").write_text(json.dumps(config))


def answers(engine: Any) -> list[Any]:
    """Tokens and logprobs of greedy answers."""
    return [[list(one.token_ids), list(one.logprobs)] for (one,) in engine.generate(PROMPTS, GREEDY)]


def main(folder: Path, family: str, path: Path) -> None:
    """Write the answers with the weights of seed 1: loaded by an eager engine, and refitted into one with graphs.

    The second engine had the weights of seed 0 before, with which it answered, and slept.
    """
    first, second = (save_model(folder / "model", family, seed) for seed in range(2))
    save_model(folder / "quantized", family, 1)
    save_quantized(folder / "quantized", sent(second), [".mlp.gate."] if "moe" in family else [])
    load: dict[str, Any] = {"precision": "bfloat16", "vllm_kwargs": {"load_format": "auto"}}
    # One engine of a process may sleep.
    engine = engine_here(engine_settings(folder / "quantized", enable_sleep_mode=False, **load))
    found = {"loaded": answers(engine)}
    engine.shutdown()
    engine = engine_here(engine_settings(folder / "model", precision="fp8", **with_graphs()))
    send_weights(engine, sent(first), 70_000)
    found["before"] = answers(engine)
    engine.finish_generation(discard_weights=True)
    engine.prepare_for_generation(["weights"])
    send_weights(engine, stacked(second) if "moe" in family else sent(second), 70_000)
    engine.prepare_for_generation()
    found["refitted"] = answers(engine)
    weight = torch.randn(300, 500, dtype=torch.bfloat16)
    here, there = quantize_blocks(weight), quantize_blocks(weight.to("cuda" if torch.cuda.is_available() else "cpu"))
    found["same_as_on_a_cpu"] = [torch.equal(a.float(), b.cpu().float()) for a, b in zip(here, there, strict=True)]
    path.write_text(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
