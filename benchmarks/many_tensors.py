"""What thousands of tensors cost the host in a step, whatever their bytes: a mixture of many small experts on a CPU.

    python benchmarks/many_tensors.py --json benchmarks/results/many_tensors.json

Megatron's optimizer has three tensors for each weight of each expert. Here they are tiny, so that seconds are those of
listing, allocating and starting copies, and of Megatron's own loops. States stream in parts. Seconds are medians of
`--steps` steps after the first; a checkpoint is saved and loaded once. Megatron's calls of CUDA are answered as in the
tests, which makes its own code slower; transitions run without that.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from megatron_runs import KEY, NLL, ROOT, Run, Variant, machine, make_worker, on_device, random_batch
from qwen3_shapes import MOE_SHAPES, MoeShape, write_model

NAME = "many-experts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--part-mib", type=float, default=1.9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "examples" / "demo"))  # for its tokenizer
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "experts_per_token": 2, "vocab": 1024}
    MOE_SHAPES[NAME] = MoeShape(64, arguments.layers, arguments.experts, 32, **sizes)
    with tempfile.TemporaryDirectory(prefix="many_tensors_") as name, on_device("cpu"):
        folder = Path(name)
        write_model(folder / "model", MOE_SHAPES[NAME], "cpu")
        streamed = f"{KEY}.optimizer.offload_optimizer_states"
        overrides = (f"{streamed}=true", f"{streamed}_chunk_mib={arguments.part_mib}")
        run = Run(NAME, str(folder / "model"), "cpu", (64,), 2, arguments.steps, 1, overrides)
        found = measure(run, folder)
    command = shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    known = {"date": date.today().isoformat(), "command": command, "machine": machine("cpu")}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**known, "python": platform.python_version(), **found}, indent=1) + "\n")
    print(f"{found['num_tensors']} tensors of states in {found['num_parts']} parts")
    for what, seconds in found["seconds"].items():
        print(f"{what:28s} {seconds:8.3f} s")


def measure(run: Run, folder: Path) -> dict[str, Any]:
    """Seconds of each part of a step, and of a save and a load."""
    worker = make_worker(run, Variant(NAME))
    taken: dict[str, list[float]] = defaultdict(list)

    def timed(call: Callable[..., Any], *arguments: Any, plain: bool = True, **options: Any) -> None:
        begin = time.perf_counter()
        with torch._C.DisableTorchFunction() if plain else nullcontext():
            call(*arguments, **options)
        taken[call.__name__].append(time.perf_counter() - begin)

    for step in range(1 + run.steps):
        batch = random_batch(run, run.lengths[0], torch.Generator().manual_seed(step))
        timed(worker.prepare_for_lp_inference)
        timed(worker.prepare_for_training)
        worker.forward_backward(batch, NLL())
        timed(worker.optim_step, before_refit=True, plain=False)
        timed(worker.offload_before_refit)
        timed(worker.offload_after_refit)
    timed(worker.save_checkpoint, folder / "saved", plain=False)
    timed(worker.load_checkpoint, folder / "saved", plain=False)
    groups = worker._backend._streamed.groups()
    return {
        "num_tensors": sum(1 for group in groups for _ in group.tensors()),
        "num_parts": len(groups) - 1,
        "seconds": {what: statistics.median(some[1:] or some) for what, some in taken.items()},
    }


if __name__ == "__main__":
    main()
