"""Shapes of Qwen3 models, dense and mixtures of experts, and of Llama; model folders with random weights of a shape.

Benchmarks move what training moves without downloading anything.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STD = 0.02
# A router's weights are wider than the rest, as in trained models: its eighth choice matters little, so that ties
# which two implementations break in different ways do not hide a difference that is looked for.
ROUTER_STD = 4 * STD

type Row = tuple[str, tuple[int, ...], float | None]
"""Name, shape and standard deviation of a weight; None for norms, which are one."""


@dataclass(frozen=True)
class Qwen3Shape:
    """The sizes of a dense Qwen3 model's configuration; `parameters` is with a tied embedding."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151936

    def mlp(self, place: str) -> Iterator[Row]:
        """The MLP of the layer at a place, by Hugging Face's names."""
        yield f"{place}.mlp.gate_proj.weight", (self.intermediate, self.hidden), STD
        yield f"{place}.mlp.up_proj.weight", (self.intermediate, self.hidden), STD
        yield f"{place}.mlp.down_proj.weight", (self.hidden, self.intermediate), STD

    def own_config(self) -> dict[str, Any]:
        """Entries of config.json that differ between the two kinds of model."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "intermediate_size": self.intermediate,
        }

    def parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the model's order."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows: list[tuple[str, tuple[int, ...]]] = [("embed_tokens", (self.vocab, self.hidden))]
        for i in range(self.layers):
            rows += [
                (f"layers.{i}.q_proj", (q, self.hidden)),
                (f"layers.{i}.k_proj", (kv, self.hidden)),
                (f"layers.{i}.v_proj", (kv, self.hidden)),
                (f"layers.{i}.o_proj", (self.hidden, q)),
                (f"layers.{i}.q_norm", (self.head_dim,)),
                (f"layers.{i}.k_norm", (self.head_dim,)),
                (f"layers.{i}.gate_proj", (self.intermediate, self.hidden)),
                (f"layers.{i}.up_proj", (self.intermediate, self.hidden)),
                (f"layers.{i}.down_proj", (self.hidden, self.intermediate)),
                (f"layers.{i}.input_layernorm", (self.hidden,)),
                (f"layers.{i}.post_attention_layernorm", (self.hidden,)),
            ]
        return [*rows, ("norm", (self.hidden,))]


class LlamaShape(Qwen3Shape):
    """The sizes of a Llama 3 model's configuration: Qwen3's layers without norms of queries and keys."""

    def parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the model's order."""
        return [row for row in super().parameters() if not row[0].endswith(("q_norm", "k_norm"))]

    def own_config(self) -> dict[str, Any]:
        """Entries of config.json that differ from Qwen3's."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "intermediate_size": self.intermediate,
            "mlp_bias": False,
        }


@dataclass(frozen=True)
class MoeShape:
    """The sizes of a Qwen3-MoE model's configuration."""

    hidden: int
    layers: int
    experts: int
    moe_intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts_per_token: int
    vocab: int

    def mlp(self, place: str) -> Iterator[Row]:
        """The experts of the layer at a place and their router, by Hugging Face's names."""
        yield f"{place}.mlp.gate.weight", (self.experts, self.hidden), ROUTER_STD
        for expert in range(self.experts):
            for name in ("gate_proj", "up_proj"):
                yield f"{place}.mlp.experts.{expert}.{name}.weight", (self.moe_intermediate, self.hidden), STD
            yield f"{place}.mlp.experts.{expert}.down_proj.weight", (self.hidden, self.moe_intermediate), STD

    def own_config(self) -> dict[str, Any]:
        """Entries of config.json that differ between the two kinds of model."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 3 * self.hidden,
            "moe_intermediate_size": self.moe_intermediate,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


SHAPES = {
    "tiny": Qwen3Shape(hidden=256, layers=2, intermediate=512, heads=4, kv_heads=2, vocab=1024),
    "llama-tiny": LlamaShape(hidden=256, layers=2, intermediate=512, heads=4, kv_heads=2, vocab=1024),
    "llama-8B": LlamaShape(hidden=4096, layers=32, intermediate=14336, heads=32, kv_heads=8, vocab=128256),
    # The layers of 0.6B, so narrow that on a CPU nearly all seconds are the host's.
    "narrow": Qwen3Shape(hidden=64, layers=28, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=512),
    "8-layers": Qwen3Shape(hidden=1024, layers=8, intermediate=3072, heads=16, kv_heads=8),  # of the next
    "0.6B": Qwen3Shape(hidden=1024, layers=28, intermediate=3072, heads=16, kv_heads=8),
    "1.5B": Qwen3Shape(hidden=1536, layers=28, intermediate=8960, heads=12, kv_heads=2),
    "1.7B": Qwen3Shape(hidden=2048, layers=28, intermediate=6144, heads=16, kv_heads=8),
    "4B": Qwen3Shape(hidden=2560, layers=36, intermediate=9728, heads=32, kv_heads=8),
    # The sizes of Qwen2.5-7B, whose attention has biases where Qwen3's has norms.
    "7B": Qwen3Shape(hidden=3584, layers=28, intermediate=18944, heads=28, kv_heads=4, vocab=152064),
    "8B": Qwen3Shape(hidden=4096, layers=36, intermediate=12288, heads=32, kv_heads=8),
    "10B": Qwen3Shape(hidden=4096, layers=45, intermediate=12288, heads=32, kv_heads=8),  # no model's
    "14B": Qwen3Shape(hidden=5120, layers=40, intermediate=17408, heads=40, kv_heads=8),
    # The sizes of Mistral Small 24B.
    "24B": Qwen3Shape(hidden=5120, layers=40, intermediate=32768, heads=32, kv_heads=8, vocab=131072),
    "27B": Qwen3Shape(hidden=5120, layers=64, intermediate=20480, heads=48, kv_heads=8, vocab=248320),  # no model's
    "32B": Qwen3Shape(hidden=5120, layers=64, intermediate=25600, heads=64, kv_heads=8),
}

_A3B = {"hidden": 2048, "moe_intermediate": 768, "heads": 32, "kv_heads": 4, "head_dim": 128, "vocab": 151936}
MOE_SHAPES = {
    "moe-tiny": MoeShape(128, 2, 8, 64, heads=4, kv_heads=2, head_dim=32, experts_per_token=2, vocab=1024),
    "moe-small": MoeShape(1024, 2, 16, 512, heads=16, kv_heads=8, head_dim=128, experts_per_token=4, vocab=32768),
    "4-layers": MoeShape(layers=4, experts=32, experts_per_token=8, **_A3B),
    "12-layers": MoeShape(layers=12, experts=64, experts_per_token=8, **_A3B),
    "30B-A3B": MoeShape(layers=48, experts=128, experts_per_token=8, **_A3B),
}

TIED = ("tiny", "narrow", "8-layers", "0.6B", "1.5B", "1.7B", "4B")  # Qwen3 ties embedding and output layer up to 4 B


def shape_of(name: str) -> Qwen3Shape | MoeShape:
    """The dense shape of that name, else the mixture of experts."""
    return SHAPES[name] if name in SHAPES else MOE_SHAPES[name]


def num_parameters(shape: Qwen3Shape | MoeShape) -> int:
    """Of a model whose embedding and output layer are separate."""
    return sum(math.prod(sizes) for rows in _files(shape, ties_embeddings=False) for _, sizes, _ in rows)


def is_written(path: Path, shape: Qwen3Shape | MoeShape, ties_embeddings: bool) -> bool:
    """Whether the folder has all of a model of this shape: the tokenizer is written last."""
    config = path / "config.json"
    expected = hf_config(shape, ties_embeddings)
    return (path / "tokenizer_config.json").exists() and json.loads(config.read_text()) == expected


def write_config(path: Path, name: str) -> None:
    """Write a folder with the config.json of the shape of a name, for plans."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(shape_of(name), name in TIED), indent=1))


