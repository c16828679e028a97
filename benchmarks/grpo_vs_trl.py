r"""A GRPO step of nemo_offload_rl and one of TRL's GRPOTrainer on the same work.

    python benchmarks/grpo_vs_trl.py --steps 4 --json results/grpo_vs_trl.json
    python benchmarks/grpo_vs_trl.py --sides trl --shape 8B --prompts 16 --group 4 --tokens 512 --steps 2 \
        --trl gradient_checkpointing=true vllm_gpu_memory_utilization=0.2     # the work of large_model_8b.yaml

Both sides, each in a process of its own: the same random Qwen3 model (float32 parameters, bfloat16 compute, AdamW), the
same prompts, 64 of them with 8 responses of 1024 tokens (a few end earlier), temperature 1, KL to a frozen reference,
logprobs of the policy before the update, one optimizer step with micro-batches of 8 responses (`--micro-batch`), vLLM
colocated with sleep mode (0.6 of the GPU). TRL runs without gradient checkpointing, its faster way; `--trl` changes its
configuration. Both are timed by the wall clock with the GPU waited for; the first step of each, which compiles, is left
out of the medians. A side that runs out of memory, or out of time (`--timeout-s`), is among `failed`.

It prints seconds by phase, generated tokens/s and the peak of the GPU's memory of each side. Of ours it prints for each
step the time of both ways between training and generation, and that of the same bytes in plain pinned copies, whose
speed is probed in the same run: `out` is the refit, `back` the waits between the last token and the first kernel of
training, `other` all of the step that is neither the engine's nor a pass of the policy.
Needs a GPU. Docs: docs/measurements/grpo.md and docs/measurements/small-gpus.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from common import ROOT, json_lines, make_model, measured_with, medians, probe_link, write_result
from qwen3_shapes import SHAPES, TIED

PHASES = ("refit", "reload_weights", "generation", "logprobs", "reference_logprobs", "training")
OUT = "timing/refit_s"
BACK = ("timing/generation/sleep_s", "timing/logprobs/enter_s", "timing/training/enter_s")
SIDES = ("trl", "nemo_offload_rl")
SIZE_OPTIONS = ("--prompts", "--group", "--tokens", "--steps", "--micro-batch")


def run_trl(
    model: Path,
    prompts: int,
    group: int,
    tokens: int,
    steps: int,
    micro_batch: int,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Medians of TRL's phases; `changes` are of its configuration."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm import LLM

    torch.cuda.init()
    seconds: dict[str, float] = {}
    history: list[dict[str, float]] = []

    @contextmanager
    def timed(name: str):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            torch.cuda.synchronize()
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin_s

    def timed_reload(_: Any, method: Any, *args: Any) -> AbstractContextManager[Any]:
        return timed("reload_weights") if method == "reload_weights" else nullcontext()

    _wrap(VLLMGeneration, "sync_weights", lambda *_: timed("refit"))
    _wrap(VLLMGeneration, "generate", lambda *_: timed("generation"))
    _wrap(LLM, "collective_rpc", timed_reload)

    class Timed(GRPOTrainer):
        """Tells logprobs of the policy from those of the reference, and both from the training pass."""

        def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            with timed("reference_logprobs" if model is self.ref_model else "logprobs"):
                return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    class Steps(TrainerCallback):
        """Closes the books of each optimizer step."""

        begin_s = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            seconds.clear()
            Steps.begin_s = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            total_s = time.perf_counter() - Steps.begin_s
            seconds["generation"] -= seconds.get("reload_weights", 0.0)
            history.append({**seconds, "total": total_s, "training": total_s - sum(seconds.values())})
            with _steps_file(model.parent, "trl").open("a") as file:
                file.write(json.dumps(history[-1]) + "\n")

    def reward(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [float(len(set(text))) for text in completions]

    keys: dict[str, Any] = {
        "output_dir": str(model.parent / "trl"),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": prompts * group // micro_batch,
        "num_generations": group,
        "max_completion_length": tokens,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "beta": 0.01,
        "bf16": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "temperature": 1.0,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.6,
        "vllm_max_model_length": tokens + 16,
        "vllm_enable_sleep_mode": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }
    config = GRPOConfig(**{**keys, **(changes or {})})
    rows = [{"prompt": f"{10 + i % 90}+{10 + i * 7 % 90}="} for i in range(prompts * (steps + 1))]
    trainer = Timed(
        model=str(model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Steps()],
    )
    trainer.train()
    result = _result(history)
    result["torch_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def run_ours(
    model: Path, prompts: int, group: int, tokens: int, steps: int, micro_batch: int, overrides: list[str]
) -> dict[str, Any]:
    """Medians of our phases, everything that was logged, and who held the GPU's memory in the last two steps."""
    from nemo_offload_rl.runs.loading import load_grpo_config
    from nemo_offload_rl.runs.rollouts import run_grpo
    from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE

    steps_file = _steps_file(model.parent, "nemo_offload_rl")
    log_dir = steps_file.parent
    sizes = {
        "policy.model_name": model,
        "logger.log_dir": log_dir,
        "grpo.max_num_steps": steps,
        "grpo.num_prompts_per_step": prompts,
        "grpo.num_generations_per_prompt": group,
        "policy.train_global_batch_size": prompts * group,
        "policy.train_micro_batch_size": micro_batch,
        "policy.generation.max_new_tokens": tokens,
        "policy.max_total_sequence_length": tokens + 16,
    }
    run_grpo(
        load_grpo_config(ROOT / "benchmarks" / "grpo_gpu.yaml", [f"{k}={v}" for k, v in sizes.items()] + overrides)
    )
    records = json_lines(steps_file)
    history = [
        {name: record.get(f"timing/{name}_s", 0.0) for name in (*PHASES, "total")}
        for record in records
        if record["step"] > 0
    ]
    samples = [sample for sample in json_lines(log_dir / MEMORY_FILE) if sample["step"] > steps - 2]
    return _result(history) | {"records": records, "memory": samples}


