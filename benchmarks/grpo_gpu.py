"""GRPO end to end with a random Qwen3 model made here: where the time of a step goes, and who holds the memory.

    python benchmarks/grpo_gpu.py --shape 0.6B --steps 6 --json grpo_gpu.json
    python benchmarks/grpo_gpu.py --shape tiny --steps 2 --cpu

Overrides of `grpo_gpu.yaml` follow the options, as KEY=VALUE. The model has no end token, so every response has as many
tokens as allowed. Step 1 pays for compilation and first touches; medians are over the steps after it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples" / "demo")]

CPU_OVERRIDES = [
    "cluster.gpus_per_node=0",
    "policy.precision=float32",
    "policy.generation.vllm_cfg.kv_cache_memory_gib=0.125",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "policy.optimizer.kwargs.fused=false",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=2",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=2",
    "policy.logprob_batch_size=2",
    "policy.generation.max_new_tokens=16",
    "policy.max_total_sequence_length=32",
    "policy.host_memory_budget_gib=null",
]


def write_model(path: Path, shape_name: str, seed: int, max_positions: int) -> None:
    """A folder with random weights in bfloat16 and the demo's tokenizer, whose ids are the vocabulary's first."""
    import torch
    from make_model import make_tokenizer  # pyright: ignore[reportMissingImports]
    from qwen3_shapes import SHAPES
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[shape_name]
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def summary(log_dir: Path) -> dict[str, Any]:
    """Medians over the steps after the first, and every step's numbers."""
    records = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > 0]
    steady = steps[1:] or steps
    names = sorted({name for step in steady for name in step if name != "step"})
    medians = {name: statistics.median([step[name] for step in steady if name in step]) for name in names}
    return {"medians": medians, "steps": steps}


def machine() -> dict[str, Any]:
    """What the numbers were measured with."""
    from importlib.metadata import version

    import torch

    found: dict[str, Any] = {name: version(name) for name in ("torch", "transformers", "ray")}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found["gpu_uuid"] = str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else "none"
    found["cores"] = os.cpu_count()
    found["python"] = sys.version.split()[0]
    found["date"] = time.strftime("%Y-%m-%d")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cpu", action="store_true", help="a few short responses on the CPU, to try the script")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--dir", type=Path, help="folder of the model and the run; a temporary one without it")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    folder = arguments.dir or Path(tempfile.mkdtemp(prefix="grpo_gpu_"))
    write_model(folder / "model", arguments.shape, seed=0, max_positions=4096)

    from nemo_offload_rl.runs.loading import load_grpo_config
    from nemo_offload_rl.runs.rollouts import run_grpo
    from nemo_offload_rl.utils.cli import set_up_logging

    set_up_logging()
    overrides = [
        f"policy.model_name={folder / 'model'}",
        f"logger.log_dir={folder / 'run'}",
        f"grpo.max_num_steps={arguments.steps}",
        *(CPU_OVERRIDES if arguments.cpu else []),
        *arguments.overrides,
    ]
    begin_s = time.perf_counter()
    run_grpo(load_grpo_config(ROOT / "benchmarks" / "grpo_gpu.yaml", overrides))
    result = summary(folder / "run") | {"whole_s": time.perf_counter() - begin_s, "machine": machine()}
    result["command"] = " ".join(["python", *sys.argv])
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, value in result["medians"].items():
        print(f"{name:45s} {value:14.4f}")
    print(f"steps, s: {[round(step['timing/total_s'], 2) for step in result['steps']]}")


if __name__ == "__main__":
    main()
