"""What benchmarks of training steps share: a model folder, a worker for a variant, timed steps, child processes.

A variant is a list of the overrides that a user would write. Each runs in a process of its own, forked after the heavy
imports. Where CUDA does not allow that, one process runs those that let go of everything; what is left is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import json
import logging
import math
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read by Transformer Engine when it is imported; without it activation offloading is refused.
os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from qwen3_shapes import MOE_SHAPES, SHAPES, shape_of
from qwen3_shapes import write_model as write_untied
from residency_overlap import NLL, write_model
from residency_peers import grow_host_memory, probe_link

ROOT = Path(__file__).parents[1]
logging.getLogger("megatron").setLevel(logging.WARNING)
GIB = 2**30
KEY = "policy.megatron_cfg"


@dataclass(frozen=True)
class Variant:
    """A row of the table: a name, and overrides of examples/configs/grpo_math_1B_megatron.yaml."""

    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """What every variant has in common."""

    shape: str
    folder: str
    device: str
    lengths: tuple[int, ...]
    rows: int
    steps: int
    warmup_steps: int
    overrides: tuple[str, ...]


def parse_arguments(description: str, lengths: str) -> argparse.Namespace:
    """The command line of these benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, lengths)
    return parser.parse_args()


def add_arguments(parser: argparse.ArgumentParser, lengths: str, *, shape: str = "1.7B", rows: int = 2) -> None:
    """What `run_children` reads, with these defaults."""
    parser.add_argument("--shape", default=shape, choices=[*SHAPES, *MOE_SHAPES])
    parser.add_argument("--lengths", default=lengths, help="tokens of a micro-batch, one row each; several by commas")
    parser.add_argument("--rows", type=int, default=rows, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="run these variants, by their whole names")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--budget-s", type=float, default=math.inf, help="start no variant after so many seconds")
    parser.add_argument(
        "--host-gib", type=int, default=64, help="host memory to touch once before anything is measured"
    )
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--overrides", nargs="*", default=(), metavar="KEY=VALUE", help="of every variant")


def run_variants(args: argparse.Namespace, variants: Sequence[Variant]) -> dict[str, Any]:
    """Timed steps of every variant in turn; what failed has `error` instead of numbers."""
    return run_children(args, variants, run_variant, may_share_process=True)


def run_children(
    args: argparse.Namespace,
    variants: Sequence[Variant],
    target: Callable[[Run, Variant], dict[str, Any]],
    may_share_process: bool = False,
    needs_megatron: bool = True,
    ties_embeddings: bool = True,
) -> dict[str, Any]:
    """`target` for every variant in turn; what failed has `error` instead of numbers.

    Args:
        args: Of `parse_arguments`.
        variants: The rows of the table.
        target: Runs a variant and returns what goes into its row.
        may_share_process: It lets go of all device memory, so that one process can run one variant after another.
        needs_megatron: It is imported before the children are forked.
        ties_embeddings: A dense model's output layer is its embedding.
    """
    unknown = set(args.only or ()) - {variant.name for variant in variants}
    if unknown:
        sys.exit(f"--only: no variant is called {sorted(unknown)}; there are {[variant.name for variant in variants]}")
    import_everything(args.device, needs_megatron=needs_megatron)
    run_child = _child_runner(args.device, may_share_process)
    started = time.perf_counter()
    link = {"d2h": 0.0, "h2d": 0.0}
    if args.device == "cuda":
        link = run_child(_prepare_host, args.host_gib << 30)
    # In a child: a parent that has asked CUDA anything can fork none that uses it.
    found_machine = run_child(machine, args.device)
    found_machine.pop("left_behind_gib", None)
    link.pop("left_behind_gib", None)
    rows: list[dict[str, Any]] = []
    results = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": found_machine,
        "link_gb_per_s": link,
        "shape": args.shape,
        "rows": rows,
    }
    with tempfile.TemporaryDirectory() as folder:
        run_child(_write_model, args.shape, folder, args.device, ties_embeddings)
        lengths = tuple(int(length) for length in args.lengths.split(","))
        counts = (args.rows, args.steps, args.warmup_steps)
        run = Run(args.shape, folder, args.device, lengths, *counts, tuple(args.overrides))
        for variant in variants:
            if args.only and variant.name not in args.only:
                continue
            if time.perf_counter() - started > args.budget_s:
                print(f"{variant.name}: no time left", flush=True)
                continue
            begin = time.perf_counter()
            found = run_child(target, run, variant)
            took_s = time.perf_counter() - begin
            rows.append({"variant": variant.name, "overrides": list(variant.overrides), "took_s": took_s, **found})
            print(f"{variant.name}: {found.get('error', 'done')} ({took_s:.0f} s)", flush=True)
            write_results(args, results)  # after each: one that does not end takes nothing with it
    return results