def transition(record: dict[str, float], link: dict[str, float]) -> dict[str, float]:
    """Seconds of a step's two ways between training and generation, those of their bytes over the link, and the ratio.

    Out: from the last optimizer step to the first prompt. Back: what is waited for between the last token and the first
    kernel of training, where the driver neither scores nor collates. `other` is the whole step less engine and passes.
    For one worker: bytes are of all, and the link is one GPU's.
    """
    busy_s = sum(record.get(f"timing/{name}_s", 0.0) for name in PHASES[2:]) - sum(record[name] for name in BACK)
    seconds = {"out_s": record[OUT], "back_s": sum(record[name] for name in BACK)}
    copies = {
        f"copies_{way}_s": record[f"residency/bytes_{moved}"] / 1e9 / link[probe] if link[probe] else 0.0
        for way, moved, probe in (("out", "out", "d2h"), ("back", "in", "h2d"))
    }
    ratio = sum(seconds.values()) / sum(copies.values()) if all(copies.values()) else 0.0
    total_s = record["timing/total_s"]
    other = {"other_s": total_s - busy_s, "other_ratio": (total_s - busy_s) / sum(copies.values()) if ratio else 0.0}
    return seconds | copies | {"ratio": ratio, "of_step": sum(seconds.values()) / total_s} | other


def _steps_file(folder: Path, side: str) -> Path:
    """The file to which a side writes each step as it ends."""
    return folder / ("trl_steps.jsonl" if side == "trl" else "ours/metrics.jsonl")


def _result(history: list[dict[str, float]]) -> dict[str, Any]:
    return {"steps": history, "median": medians(history, (*PHASES, "total"))}


