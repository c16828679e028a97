"""TRL's GRPOTrainer on the work of `large_model_8b.yaml`: seconds a step, or where it runs out of memory.

    python benchmarks/large_model_trl.py --json large_model_trl.json

All parameters of a random Qwen3 shape are trained on one GPU, 64 responses of 512 tokens, with KL to a reference,
gradient checkpointing, micro-batches of 8 responses, and vLLM colocated with sleep mode. Variants: `float32` parameters
with AdamW, which is what nemo_offload_rl computes, and `bfloat16` parameters and states, which round updates away. TRL
alone has no offloading; DeepSpeed's and bitsandbytes' take packages of their own. Each variant is a process, with
`--timeout-s` for it. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_vs_trl import PeakMemory, _json_lines, _or_out_of_memory, _run, _steps_file, run_trl
from host_memory import make_model
from qwen3_shapes import SHAPES

VARIANTS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"model_init_kwargs": {"dtype": "bfloat16"}}}


def run_variant(model: Path, variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What `run_trl` found, or the error."""
    changes = {
        "gradient_checkpointing": True,
        "vllm_gpu_memory_utilization": arguments.engine_share,
        **VARIANTS[variant],
    }
    sizes = (arguments.prompts, arguments.group, arguments.tokens, arguments.steps, arguments.micro_batch)
    return _or_out_of_memory(run_trl, model, *sizes, changes)


def peer_parser(description: str | None, variants: Sequence[str], timeout_s: float) -> argparse.ArgumentParser:
    """The command line of a peer's run on this work."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8B", choices=list(SHAPES))
    parser.add_argument("--variants", nargs="+", default=list(variants), choices=list(variants))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=8, help="responses")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--engine-share", type=float, default=0.2, help="of the GPU, for vLLM")
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="for each variant")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    parser = peer_parser(__doc__, list(VARIANTS), 240.0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        result = run_variant(arguments.model, arguments.one, arguments)
        (arguments.model.parent / f"{arguments.one}.json").write_text(json.dumps(result))
        return
    from grpo_gpu import machine

    results: dict[str, Any] = {"machine": machine(), "command": " ".join(["python", *sys.argv]), "variants": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", arguments.shape, "cuda")
        for variant in arguments.variants:
            steps_file, found = _steps_file(folder, "trl"), folder / f"{variant}.json"
            steps_file.unlink(missing_ok=True)
            peak = PeakMemory()
            peak.start()
            child = [sys.executable, __file__, *sys.argv[1:], "--one", variant, "--model", str(folder / "model")]
            status = _run(child, os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, arguments.timeout_s)
            unfinished = {"error": f"status {status}", "steps": _json_lines(steps_file)}
            result = json.loads(found.read_text()) if found.exists() else unfinished
            results["variants"][variant] = result | {"gpu_peak_gib": peak.stop()}
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
            told = result["error"][:200] if "error" in result else f"{result['median']['total']:.2f} s a step"
            print(f"{variant}: {told}", flush=True)


if __name__ == "__main__":
    main()
