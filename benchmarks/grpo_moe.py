"""GRPO end to end with a mixture of experts: does it train, do refits reach every expert, do engine and policy agree?

    python benchmarks/grpo_moe.py --shape 12-layers --steps 3 --out results/grpo_moe

The model has Qwen3-30B-A3B's widths and random weights, made on the GPU. Rewards fall with the length of a response,
and some of the vocabulary ends one, so that responses differ in reward and every weight but the routers' is trained.
Engine and policy agree where `token_mult_prob_error` is under 1.02; the exit status is 1 where a step is above it.
Overrides of `grpo_moe.yaml` follow the options, as KEY=VALUE.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples" / "demo")]

LIMIT = 1.02
STD = 0.02
# A router's weights are wider than the rest, as in trained models: its eighth choice matters little, so that ties
# which two implementations break in different ways do not hide what is looked for here.
ROUTER_STD = 4 * STD
# So many of the vocabulary end a response: with near-uniform sampling two in three end before 512 tokens.
STOP_SHARE = 0.002


@dataclass(frozen=True)
class MoeShape:
    """The sizes of a Qwen3-MoE model's configuration; embedding and output layer are separate."""

    hidden: int
    layers: int
    experts: int
    moe_intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts_per_token: int
    vocab: int

    def layer(self, i: int) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
        """Name, shape and standard deviation of a layer's weights; None for norms, which are one."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        place = f"model.layers.{i}"
        yield f"{place}.input_layernorm.weight", (self.hidden,), None
        yield f"{place}.post_attention_layernorm.weight", (self.hidden,), None
        for name, shape in (("q", (q, self.hidden)), ("k", (kv, self.hidden)), ("v", (kv, self.hidden))):
            yield f"{place}.self_attn.{name}_proj.weight", shape, STD
        yield f"{place}.self_attn.o_proj.weight", (self.hidden, q), STD
        yield f"{place}.self_attn.q_norm.weight", (self.head_dim,), None
        yield f"{place}.self_attn.k_norm.weight", (self.head_dim,), None
        yield f"{place}.mlp.gate.weight", (self.experts, self.hidden), ROUTER_STD
        for expert in range(self.experts):
            for name in ("gate_proj", "up_proj"):
                yield f"{place}.mlp.experts.{expert}.{name}.weight", (self.moe_intermediate, self.hidden), STD
            yield f"{place}.mlp.experts.{expert}.down_proj.weight", (self.hidden, self.moe_intermediate), STD

    def rest(self) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
        """The same of what is in no layer."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden), STD
        yield "model.norm.weight", (self.hidden,), None
        yield "lm_head.weight", (self.vocab, self.hidden), STD

    def hf_config(self) -> dict[str, Any]:
        """What stands in config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "moe_intermediate_size": self.moe_intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": False,
            "initializer_range": STD,
            "pad_token_id": 0,
            "eos_token_id": None,
            "bos_token_id": None,
        }


_A3B = {"hidden": 2048, "moe_intermediate": 768, "heads": 32, "kv_heads": 4, "head_dim": 128, "vocab": 151936}
SHAPES = {
    "tiny": MoeShape(128, 2, 8, 64, heads=4, kv_heads=2, head_dim=32, experts_per_token=2, vocab=1024),
    "12-layers": MoeShape(layers=12, experts=64, experts_per_token=8, **_A3B),
    "30B-A3B": MoeShape(layers=48, experts=128, experts_per_token=8, **_A3B),
}


def write_model(path: Path, shape: MoeShape, device: str) -> None:
    """A Hugging Face folder with random weights in bfloat16 and the demo's tokenizer; one file for each layer."""
    import torch
    from make_model import make_tokenizer  # pyright: ignore[reportMissingImports]
    from safetensors.torch import save_file

    torch.manual_seed(0)
    path.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    total_bytes = 0
    for number, rows in enumerate([shape.rest(), *(shape.layer(i) for i in range(shape.layers))]):
        tensors: dict[str, torch.Tensor] = {}
        for name, sizes, std in rows:
            scale = torch.ones if std is None else torch.randn
            tensors[name] = (scale(sizes, dtype=torch.bfloat16, device=device) * (std or 1.0)).cpu()
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(shape.hf_config(), indent=1))
    make_tokenizer().save_pretrained(path)
    print(f"model: {total_bytes / 2e9:.2f} B parameters in {path}", flush=True)


COLUMNS = {
    "total": "timing/total_s",
    "refit": "timing/refit_s",
    "stream": "timing/refit/stream_s",
    "generate": "timing/generation_s",
    "logprobs": "timing/logprobs_s",
    "reference": "timing/reference_logprobs_s",
    "train": "timing/training_s",
    "prob error": "train/token_mult_prob_error",
    "KL": "train/kl",
    "grad norm": "train/grad_norm",
    "entropy": "train/approx_entropy",
    "tokens": "train/mean_response_tokens",
    "GPU peak": "memory/peak_gib",
    "GPU train": "memory/training_policy_gib",
    "host": "memory/host_policy_gib",
}


def table(steps: list[dict[str, Any]]) -> str:
    """Seconds, GiB and agreement of every step."""
    lines = [" ".join(f"{name:>10s}" for name in ("step", *COLUMNS))]
    for step in steps:
        values = [step.get(key) for key in COLUMNS.values()]
        cells = ["-" if value is None else f"{value:.4g}" for value in values]
        lines.append(" ".join(f"{cell:>10s}" for cell in (str(step["step"]), *cells)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="12-layers", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="where the weights are made")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, the run and grpo_moe.json")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    shape, out = SHAPES[arguments.shape], arguments.out
    begin_s = time.perf_counter()
    # A process of its own, which leaves nothing on the GPU.
    writer = multiprocessing.get_context("spawn").Process(
        target=write_model, args=(out / "model", shape, arguments.device)
    )
    writer.start()
    writer.join()
    if writer.exitcode:
        sys.exit("the model could not be made")

    from grpo_gpu import machine, summary

    from nemo_offload_rl.algorithms.grpo_setup import run_grpo
    from nemo_offload_rl.config import load_grpo_config
    from nemo_offload_rl.utils.cli import set_up_logging

    set_up_logging()
    stops = range(shape.vocab // 2, shape.vocab // 2 + max(int(STOP_SHARE * shape.vocab), 1))
    overrides = [
        f"policy.model_name={out / 'model'}",
        f"logger.log_dir={out / 'run'}",
        f"grpo.max_num_steps={arguments.steps}",
        f"policy.generation.stop_token_ids={list(stops)}",
        *arguments.overrides,
    ]
    ready_s = time.perf_counter()
    run_grpo(load_grpo_config(ROOT / "benchmarks" / "grpo_moe.yaml", overrides))
    steps = summary(out / "run")["steps"]
    times = {"model_s": ready_s - begin_s, "whole_s": time.perf_counter() - begin_s}
    result = {"steps": steps, "machine": machine(), "command": " ".join(["python", *sys.argv]), **times}
    (out / "grpo_moe.json").write_text(json.dumps(result, indent=1) + "\n")
    worst = max(step["train/token_mult_prob_error"] for step in steps)
    print(f"model made in {times['model_s']:.0f} s, everything in {times['whole_s']:.0f} s")
    print(table(steps))
    print(f"token_mult_prob_error at most {worst:.4f}: {'agrees' if worst < LIMIT else 'DOES NOT AGREE'}")
    if worst >= LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