def _wrap(owner: type, name: str, context: Callable[..., AbstractContextManager[Any]]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context(*args):
            return original(*args, **kwargs)

    setattr(owner, name, wrapped)


class PeakMemory(threading.Thread):
    """Most memory in use on the first GPU that this process sees, by everyone, as NVML says."""

    def __init__(self) -> None:
        import torch

        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._uuid = str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None
        self._stopped = threading.Event()

    def run(self) -> None:
        from nemo_offload_rl.utils.gpu_memory import read_gpus

        while not self._stopped.wait(0.1):
            use = read_gpus().get(self._uuid) if self._uuid else None
            self.peak_bytes = max(self.peak_bytes, use.used_bytes if use else 0)

    def stop(self) -> float:
        self._stopped.set()
        self.join()
        return self.peak_bytes / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--shape", default="0.6B", choices=list(SHAPES))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, default=8, help="responses")
    parser.add_argument("--trl-steps", type=int, help="steps of TRL's side, if not the same")
    parser.add_argument("--timeout-s", type=float, default=420.0, help="for each side")
    parser.add_argument("--trl", nargs="+", default=[], metavar="KEY=VALUE", help="changes of TRL's configuration")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for our side")
    arguments = parser.parse_args()
    sizes = (arguments.prompts, arguments.group, arguments.tokens, arguments.steps, arguments.micro_batch)
    if arguments.one:
        if arguments.one == "link":
            import torch

            result = probe_link("cuda" if torch.cuda.is_available() else "cpu")
        elif arguments.one == "trl":
            changes = {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in arguments.trl)}
            result = _or_out_of_memory(run_trl, arguments.model, *sizes, changes)
        else:
            result = run_ours(arguments.model, *sizes, arguments.overrides)
        (arguments.model.parent / f"{arguments.one}.json").write_text(json.dumps(result))
        return
    results: dict[str, Any] = {**measured_with(), "sides": {}, "failed": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        device = "cpu" if results["machine"]["gpu"] == "none" else "cuda"
        make_model(folder / "model", arguments.shape, device, ties_embeddings=arguments.shape in TIED)
        probe = [sys.executable, __file__, "--one", "link", "--model", str(folder / "model")]
        subprocess.run(probe, check=True)
        results["link_gb_per_s"] = json.loads((folder / "link.json").read_text())
        for side in arguments.sides:
            peak = PeakMemory()
            peak.start()
            command = [sys.executable, __file__, "--one", side, "--model", str(folder / "model")]
            for option, value in zip(SIZE_OPTIONS, sizes, strict=True):
                command += [option, str(value)]
            if side == "trl" and arguments.trl_steps:
                command += ["--steps", str(arguments.trl_steps)]
            if side == "trl" and arguments.trl:
                command += ["--trl", *arguments.trl]
            env = os.environ | ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if side == "trl" else {})
            overrides = arguments.overrides if side == "nemo_offload_rl" else []
            status = _run([*command, *overrides], env, arguments.timeout_s)
            peak_gib = peak.stop()
            file = folder / f"{side}.json"
            unfinished = {"error": f"status {status}", "records": json_lines(_steps_file(folder, side))}
            result = json.loads(file.read_text()) if file.exists() else unfinished
            kind = "failed" if "error" in result else "sides"
            results[kind][side] = result | {"gpu_peak_gib": peak_gib}
            if side == "nemo_offload_rl":
                # Without a refit of its own a step began with an engine that a validation had left awake.
                steady = [record for record in result["records"] if record["step"] > 1 and OUT in record]
                transitions = [transition(record, results["link_gb_per_s"]) for record in steady]
                results[kind][side]["transitions"] = transitions
            write_result(arguments.json, results)
    _print(results, arguments.prompts * arguments.group * arguments.tokens)


def _or_out_of_memory(run: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    import torch

    try:
        return run(*arguments)
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        where = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return {"error": str(error), "where": where}


def _run(command: list[str], env: dict[str, str], timeout_s: float) -> int | str:
    """Exit status; after the time everything that the command started ends too, so that the GPU is free."""
    process = subprocess.Popen(command, env=env)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        return f"none after {timeout_s:.0f} s"


def _print(results: dict[str, Any], num_tokens: int) -> None:
    sides = results["sides"]
    print(f"{'seconds':22s}" + "".join(f"{side:>18s}" for side in sides))
    for phase in (*PHASES, "total"):
        print(f"{phase:22s}" + "".join(f"{side['median'][phase]:18.2f}" for side in sides.values()))
    rates = [num_tokens / side["median"]["generation"] for side in sides.values()]
    print(f"{'generated tokens/s':22s}" + "".join(f"{rate:18.0f}" for rate in rates))
    print(f"{'GPU memory peak, GiB':22s}" + "".join(f"{side['gpu_peak_gib']:18.1f}" for side in sides.values()))
    link = results["link_gb_per_s"]
    print(f"link, GB/s: {link['d2h']:.1f} out, {link['h2d']:.1f} in")
    for step in sides.get("nemo_offload_rl", {}).get("transitions", []):
        print("transitions: " + ", ".join(f"{name} {value:.3f}" for name, value in step.items()))
    for name, side in results["failed"].items():
        print(f"{name}: {side['error'][:200]}")


if __name__ == "__main__":
    main()
