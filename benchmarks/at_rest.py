"""What a policy process holds of a GPU beside torch's allocator, and what it took it for.

    python benchmarks/at_rest.py --json results/at_rest.json
    python benchmarks/at_rest.py --backend dtensor --shape 4-layers

CUDA's context, the code of kernels, workspaces of libraries: none of it leaves with the state, so it stays beside the
engine. The driver is asked (NVML) after each thing that a worker does, and in passes after each module's forward and
before its backward. What is new belongs to what ran since the line before. Every change above `--least-mib` is a line.
Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from megatron_runs import GIB, NLL, ROOT, Run, Variant, machine, make_worker, random_batch, worker_of
from qwen3_shapes import MOE_SHAPES, SHAPES, shape_of, write_model


class Growth:
    """Bytes beside torch's allocator, by what was done last.

    Args:
        least_bytes: Growth below is not noted.
    """

    def __init__(self, least_bytes: int) -> None:
        self.lines: list[tuple[str, float, float]] = []
        self._least_bytes = least_bytes
        self._known_bytes = 0

    def note(self, what: str) -> None:
        """Read the driver: what is new since the last call belongs to `what`."""
        from nemo_offload_rl.utils.gpu_memory import read_gpus

        torch.cuda.synchronize()
        use = read_gpus()[str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)]
        held_bytes = use.by_pid.get(os.getpid(), 0) - torch.cuda.memory_reserved()
        grown_bytes = held_bytes - self._known_bytes
        if abs(grown_bytes) >= self._least_bytes:
            self.lines.append((what, grown_bytes / GIB, held_bytes / GIB))
            print(f"{what[:90]:90s} {grown_bytes / GIB:+8.3f} {held_bytes / GIB:8.3f} GiB", flush=True)
            self._known_bytes = held_bytes

    def watch(self, model: nn.Module) -> None:
        """Note after each module's forward, and before its backward, when the gradient of its output is there."""

        def noted(title: str, output: Any) -> None:
            self.note(f"forward of {title}")
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self.note(f"backward up to {title}"))

        for name, module in model.named_modules():
            title = f"{type(module).__name__} {name}"
            module.register_forward_hook(lambda _module, _inputs, output, title=title: noted(title, output))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="megatron", choices=["megatron", "dtensor"])
    parser.add_argument("--shape", default="8-layers", choices=[*SHAPES, *MOE_SHAPES])
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--least-mib", type=int, default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "examples" / "demo"))  # for its tokenizer
    growth = Growth(arguments.least_mib * 2**20)
    torch.zeros(1, device="cuda")
    growth.note("CUDA's context")
    with tempfile.TemporaryDirectory(prefix="at_rest_") as name:
        write_model(Path(name), shape_of(arguments.shape), "cuda")
        run = Run(arguments.shape, name, "cuda", (arguments.length,), 2, 2, 0, tuple(arguments.overrides))
        growth.note("random numbers")
        work(run, arguments.backend, growth)
    command = shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    found = {"date": date.today().isoformat(), "command": command, "machine": machine("cuda"), "growth": growth.lines}
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def work(run: Run, backend: str, growth: Growth) -> None:
    """What a worker does in two steps of GRPO."""
    variant = Variant(backend)
    if backend == "megatron":
        worker = make_worker(run, variant)
        model: Any = worker._backend._chunks[0]
    else:
        worker = worker_of(run, variant, "grpo_math_1B.yaml", ["policy.dtensor_cfg.torch_compile=false"])
        model = worker._backend._built.module
    growth.note("the worker is made")
    growth.watch(model)
    generator = torch.Generator().manual_seed(0)
    for step in range(run.steps):
        batch = random_batch(run, run.lengths[0], generator)
        worker.prepare_for_lp_inference()
        growth.note(f"step {step}: prepare_for_lp_inference")
        worker.get_logprobs(batch)
        growth.note(f"step {step}: get_logprobs")
        worker.prepare_for_training()
        growth.note(f"step {step}: prepare_for_training")
        worker.forward_backward(batch, NLL())
        growth.note(f"step {step}: forward_backward")
        worker.optim_step()
        growth.note(f"step {step}: optim_step")
        worker.offload_before_refit()
        for _ in worker.named_weights():
            pass
        worker.offload_after_refit()
        growth.note(f"step {step}: everything has left")


if __name__ == "__main__":
    main()
