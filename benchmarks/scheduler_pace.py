"""The host's seconds for a step of decoding, with our engine's scheduler and with vLLM's, in turns on one engine.

    python benchmarks/scheduler_pace.py --json results/scheduler_pace.json

A model of one narrow layer on a CPU, so that most of a step is the engine's own work. 512 requests decode at the same
time; calls take turns with our scheduler (`nemo_offload_rl/generation/vllm/decode_steps.py`) and with vLLM's. Printed
are medians of the seconds that the engine's thread ran: in a whole step, in `schedule`, in `update_from_output`, in
`process_outputs`, which makes what callers read, and in the rest, which is the model and its inputs. A GPU has another
runner of models, so only the three parts are those of a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, measured_with, write_result
from qwen3_shapes import Qwen3Shape, write_model

SHAPE = Qwen3Shape(hidden=32, layers=1, intermediate=32, heads=2, kv_heads=1, head_dim=32, vocab=128)
PROMPT = [4, 5, 6, 7, 8, 9]
PARTS = ("step", "schedule", "update_from_output", "process_outputs")


def timed(call: Any, seconds: list[float]) -> Any:
    """The function, with the thread's seconds of each call added to a list."""

    def run(*arguments: Any, **more: Any) -> Any:
        begin_s = time.thread_time()
        result = call(*arguments, **more)
        seconds.append(time.thread_time() - begin_s)
        return result

    return run


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each way's steps and their parts."""
    import torch
    from engine_process import engine_settings  # pyright: ignore[reportMissingImports]
    from vllm.v1.core.sched.scheduler import Scheduler

    from nemo_offload_rl.generation.vllm.engine import VllmEngine
    from nemo_offload_rl.keys.generation import SamplingSettings

    class Endless(VllmEngine):
        """Responses end at their length alone, so each step has all requests."""

        def _params(self, *arguments: Any, **more: Any) -> Any:
            params = super()._params(*arguments, **more)
            params.ignore_eos = True
            return params

    torch.set_num_threads(1)
    settings = engine_settings(
        folder,
        max_model_len=options.tokens + len(PROMPT) + 2,
        kv_cache_memory_gib=2.0,
        per_request_seeds=False,
        vllm_kwargs={"max_num_seqs": options.requests, "block_size": options.block_tokens, "load_format": "auto"},
    )
    vllm_engine = Endless(settings)
    engine: Any = vllm_engine._engine.llm_engine
    scheduler, processor = engine.engine_core.engine_core.scheduler, engine.output_processor
    vllms = [way.__get__(scheduler) for way in (Scheduler.schedule, Scheduler.update_from_output)]
    ways = {"ours": (True, scheduler.schedule, scheduler.update_from_output), "vLLM's": (False, *vllms)}
    step, process = engine.step, processor.process_outputs
    found = {name: {part: [] for part in PARTS} for name in ways}
    for call in range(options.calls + 1):
        for name, (is_ours, schedule, update) in ways.items():
            lists = found[name] if call else {part: [] for part in PARTS}
            scheduler._is_short = is_ours  # read as requests come
            scheduler.schedule = timed(schedule, lists["schedule"])
            scheduler.update_from_output = timed(update, lists["update_from_output"])
            processor.process_outputs = timed(process, lists["process_outputs"])
            engine.step = timed(step, lists["step"])
            sampling = SamplingSettings(max_new_tokens=options.tokens, seed=call)
            vllm_engine.generate([PROMPT] * (options.requests // 8), sampling, 8)
    vllm_engine.shutdown()
    seconds = {name: {part: statistics.median(each) for part, each in lists.items()} for name, lists in found.items()}
    for parts in seconds.values():
        parts["model"] = 2 * parts["step"] - sum(parts.values())
    return {"block_tokens": options.block_tokens, "seconds": seconds, "num_steps": len(found["ours"]["step"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    sys.path.append(str(ROOT / "tests" / "support"))
    from nemo_offload_rl.generation.vllm.engine_args import vllm_env

    os.environ.update(vllm_env("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPE, "cpu", ties_embeddings=True)
        result = measure(Path(folder), options)
    ways = result["seconds"]
    for part in ways["ours"]:
        print(f"{part:20}", *(f"{name} {1e3 * seconds[part]:6.2f} ms " for name, seconds in ways.items()))
    write_result(options.json, {**measured_with(), "requests": options.requests, **result})


if __name__ == "__main__":
    main()
