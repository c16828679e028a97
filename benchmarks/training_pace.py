"""What sets the pace of a training pass, GPU or host, by variants of the policy worker.

    python benchmarks/training_pace.py --shape 0.6B --out results/training_pace_06.json
    python benchmarks/training_pace.py --shape 8B --sizes 2,8 --rows 16 --out results/training_pace_8.json \
        --variants "as configured,FSDP itself"
    python benchmarks/training_pace.py --device cpu --shape narrow --length 16 --sizes 1,4 --rows 8

Each variant gets a process of its own, and takes passes with GRPO's loss over random rows, in micro-batches of each of
`--sizes` rows: forward and backward, without the update; then a pass for logprobs. A line has

- milliseconds of a micro-batch and its share of the first variant's;
- MFU, by the peak of the GPU's bfloat16;
- the share of the seconds in which any kernel ran: a pass is traced on the GPU's side only, which hardly slows the
  host, and its kernels' seconds are divided by those of passes without a trace;
- kernels of a micro-batch;
- seconds of the first pass, which compiles, and its graphs, with how many of them the cache on disk had. That cache is
  in a new folder, so "as configured" compiles and "caches warm", a process of its own, finds it; "compiled early" does
  so before the worker is made, as a run does while its engine starts (`made_s` in the results has both);
- on a CPU, the operations that the host dispatches for a micro-batch, which are the same in every run;
- the allocator's peak, and whether the loss is bit for bit that of the first variant.

A pass whose kernels take most of its seconds is at the GPU's pace. The shape `narrow` has Qwen3-0.6B's layers with a
hidden size of 64, so on a CPU nearly all of its seconds are the host's.

Variants of DTensor: as configured; the same again; integers of modules, such as a head's size, as constants, while
torch makes them inputs of the graphs in modules that FSDP wraps; FSDP's own work for a single rank; layers not
compiled; other attention (named as in transformers); Liger's kernels for norms, rotary angles and SwiGLU, in layers
that are not compiled. A variant whose package is missing says so.
Docs: docs/measurements/training.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import GIB
from qwen3_shapes import SHAPES, TIED
from step_trace import busy_us
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from training_profile import gpu_events
from workers import DTENSOR, Run, Variant, on_device, random_batch, run_variants, worker_of


def fsdp_itself() -> None:
    """Leave a single rank's units as FSDP makes them."""
    from nemo_offload_rl.backends.dtensor import parallel

    parallel.use_one_rank = lambda units, **_: None


def constant_sizes() -> None:
    """Let the compiler treat integers of modules as constants, as it does for modules that FSDP has not wrapped."""
    from nemo_offload_rl.backends.dtensor import parallel

    original = parallel.apply_fsdp

    def apply_fsdp(root: Any, layers: Any, *rest: Any) -> Any:
        wrapped = original(root, layers, *rest)
        for layer in layers:
            for module in layer.modules():
                module._is_fsdp_managed_module = False
        return wrapped

    parallel.apply_fsdp = apply_fsdp


def attention(name: str) -> None:
    """Use an attention of transformers for padded rows."""
    from nemo_offload_rl.backends.dtensor import built

    built.choose_attention = lambda *_, **__: name  # pyright: ignore[reportAttributeAccessIssue]


def liger() -> None:
    """Replace norms, rotary angles and SwiGLU of Qwen3 by Liger's kernels."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3  # pyright: ignore[reportMissingImports]

    apply_liger_kernel_to_qwen3(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )


NOT_COMPILED = (f"{DTENSOR}.torch_compile=false",)
VARIANTS = {
    "dtensor": (
        Variant("as configured"),
        Variant("caches warm"),
        Variant("compiled early"),
        Variant("constant sizes"),
        Variant("FSDP itself"),
        Variant("not compiled", NOT_COMPILED),
        Variant("Liger", NOT_COMPILED),
        Variant("flash_attention_2"),
        Variant("flash_attention_3"),
    ),
    "megatron": (Variant("as configured"),),
}
CHANGES: dict[str, Callable[[], None]] = {
    "constant sizes": constant_sizes,
    "FSDP itself": fsdp_itself,
    "Liger": liger,
    "flash_attention_2": partial(attention, "flash_attention_2"),
    "flash_attention_3": partial(attention, "flash_attention_3"),
}


class Dispatched(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, and run it."""
        self.number += 1
        return func(*args, **(kwargs or {}))


def leave_to_first_pass(_settings: Any, _process: Any) -> None:
    """Compile nothing before the worker is made."""