def run_variant(run: Run, variant: Variant) -> dict[str, Any]:
    """One Megatron worker, and some steps at every length.

    Returns:
        Under `lengths`, by length: seconds of each step, tokens a second, peak GiB, losses.
    """
    with on_device(run.device):
        return measure_lengths(make_worker(run, variant), run)


def measure_lengths(worker: Any, run: Run) -> dict[str, Any]:
    """Steps at every length, until memory runs out; the worker is shut down."""
    worker.prepare_for_training()
    measured = {}
    for length in run.lengths:
        try:
            measured[str(length)] = measure(worker, run, length)
        except torch.cuda.OutOfMemoryError as error:
            measured[str(length)] = {"error": str(error).split(". ")[0]}
            break
    # Megatron's globals keep the model alive; offloaded, it holds no memory of the device.
    worker.offload_before_refit()
    worker.offload_after_refit()
    worker.shutdown()
    return {"lengths": measured}


def make_worker(run: Run, variant: Variant, *, keep_reference: bool = False) -> Any:
    """A Megatron policy worker with the variant's settings on one device."""
    overrides = [f"{KEY}.empty_unused_memory_level=0"]
    if run.device == "cpu":
        overrides += [
            f"{KEY}.transformer_impl=local",
            f"{KEY}.optimizer.use_precision_aware_optimizer=false",
            f"{KEY}.optimizer.bf16=false",
        ]
    return worker_of(run, variant, "grpo_math_1B_megatron.yaml", overrides, keep_reference=keep_reference)


def worker_of(
    run: Run,
    variant: Variant,
    config: str,
    overrides: Sequence[str] = (),
    *,
    keep_reference: bool = False,
    process: Any = None,
) -> Any:
    """A policy worker, of a file of examples/configs, `overrides` and those of the variant.

    Args:
        run: What every variant has in common.
        variant: Its own settings.
        config: Name of the file.
        overrides: Between those of `run` and those of the file.
        keep_reference: Keep the initial parameters.
        process: Its `ProcessInfo`, as one of several ranks; None for a worker alone on the first device.
    """
    from nemo_offload_rl.backends.dtensor import rules as of_dtensor
    from nemo_offload_rl.backends.megatron import rules as of_megatron
    from nemo_offload_rl.config.convert import to_grpo_config
    from nemo_offload_rl.config.validate import validate_keys
    from nemo_offload_rl.keys.master import GrpoMasterConfig
    from nemo_offload_rl.policy.worker import PolicyWorker
    from nemo_offload_rl.protocols.backend import ProcessInfo
    from nemo_offload_rl.utils.config import load_config

    common = [
        f"policy.model_name={run.folder}",
        f"policy.train_global_batch_size={run.rows}",
        "policy.train_micro_batch_size=1",
        f"policy.max_total_sequence_length={max(run.lengths)}",
        "policy.make_sequence_length_divisible_by=1",
        "policy.logprob_chunk_size=1024",
        f"policy.precision={'bfloat16' if run.device == 'cuda' else 'float32'}",
    ]
    resolved = load_config(
        ROOT / "examples/configs" / config, [*common, *overrides, *run.overrides, *variant.overrides]
    )
    cfg = validate_keys(resolved, GrpoMasterConfig)
    for rule in (*of_megatron.RULES, *of_dtensor.RULES):
        if (message := rule(cfg)) is not None:
            raise ValueError(message)
    process = process or ProcessInfo(
        rank=0,
        world_size=1,
        init_method=f"file://{run.folder}/rendezvous-{os.getpid()}",
        device="cuda:0" if run.device == "cuda" else "cpu",
    )
    return PolicyWorker(to_grpo_config(cfg, resolved).worker, process, keep_reference=keep_reference)


def random_batch(run: Run, length: int, generator: torch.Generator) -> Any:
    """A `TrainBatch` of `run.rows` rows of `length` random tokens."""
    from nemo_offload_rl.data.batch import TrainBatch

    return TrainBatch(
        input_ids=torch.randint(0, shape_of(run.shape).vocab, (run.rows, length), generator=generator),
        input_lengths=torch.full((run.rows,), length),
        token_mask=torch.ones(run.rows, length).index_fill_(1, torch.tensor([0]), 0.0),
        sample_mask=torch.ones(run.rows),
    )


