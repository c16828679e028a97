"""GRPO steps with adapters of rank 16, merged into the weights that refits send or applied by the engine itself.

    python benchmarks/adapters_in_engine.py --out results                             # 8 B
    python benchmarks/adapters_in_engine.py --shape tiny --steps 2 --cpu --out results

Each way is a run of `large_model.py` with `large_model_32b_lora.yaml`, the base on the GPU in refits, on one model. In
the third way the engine never sleeps, so that refits send the adapters alone. It prints medians over the steps after
the first: seconds by phase, bytes of a refit, sampled tokens per second, GiB over the link, and how far the engine's
probabilities are from the policy's. `adapters_in_engine.json` in `--out` has all steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from common import GIB, ROOT, measured_with, medians, steps_in, write_result

WAYS = {
    "merged": ["policy.generation.enable_lora=false"],
    "applied": ["policy.generation.enable_lora=true"],
    "applied, no sleep": [
        "policy.generation.enable_lora=true",
        "policy.generation.vllm_cfg.enable_sleep_mode=false",
    ],
}
COMMON = ["~policy.residency_overrides", "policy.generation.vllm_cfg.gpu_memory_utilization=0.45"]
COLUMNS = {
    "step, s": ("timing/total_s", 1),
    "refit, s": ("timing/refit_s", 1),
    "sent, GiB": ("residency/refit/sent_bytes", GIB),
    "generation, s": ("timing/generation_s", 1),
    "tokens/s": ("train/generation_tokens_per_s", 1),
    "logprobs, s": ("timing/logprobs_s", 1),
    "training, s": ("timing/training_s", 1),
    "in, GiB": ("residency/bytes_in", GIB),
    "out, GiB": ("residency/bytes_out", GIB),
    "prob error": ("train/token_mult_prob_error", 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8B")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result and the runs' own files")
    parser.add_argument("--dir", type=Path, help="folder of the model, made if it is not there; temporary without it")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    folder = arguments.dir or Path(tempfile.mkdtemp(prefix="adapters_in_engine_"))
    result = {**measured_with(), "shape": arguments.shape, "steps": {}}
    print("".join(f"{name:>19s}" for name in ("", *COLUMNS)), flush=True)
    for way, overrides in WAYS.items():
        out = arguments.out / way.replace(", ", "_").replace(" ", "_")
        command = [sys.executable, str(ROOT / "benchmarks" / "large_model.py"), "--shape", arguments.shape]
        command += ["--config", str(ROOT / "benchmarks" / "large_model_32b_lora.yaml"), "--steps", str(arguments.steps)]
        command += ["--dir", str(folder), "--out", str(out), *(["--cpu"] if arguments.cpu else [])]
        out.mkdir(parents=True, exist_ok=True)
        with (out / "output.txt").open("w") as output:
            run = subprocess.run(
                [*command, *COMMON, *overrides, *arguments.overrides], stdout=output, stderr=output, check=False
            )
        steps = result["steps"][way] = steps_in(out / "run")
        write_result(arguments.out / "adapters_in_engine.json", result)
        if run.returncode or not steps:
            print(f"{way:>19s}  failed, see {out / 'output.txt'}", flush=True)
            continue
        found = medians(steps, tuple(name for name, _ in COLUMNS.values()))
        cells = [f"{found[name] / unit:.4g}" for name, unit in COLUMNS.values()]
        print("".join(f"{cell:>19s}" for cell in (way, *cells)), flush=True)


if __name__ == "__main__":
    main()
