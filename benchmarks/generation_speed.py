"""Seconds of one vLLM engine for a rollout of 512 responses of 1024 tokens, by how it returns logprobs and is set.

    python benchmarks/generation_speed.py --json benchmarks/results/generation_speed.json
    python benchmarks/generation_speed.py --fp8 --shapes 0.6B 8B 12-layers --json results/generation_fp8.json

Each variant runs in a process of its own (vLLM reads its environment variables at import), with a random model. Calls
take turns in one engine: logprobs recorded by its worker, returned by vLLM with each token, and none at all. It also
counts recorded logprobs that are not bit for bit those that vLLM returns. The first call of each way compiles and is
left out. With adapters (`--variants base "adapters of rank 16" --ways recorded`) the engine applies random ones in all
layers; `base` is as fast as weights with merged adapters, and `refit_s` the time to load them. Tries itself on a CPU:
`--device cpu --shapes tiny --prompts 8 --tokens 64`. Docs: docs/measurements/grpo.md.

    python benchmarks/generation_speed.py --start --json results/engine_start.json

starts each of `START_VARIANTS` twice, with empty compile caches and with those of the first start, shows what vLLM logs
meanwhile, and generates once. `imports_s` are those of vLLM's modules, `start_s` the engine's after them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple
from itertools import chain
from pathlib import Path
from typing import Any

from common import make_model, measured_with, write_result

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "seeds": {"per_request_seeds": True},
    "processes": {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
    "worker process": {"kwargs": {"distributed_executor_backend": "mp"}},
    "async engine": {"async_engine": True},
    "first runner": {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    "synchronous scheduling": {"kwargs": {"async_scheduling": False}},
    "vLLM's scheduler": {"kwargs": {"scheduler_cls": None}},
    "graphs of 1024 rows": {"kwargs": {"max_cudagraph_capture_size": 1024}},
    "full graphs of decoding": {"kwargs": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}},
    "piecewise graphs": {"kwargs": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}},
    "graphs of 21 sizes": {"kwargs": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, *range(64, 513, 32)]}},
    "cache of 64 GiB": {"kv_cache_memory_gib": 64},
    "eager": {"enforce_eager": True},
    "blocks of 128": {"kwargs": {"block_size": 128}},
    "triton attention": {"kwargs": {"attention_backend": "TRITON_ATTN"}},
    "adapters of rank 16": {"adapter_rank": 16},
    "adapters of rank 64": {"adapter_rank": 64},
    "fp8": {"precision": "fp8"},
    "fp8 deep_gemm": {"precision": "fp8", "use_deep_gemm": True},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 both": {"precision": "fp8", "kv_cache_dtype": "fp8"},
}
START_VARIANTS = (
    "base",
    "full graphs of decoding",
    "piecewise graphs",
    "graphs of 21 sizes",
    "cache of 64 GiB",
    "eager",
)
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WAYS = ("recorded", "returned", "none")


def settings_of(variant: dict[str, Any], arguments: argparse.Namespace) -> Any:
    """Settings of the variant's engine."""
    from nemo_offload_rl.keys.engine import ServedAdapters, VllmSettings

    on_gpu = arguments.device == "cuda"
    settings: dict[str, Any] = {
        "model_name": str(arguments.model),
        "hf_config_overrides": {},
        "seed": 0,
        "async_engine": False,
        "precision": "bfloat16" if on_gpu else "float32",
        "kv_cache_dtype": "auto",
        "use_deep_gemm": False,
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.6,
        "kv_cache_memory_gib": None if on_gpu else 0.25,
        "enable_sleep_mode": True,
        "max_model_len": arguments.tokens + 16,
        "enforce_eager": False,
        "per_request_seeds": False,
        "max_restarts": 0,
        "vllm_kwargs": {"load_format": "auto", **variant.get("kwargs", {})},
    }
    if rank := variant.get("adapter_rank"):
        settings["adapters"] = ServedAdapters(rank, LAYERS)
    return VllmSettings(**settings | {key: value for key, value in variant.items() if key in settings})


