"""Seconds of one vLLM engine for a rollout of 512 responses of 1024 tokens, by how it is asked.

    python benchmarks/generation_speed.py --json benchmarks/results/generation_speed.json

Each variant runs in a process of its own (vLLM reads its environment variables at import), with a random model: the
engine in this process, with a seed for each response, and in a process of its own. It prints seconds of each call, the
first of which compiles, and tokens/s of the fastest. Needs a GPU. Docs: docs/measurements/grpo.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import make_model, measured_with, write_result

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "seeds": {"per_request_seeds": True},
    "processes": {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
    "eager": {"enforce_eager": True},
}


def measure(variant: dict[str, Any], model: Path, prompts: int, group: int, tokens: int, calls: int) -> dict[str, Any]:
    """Seconds of each call, the first with compilation of kernels left out."""
    from nemo_offload_rl.generation.vllm.engine import VllmEngine
    from nemo_offload_rl.keys.engine import VllmSettings
    from nemo_offload_rl.keys.generation import SamplingSettings

    settings: dict[str, Any] = {
        "model_name": str(model),
        "hf_config_overrides": {},
        "seed": 0,
        "async_engine": False,
        "precision": "bfloat16",
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.6,
        "kv_cache_memory_gib": None,
        "enable_sleep_mode": True,
        "max_model_len": tokens + 16,
        "enforce_eager": False,
        "per_request_seeds": False,
        "max_restarts": 0,
        "vllm_kwargs": {"load_format": "auto", **variant.get("kwargs", {})},
    }
    settings |= {key: value for key, value in variant.items() if key in settings}
    begin_s = time.perf_counter()
    engine = VllmEngine(VllmSettings(**settings))
    result: dict[str, Any] = {"start_s": time.perf_counter() - begin_s, "seconds": []}
    asked = [[4 + i % 16, 5, 6, 7, 8, 9] for i in range(prompts)]
    for call in range(calls + 1):
        sampling = SamplingSettings(max_new_tokens=tokens if call else 8, seed=call)
        begin_s = time.perf_counter()
        groups = engine.generate(asked, sampling, group)
        result["seconds"].append(time.perf_counter() - begin_s)
    result["tokens"] = sum(len(sample.token_ids) for samples in groups for sample in samples)
    result["tokens_per_s"] = result["tokens"] / min(result["seconds"][1:])
    engine.shutdown()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["base", "seeds", "processes"], choices=VARIANTS)
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = (arguments.prompts, arguments.group, arguments.tokens, arguments.calls)
    if arguments.one:
        print(json.dumps(measure(VARIANTS[arguments.one], arguments.model, *sizes)))
        return
    from nemo_offload_rl.generation.vllm.engine_args import vllm_env

    results: dict[str, Any] = {**measured_with(), "variants": {}}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.shape, "cuda", ties_embeddings=True)
        for name in arguments.variants:
            env = {**os.environ, **vllm_env("cuda"), **VARIANTS[name].get("env", {})}
            command = [sys.executable, __file__, "--one", name, "--model", folder]
            for option, value in zip(("--prompts", "--group", "--tokens", "--calls"), sizes, strict=True):
                command += [option, str(value)]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{name}: status {done.returncode}")
                continue
            results["variants"][name] = json.loads(done.stdout.splitlines()[-1])
            print(name, json.dumps(results["variants"][name]))
            write_result(arguments.json, results)


if __name__ == "__main__":
    main()