def write_model(path: Path, shape: Qwen3Shape | MoeShape, device: str, ties_embeddings: bool = False) -> None:
    """Write a Hugging Face folder: random weights in bfloat16, a file for each layer, and the demo's tokenizer.

    Args:
        path: The folder.
        shape: The sizes.
        device: Where the weights are made.
        ties_embeddings: The output layer is the embedding.
    """
    import torch
    from make_model import make_tokenizer  # pyright: ignore[reportMissingImports]
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)

    def write_file(number: int, rows: Iterable[Row]) -> tuple[dict[str, str], int]:
        """A layer's file: where its tensors are, and their bytes."""
        generator = torch.Generator(device).manual_seed(number)
        tensors: dict[str, torch.Tensor] = {}
        for name, sizes, std in rows:
            if std is None:
                tensors[name] = torch.ones(sizes, dtype=torch.bfloat16)
            else:
                drawn = torch.randn(sizes, generator=generator, dtype=torch.bfloat16, device=device)
                tensors[name] = (drawn * std).cpu()
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        return dict.fromkeys(tensors, file), sum(tensor.nbytes for tensor in tensors.values())

    with ThreadPoolExecutor(4) as pool:
        files = list(pool.map(write_file, itertools.count(), _files(shape, ties_embeddings)))
    places = {name: file for written, _ in files for name, file in written.items()}
    total_bytes = sum(num_bytes for _, num_bytes in files)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(hf_config(shape, ties_embeddings), indent=1))
    make_tokenizer().save_pretrained(path)
    print(f"model: {total_bytes / 2e9:.2f} B parameters in {path}", flush=True)


def _files(shape: Qwen3Shape | MoeShape, ties_embeddings: bool) -> list[list[Row]]:
    """The weights of each file: what belongs to no layer, then those of each layer."""
    layers = (_layer(shape, i) for i in range(shape.layers))
    return [list(rows) for rows in (_no_layer(shape, ties_embeddings), *layers)]


def _layer(shape: Qwen3Shape | MoeShape, i: int) -> Iterator[Row]:
    q, kv, place = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, f"model.layers.{i}"
    yield f"{place}.input_layernorm.weight", (shape.hidden,), None
    yield f"{place}.post_attention_layernorm.weight", (shape.hidden,), None
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield f"{place}.self_attn.{name}_proj.weight", (rows, shape.hidden), STD
    yield f"{place}.self_attn.o_proj.weight", (shape.hidden, q), STD
    if not isinstance(shape, LlamaShape):
        yield f"{place}.self_attn.q_norm.weight", (shape.head_dim,), None
        yield f"{place}.self_attn.k_norm.weight", (shape.head_dim,), None
    yield from shape.mlp(place)


def _no_layer(shape: Qwen3Shape | MoeShape, ties_embeddings: bool) -> Iterator[Row]:
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden), STD
    yield "model.norm.weight", (shape.hidden,), None
    if not ties_embeddings:
        yield "lm_head.weight", (shape.vocab, shape.hidden), STD


def hf_config(shape: Qwen3Shape | MoeShape, ties_embeddings: bool) -> dict[str, Any]:
    """Entries of the config.json of a shape."""
    return {
        **shape.own_config(),
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 65536,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": ties_embeddings,
        "initializer_range": STD,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": None,
    }