def measure(worker: Any, run: Run, length: int) -> dict[str, Any]:
    """Steps of `rows` micro-batches of one row each; the first ones warm up."""
    generator = torch.Generator().manual_seed(length)
    on_gpu = run.device == "cuda"
    seconds, losses, peak_bytes, allocations = [], [], 0, []
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    for _ in range(run.warmup_steps + run.steps):
        batch = random_batch(run, length, generator)
        worker.residency_reports()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses += worker.train(batch, NLL()).loss
        if on_gpu:
            # Copies on other streams go on beside the next step, as they do in a run.
            torch.cuda.current_stream().synchronize()
            # The residency manager reads and resets the allocator's peak at every transition.
            peaks = [report.peak_bytes for report in worker.residency_reports()]
            peak_bytes = max([peak_bytes, *peaks, torch.cuda.max_memory_allocated()])
            allocations.append(torch.cuda.memory_stats()["num_device_alloc"])
        seconds.append(time.perf_counter() - begin)
    step_s = statistics.median(seconds[run.warmup_steps :])
    return {
        "step_s": step_s,
        "steps_s": seconds,  # those that warm up included
        "tokens_per_s": run.rows * length / step_s,
        "peak_gib": peak_bytes / GIB,
        "losses": losses,
        "device_allocations": allocations,  # calls of cudaMalloc up to the end of each step
    }


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """On a CPU, Megatron's calls of CUDA are answered as in the tests."""
    if device == "cuda":
        yield
        return
    sys.path.insert(0, str(ROOT / "tests/support"))
    shim = importlib.import_module("megatron_cpu_shim")
    with shim.megatron_on_cpu():
        yield


def import_everything(device: str, *, needs_megatron: bool) -> None:
    """What every child needs, imported once in the parent."""
    import transformers  # noqa: F401

    import nemo_offload_rl.policy.worker

    if not needs_megatron:
        import nemo_offload_rl.backends.dtensor.backend

        return
    with on_device(device):
        import nemo_offload_rl.backends.megatron.backend  # noqa: F401
        from nemo_offload_rl.backends.megatron.upstream.bridge_import import import_auto_bridge

        import_auto_bridge()


def machine(device: str) -> dict[str, Any]:
    """What the numbers belong to."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"torch": str(torch.__version__)}
    for name in ("megatron-core", "megatron-bridge", "transformer-engine", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    return {"gpu": gpu, "cpus": len(os.sched_getaffinity(0)), "versions": versions}


def write_results(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """JSON, where it is asked for."""
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def percent(value: float, base: float) -> str:
    """The change from `base`."""
    return f"{100 * (value / base - 1):+.1f} %" if base else "-"


def memory_table(results: dict[str, Any]) -> str:
    """Peak and tokens a second by length, each with its change from the resident variant."""
    by_name = {row["variant"]: row for row in results["rows"]}
    lengths = sorted({int(length) for row in results["rows"] for length in row.get("lengths", {})})
    lines = [f"{results['machine']['gpu']}, {results['shape']}; change from resident in parentheses"]
    lines.append(f"{'variant':34}" + "".join(f"{f'{n} tokens: peak GiB':>26}{'tokens/s':>18}" for n in lengths))
    for name, row in by_name.items():
        cells = ""
        for length in lengths:
            found = row.get("lengths", {}).get(str(length), {"error": row.get("error", "not run")})
            if "error" in found:
                cells += f"{found['error'][:40]:>44}"
                continue
            base = by_name.get("resident", row).get("lengths", {}).get(str(length), found)
            base = found if "error" in base else base
            peak = f"{found['peak_gib']:.1f} ({percent(found['peak_gib'], base['peak_gib'])})"
            speed = f"{found['tokens_per_s']:.0f} ({percent(found['tokens_per_s'], base['tokens_per_s'])})"
            cells += f"{peak:>26}{speed:>18}"
        lines.append(f"{name:34}{cells}")
    return "\n".join(lines)


def _write_model(shape: str, folder: str, device: str, ties_embeddings: bool) -> dict[str, Any]:
    if shape in MOE_SHAPES or not ties_embeddings:
        sys.path.insert(0, str(ROOT / "examples" / "demo"))  # for its tokenizer
        write_untied(Path(folder), shape_of(shape), device)
    else:
        write_model(shape, Path(folder), device)
    return {}


def _prepare_host(num_bytes: int) -> dict[str, float]:
    grow_host_memory(num_bytes)
    return probe_link(torch.device("cuda"))


def _touch_cuda() -> dict[str, Any]:
    torch.zeros(1, device="cuda").item()
    return {}


def _child_runner(device: str, may_share_process: bool) -> Callable[..., dict[str, Any]]:
    """Runs a function in a forked child; where that cannot use CUDA, in this process or in a spawned one."""
    context = multiprocessing.get_context("fork")
    if device == "cuda" and "error" in _run_child(context, _touch_cuda):
        if may_share_process:
            return _run_here
        # Half a minute of imports for each.
        context = multiprocessing.get_context("spawn")
    return lambda target, *arguments: _run_child(context, target, *arguments)


def _run_here(target: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    try:
        found = target(*arguments)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    gc.collect()
    torch.cuda.empty_cache()
    # Peaks of the next variant begin with what this one has left behind.
    return {**found, "left_behind_gib": torch.cuda.memory_allocated() / GIB}


def _run_child(context: Any, target: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child_main, args=(sender, target, arguments))
    child.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = {"error": "the process ended without a result"}
    child.join()
    return found


def _child_main(sender: Any, target: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    try:
        found = target(*arguments)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    sender.send(found)
    sender.close()
    # Without the interpreter's own end: process groups and pinned memory go with the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
