"""Model folders whose weights have 8 or 4 bits, as published ones have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from model_families import checkpoint_tensors, save_family_folder
from safetensors.torch import save_file
from torch import Tensor

BLOCK = [32, 48]  # which divides few sizes


def in_8_bits(weight_NK: Tensor) -> dict[str, Tensor]:
    """Values and factors, by what follows the name."""
    rows, columns = (-(-size // step) for size, step in zip(weight_NK.shape, BLOCK, strict=True))
    factors = torch.empty(rows, columns)
    values = torch.empty_like(weight_NK, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            where = slice(row * BLOCK[0], (row + 1) * BLOCK[0]), slice(column * BLOCK[1], (column + 1) * BLOCK[1])
            factors[row, column] = weight_NK[where].abs().max() / 448
            values[where] = (weight_NK[where] / factors[row, column]).to(torch.float8_e4m3fn)
    return {"": values, "_scale_inv": factors}


def in_4_bits(weight_EIO: Tensor) -> dict[str, Tensor]:
    """Pairs of numbers and exponents, by what follows the name: random ones, of weights of this shape."""
    num_experts, num_in, num_out = weight_EIO.shape
    seeded = torch.Generator().manual_seed(num_in)
    pairs = torch.randint(0, 256, (num_experts, num_out, num_in // 32, 16), dtype=torch.uint8, generator=seeded)
    exponents = torch.randint(120, 125, pairs.shape[:-1], dtype=torch.uint8, generator=seeded)
    return {"_blocks": pairs, "_scales": exponents}


def save_quantized(path: Path, family: str) -> None:
    """Save a tiny model; gpt-oss's experts get 4 bits, all linear layers of others but the last one 8 bits."""
    model = save_family_folder(path, family)
    is_4_bit = model.config.model_type == "gpt_oss"
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint_tensors(model).items():
        if is_4_bit and tensor.dim() == 3:
            tensors |= {name + end: part for end, part in in_4_bits(tensor).items()}
        elif not is_4_bit and tensor.dim() == 2 and name.endswith("proj.weight"):
            tensors |= {name + end: part for end, part in in_8_bits(tensor).items()}
        else:
            tensors[name] = tensor.bfloat16()
    for file in path.glob("model*.safetensors*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settings: dict[str, Any] = {"quant_method": "mxfp4"}
    if not is_4_bit:
        settings = {"quant_method": "fp8", "weight_block_size": BLOCK, "activation_scheme": "dynamic", "fmt": "e4m3"}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