def measure(run: Run, variant: Variant, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Time the passes of one variant."""
    from nemo_offload_rl.algorithms.losses import ClippedPGLoss
    from nemo_offload_rl.keys.grpo import ClippedPGLossConfig
    from nemo_offload_rl.policy.early_start import compile_early

    CHANGES.get(variant.name, lambda: None)()
    with nullcontext() if run.backend == "dtensor" else on_device(run.device):
        begin_s = time.perf_counter()
        before = compile_early if variant.name == "compiled early" else leave_to_first_pass
        worker = worker_of(run, variant.overrides, before=before)
        made_s = time.perf_counter() - begin_s
        batch, loss_fn = policy_gradient_batch(run), ClippedPGLoss(ClippedPGLossConfig())

        def train() -> Any:
            loss, _ = worker.forward_backward(batch, loss_fn)
            return loss, worker.zero_grad()

        found: dict[str, Any] = {}
        for kind in ("training", "logprobs"):
            (worker.prepare_for_training if kind == "training" else worker.prepare_for_lp_inference)()
            for size in sizes:
                names = ("train_micro_batch_size", "logprob_batch_size")
                worker._settings = replace(worker._settings, **dict.fromkeys(names, size))
                run_pass = train if kind == "training" else partial(worker.get_logprobs, batch)
                try:
                    found[f"{kind}, {size} rows"] = pace(run, run_pass, size, 3 if kind == "training" else 1)
                except RuntimeError as error:  # out of memory
                    found[f"{kind}, {size} rows"] = {"error": str(error).split(". ")[0]}
        worker.shutdown()
    return {"made_s": made_s, "passes": found}


def policy_gradient_batch(run: Run) -> Any:
    """Random rows with the inputs of GRPO's loss."""
    from nemo_offload_rl.data.batch import SampledBatch

    generator = torch.Generator().manual_seed(0)
    batch = random_batch(run, run.lengths[0], generator)
    logprobs = -torch.rand(batch.input_ids.shape, generator=generator)
    sampled = batch.as_kind(SampledBatch, generation_logprobs=logprobs)
    advantages = torch.randn(run.rows, generator=generator)
    return sampled.with_policy_gradient_inputs(
        advantages=advantages, prev_logprobs=logprobs, reference_logprobs=logprobs, rewards=(advantages > 0).float()
    )


def pace(run: Run, run_pass: Callable[[], Any], size: int, forwards: int) -> dict[str, Any]:
    """Time passes in micro-batches of `size` rows, each worth `forwards` forward passes."""
    from nemo_offload_rl.utils.flops import peak_flops, read_model_sizes

    on_gpu, number = run.device == "cuda", -(-run.rows // size)

    def timed() -> float:
        begin = time.perf_counter()
        results.append(run_pass())
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    results: list[Any] = []
    counters.clear()
    first_s = timed()
    graphs = counters["aot_autograd"]
    for _ in range(run.warmup_steps - 1):
        timed()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed() for _ in range(run.steps)]
    median_s = statistics.median(seconds)
    dispatched = Dispatched()
    if not on_gpu:  # a mode would turn compiled layers off
        with dispatched:
            run_pass()
    peak = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
    sizes = read_model_sizes(run.folder)
    flops = 0.0 if sizes is None else forwards * sizes.forward_flops([run.lengths[0]] * run.rows)
    events = gpu_events(run_pass) if on_gpu else []
    return {
        "micro_batch_ms": median_s / number * 1000,
        "first_s": first_s,
        "graphs": graphs["total"],
        "graphs_in_cache": graphs["autograd_cache_hit"],
        "fastest_ms": min(seconds) / number * 1000,
        "mfu": flops / (median_s * peak) if peak else 0.0,
        "busy": busy_us(events) / 1e6 / median_s,
        "kernels": sum(event.kind == "kernel" for event in events) / number,
        "dispatched": dispatched.number / number,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0,
        "result": str(results[-1][0]) if forwards > 1 else str(float(results[-1].double().sum())),
    }


def print_passes(rows: list[dict[str, Any]]) -> None:
    """A line for each variant and size."""
    columns = ("ms", "of first", "first s", "graphs", "MFU", "GPU busy", "kernels", "operations", "peak GiB", "result")
    print(f"{'variant':26}{'pass':22}" + "".join(f"{column:>11}" for column in columns))
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, found in row.get("passes", {"": row}).items():
            line = f"{row['variant']:26}{name:22}"
            if "error" in found:
                print(f"{line}  {found['error'][:90]}")
                continue
            base = first.setdefault(name, found)
            cells = [f"{found['micro_batch_ms']:.1f}", f"{found['micro_batch_ms'] / base['micro_batch_ms']:.3f}"]
            cells += [f"{found['first_s']:.1f}", f"{found['graphs']} ({found['graphs_in_cache']})"]
            cells += [f"{found['mfu']:.1%}", f"{found['busy']:.1%}"]
            cells += [f"{found[key]:.0f}" for key in ("kernels", "dispatched")] + [f"{found['peak_gib']:.2f}"]
            cells.append("equal" if found["result"] == base["result"] else "differs")
            print(line + "".join(f"{cell:>11}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="dtensor", choices=[*VARIANTS])
    parser.add_argument("--shape", default="0.6B", choices=[*SHAPES])
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--sizes", default="4,32", help="rows of a micro-batch, one measurement each")
    parser.add_argument("--rows", type=int, default=64, help="of a pass")
    parser.add_argument("--passes", type=int, default=3, help="that are timed, after two that warm up")
    parser.add_argument("--variants", default="", help="names of some, separated by commas; empty for all")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--host-gib", type=int, default=0, help="host memory to touch first")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    sizes = tuple(int(size) for size in args.sizes.split(","))
    chosen = args.variants.split(",") if args.variants else []
    variants = [it for it in VARIANTS[args.backend] if not chosen or it.name in chosen]
    run = Run(
        args.shape, "", args.device, (args.length,), args.rows, args.passes, 2, tuple(args.overrides), args.backend
    )
    with tempfile.TemporaryDirectory() as caches:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/torch", "TRITON_CACHE_DIR": f"{caches}/triton"}
        results = run_variants(args, run, variants, partial(measure, sizes=sizes), ties_embeddings=args.shape in TIED)
    print_passes(results["rows"])


if __name__ == "__main__":
    main()
