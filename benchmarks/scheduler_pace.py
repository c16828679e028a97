"""The host's seconds for a step of decoding, with our engine's scheduler and with vLLM's, in turns on one engine.

    python benchmarks/scheduler_pace.py --json results/scheduler_pace.json

A model of one narrow layer on a CPU, so that most of a step is the engine's own work: scheduling, preparing inputs, and
handling outputs. 512 requests decode at the same time; calls take turns with each way to find slots for a token
(`nemo_offload_rl/generation/vllm/schedulers.py`). Printed are medians of the seconds that the engine's thread ran, in a
whole step and in the scheduler's `schedule`, and the ratio of both ways.
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


def timed(call: Any, seconds: list[float]) -> Any:
    """The function, with the thread's seconds of each call added to a list."""

    def run(*arguments: Any, **more: Any) -> Any:
        begin_s = time.thread_time()
        result = call(*arguments, **more)
        seconds.append(time.thread_time() - begin_s)
        return result

    return run


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each way's steps and schedules."""
    from engine_process import engine_settings  # pyright: ignore[reportMissingImports]

    from nemo_offload_rl.generation.vllm.engine import VllmEngine
    from nemo_offload_rl.keys.generation import SamplingSettings

    settings = engine_settings(
        folder,
        max_model_len=options.tokens + len(PROMPT) + 2,
        kv_cache_memory_gib=2.0,
        per_request_seeds=False,
        vllm_kwargs={"max_num_seqs": options.requests, "load_format": "auto"},
    )
    vllm_engine = VllmEngine(settings)
    engine = vllm_engine._engine.llm_engine
    scheduler: Any = engine.engine_core.engine_core.scheduler  # pyright: ignore[reportAttributeAccessIssue]
    manager = scheduler.kv_cache_manager
    ways = {"ours": manager.allocate_slots, "vLLM's": type(manager).allocate_slots.__get__(manager)}
    step, schedule = engine.step, scheduler.schedule
    result: dict[str, Any] = {"block_tokens": manager.coordinator.single_type_managers[0].block_size}
    found: dict[str, dict[str, list[float]]] = {name: {"step_s": [], "schedule_s": []} for name in ways}
    for call in range(options.calls + 1):
        for name, way in ways.items():
            lists = found[name] if call else {"step_s": [], "schedule_s": []}
            manager.allocate_slots = way
            engine.step, scheduler.schedule = timed(step, lists["step_s"]), timed(schedule, lists["schedule_s"])
            sampling = SamplingSettings(max_new_tokens=options.tokens, seed=call)
            vllm_engine.generate([PROMPT] * (options.requests // 8), sampling, 8)
    vllm_engine.shutdown()
    for kind in ("step_s", "schedule_s"):
        result[kind] = {name: statistics.median(lists[kind]) for name, lists in found.items()}
    return result | {"num_steps": len(found["ours"]["step_s"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    sys.path.append(str(ROOT / "tests" / "support"))
    from nemo_offload_rl.generation.vllm.engine_args import vllm_env

    os.environ.update(vllm_env("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPE, "cpu", ties_embeddings=True)
        result = measure(Path(folder), options)
    for kind in ("step_s", "schedule_s"):
        ours_s, other_s = result[kind].values()
        print(f"{kind:11} ours {1e3 * ours_s:6.2f} ms  vLLM's {1e3 * other_s:6.2f} ms  ratio {ours_s / other_s:.2f}")
    write_result(options.json, {**measured_with(), "requests": options.requests, **result})


if __name__ == "__main__":
    main()