def load_adapters(engine: Any, folder: Path, rank: int) -> float:
    """Send random adapters to the engine, and return the seconds of the refit."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_offload_rl.protocols.backend import WeightSpec
    from nemo_offload_rl.weight_sync.shared_memory import SharedMemorySender

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tensors: dict[str, Any] = {}
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in LAYERS:
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, layer.in_features) / 100
            tensors[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, rank) / 100
    sender = SharedMemorySender([WeightSpec(name, tuple(it.shape), it.dtype) for name, it in tensors.items()], 2**30)
    begin_s = time.perf_counter()
    sender.start(iter(tensors.items()))
    while (bucket := sender.next_bucket()) is not None:
        engine.load_bucket(bucket)
    engine.finish_refit()
    sender.close()
    return time.perf_counter() - begin_s


def without_logprobs(engine: Any, prompts: list[list[int]], sampling: Any, group: int) -> int:
    """Number of tokens that vLLM samples when nobody asks for logprobs."""
    from vllm import TokensPrompt

    from nemo_offload_rl.generation.vllm.requests import sampling_params

    params = [sampling_params(sampling, group, i, records_logprobs=True) for i in range(len(prompts))]
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    outputs = engine._engine.generate(asked, params, use_tqdm=False, lora_request=engine._adapters)
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)


def different_logprobs(engine: Any, prompts: list[list[int]], sampling: Any, group: int) -> dict[str, int]:
    """Count tokens that are both recorded and returned, and those of them whose two logprobs differ."""
    from nemo_offload_rl.generation.vllm.requests import (
        completion_from_output,
        recorded_tokens,
        sampled_tokens,
        sampling_params,
    )

    names = [
        engine._add(prompt, sampling_params(sampling, group, i, records_logprobs=False))
        for i, prompt in enumerate(prompts)
    ]
    outputs: list[Any] = []
    while len(outputs) < len(names):
        outputs += engine._step()
    wanted = [list(astuple(tokens)) for output in outputs for tokens in sampled_tokens(output)]
    answers = recorded_tokens(engine._rpc("take_logprobs", (wanted, [])))
    recorded = chain.from_iterable(logprobs for logprobs, _ in answers)
    samples = [sample for output in outputs for sample in output.outputs]
    returned = chain.from_iterable(completion_from_output(sample).logprobs for sample in samples)
    differs = [one != other for one, other in zip(recorded, returned, strict=True)]
    return {"tokens": len(differs), "different": sum(differs)}


def measure(variant: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the start, and of each way's calls in turns."""
    from nemo_offload_rl.generation.vllm.async_engine import AsyncVllmEngine
    from nemo_offload_rl.generation.vllm.engine import VllmEngine
    from nemo_offload_rl.keys.generation import SamplingSettings

    begin_s = time.perf_counter()
    from vllm import LLM, AsyncLLMEngine  # noqa: F401

    imports_s = time.perf_counter() - begin_s
    settings = settings_of(variant, arguments)
    begin_s = time.perf_counter()
    engine = (AsyncVllmEngine if settings.async_engine else VllmEngine)(settings)
    start_s = time.perf_counter() - begin_s
    result: dict[str, Any] = {"imports_s": imports_s, "start_s": start_s, "records": engine._records_logprobs}
    if rank := variant.get("adapter_rank"):
        result["refit_s"] = load_adapters(engine, arguments.model, rank)
    prompts = [[4 + i % 16, 5, 6, 7, 8, 9] for i in range(arguments.prompts)]
    if not settings.async_engine and result["records"]:
        few = SamplingSettings(max_new_tokens=min(arguments.tokens, 64), seed=0)
        result |= different_logprobs(engine, prompts, few, arguments.group)
    ways = [way for way in arguments.ways if not (way == "none" and settings.async_engine)]
    result["seconds"] = {way: [] for way in ways}
    for call in range(arguments.calls + 1):
        for way in ways:
            engine.record_logprobs(way == "recorded")
            sampling = SamplingSettings(max_new_tokens=arguments.tokens if call else 8, seed=call)
            begin_s = time.perf_counter()
            if way == "none":
                num_tokens = without_logprobs(engine, prompts, sampling, arguments.group)
            else:
                groups = engine.generate(prompts, sampling, arguments.group)
                num_tokens = sum(len(sample.logprobs) for samples in groups for sample in samples)
            if call:
                result["seconds"][way].append(time.perf_counter() - begin_s)
    result["tokens_of_a_call"] = num_tokens
    engine.shutdown()
    return result


def show(name: str, result: dict[str, Any]) -> None:
    """Print a variant's row: median seconds of each way, as a multiple of those without logprobs, and tokens/s."""
    seconds = {way: statistics.median(calls) for way, calls in result["seconds"].items()}
    base_s = seconds.get("none") or min(seconds.values())
    cells = [f"{way} {s:7.2f} s ({s / base_s:.3f}x)" for way, s in seconds.items()]
    speed = result["tokens_of_a_call"] / seconds.get("recorded", base_s)
    different = f"{result['different']} of {result['tokens']} differ" if "different" in result else ""
    start = f"imports {result['imports_s']:.1f} s  start {result['start_s']:.1f} s"
    print(f"{name:30}", *cells, f"{speed:8.0f} tokens/s", start, different, sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["base"], choices=VARIANTS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", nargs="+", default=["0.6B"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fp8", action="store_true", help="variants of 8 bits beside bfloat16, two calls of each")
    parser.add_argument("--start", action="store_true", help="start the variants twice each, and generate once")
    arguments = parser.parse_args()
    if arguments.start:
        arguments.variants, arguments.ways, arguments.calls = START_VARIANTS, ["recorded"], 1
    if arguments.fp8:
        arguments.variants = ["base", *(name for name in VARIANTS if name.startswith("fp8"))]
        arguments.ways, arguments.calls = ["recorded"], 2
    if arguments.one:
        print(json.dumps(measure(VARIANTS[arguments.one], arguments)))
        return
    from nemo_offload_rl.generation.vllm.engine_args import vllm_env

    results: dict[str, Any] = {**measured_with(), "shapes": {}}
    for shape in arguments.shapes:
        found = results["shapes"][shape] = {}
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), shape, arguments.device, ties_embeddings=shape == "0.6B")
            for name in arguments.variants:
                variant = VARIANTS[name]
                deep_gemm = variant.get("use_deep_gemm", False) if variant.get("precision") == "fp8" else None
                env = {**os.environ, **vllm_env(arguments.device, deep_gemm), **variant.get("env", {})}
                runs = {name: env}
                if arguments.start:
                    caches = {key: f"{folder}/compiled {name}/{key}" for key in CACHES}
                    env |= {"VLLM_LOGGING_LEVEL": "INFO", **caches}
                    runs = {f"{name}, cold": env, f"{name}, warm": env}
                for title, env in runs.items():
                    print(shape, end=" ", flush=True)
                    command = [sys.executable, *sys.argv, "--one", name, "--model", folder]
                    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
                    if done.returncode:
                        print(f"{title}: status {done.returncode}")
                        continue
                    found[title] = json.loads(done.stdout.splitlines()[-1])
                    show(title, found[title])
                    write_result(arguments.json, results)


if __name__ == "__main__":
    main()
