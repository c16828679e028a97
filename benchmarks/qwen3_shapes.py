"""Parameter shapes of dense Qwen3 models, so that benchmarks move what training moves without downloading anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Qwen3Shape:
    """The sizes of a dense Qwen3 model's configuration; the embedding is tied."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151936

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


SHAPES = {
    "tiny": Qwen3Shape(hidden=256, layers=2, intermediate=512, heads=4, kv_heads=2, vocab=1024),
    "0.6B": Qwen3Shape(hidden=1024, layers=28, intermediate=3072, heads=16, kv_heads=8),
    "1.5B": Qwen3Shape(hidden=1536, layers=28, intermediate=8960, heads=12, kv_heads=2),
    "1.7B": Qwen3Shape(hidden=2048, layers=28, intermediate=6144, heads=16, kv_heads=8),
    "4B": Qwen3Shape(hidden=2560, layers=36, intermediate=9728, heads=32, kv_heads=8),
    "8B": Qwen3Shape(hidden=4096, layers=36, intermediate=12288, heads=32, kv_heads=8),
}
