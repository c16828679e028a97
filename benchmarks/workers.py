"""Policy workers for benchmarks of training steps: variants of a configuration, each in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Read by Transformer Engine when it is imported; without it activation offloading is refused.
os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"

import torch
from common import ROOT, grow_host_memory, make_model, measured_with, probe_link, vocab_of, write_result

logging.getLogger("megatron").setLevel(logging.WARNING)
DTENSOR, MEGATRON = "policy.dtensor_cfg", "policy.megatron_cfg"
CONFIGS = {"dtensor": "grpo_math_1B.yaml", "megatron": "grpo_math_1B_megatron.yaml"}


@dataclass(frozen=True)
class Variant:
    """A row of a table: a name, and overrides that a user would write."""

    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """Settings that all variants of a table share.

    Attributes:
        shape: Of the model.
        folder: Its files.
        device: cuda or cpu.
        lengths: Tokens of a row, one table column each.
        rows: Micro-batches of a step, one row each.
        steps: That are timed, after `warmup_steps`.
        overrides: Of every variant.
        backend: dtensor or megatron.
    """

    shape: str
    folder: str
    device: str
    lengths: tuple[int, ...]
    rows: int
    steps: int
    warmup_steps: int
    overrides: tuple[str, ...]
    backend: str = "megatron"


def worker_of(
    run: Run,
    overrides: Sequence[str] = (),
    *,
    process: Any = None,
    keep_reference: bool = False,
    before: Callable[[Any, Any], None] = lambda settings, process: None,
    **settings: Any,
) -> Any:
    """Make a policy worker.

    Args:
        run: Settings that all variants share.
        overrides: Of this worker; they win over those of `run`.
        process: Its `ProcessInfo`, as one of several ranks; None for a worker alone on the first device.
        keep_reference: Keep the initial parameters.
        before: Called with the worker's settings and process before it is made.
        settings: Fields of `PolicySettings` that no key sets.
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
        *(_on_cpu(run.backend) if run.device == "cpu" else ()),
    ]
    resolved = load_config(ROOT / "examples/configs" / CONFIGS[run.backend], [*common, *run.overrides, *overrides])
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
    worker_settings = replace(to_grpo_config(cfg, resolved).worker, **settings)
    before(worker_settings, process)
    return PolicyWorker(worker_settings, process, keep_reference=keep_reference)


def _on_cpu(backend: str) -> list[str]:
    """Overrides for a CPU, which lacks the kernels."""
    if backend == "dtensor":
        return [f"{DTENSOR}.torch_compile=false"]
    off = ("use_precision_aware_optimizer", "bf16")
    return [f"{MEGATRON}.transformer_impl=local", *(f"{MEGATRON}.optimizer.{name}=false" for name in off)]


def random_batch(run: Run, length: int, generator: torch.Generator) -> Any:
    """A `TrainBatch` of `run.rows` rows of `length` random tokens."""
    from nemo_offload_rl.data.batch import TrainBatch

    return TrainBatch(
        input_ids=torch.randint(0, vocab_of(run.shape), (run.rows, length), generator=generator),
        input_lengths=torch.full((run.rows,), length),
        token_mask=torch.ones(run.rows, length).index_fill_(1, torch.tensor([0]), 0.0),
        sample_mask=torch.ones(run.rows),
    )


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """On a CPU, answer Megatron's calls of CUDA as the tests do."""
    if device == "cuda":
        yield
        return
    sys.path.insert(0, str(ROOT / "tests/support"))
    shim = importlib.import_module("megatron_cpu_shim")
    with shim.megatron_on_cpu():
        yield


def run_variants(
    args: argparse.Namespace,
    run: Run,
    variants: Sequence[Variant],
    measure: Callable[[Run, Variant], dict[str, Any]],
    *,
    ties_embeddings: bool,
) -> dict[str, Any]:
    """Call `measure` for every variant in turn, each in a new process; a row that failed has `error` instead.

    Args:
        args: With `host_gib`, memory to touch before anything is measured, and `out`, the file for the results.
        run: Its folder is made here.
        variants: The rows of the table.
        measure: Returns what goes into a variant's row. A function of a module, so that it can be sent.
        ties_embeddings: The model's output layer is its embedding.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = replace(run, folder=folder)
        # In children: this process holds nothing of the GPU.
        link = _in_child(_prepare_host, args.host_gib << 30, run.device)
        make_model(Path(folder), run.shape, run.device, ties_embeddings=ties_embeddings)
        rows: list[dict[str, Any]] = []
        results = {**_in_child(measured_with), "link_gb_per_s": link, "shape": run.shape, "rows": rows}
        for variant in variants:
            begin = time.perf_counter()
            found = _in_child(measure, run, variant)
            took_s = time.perf_counter() - begin
            rows.append({"variant": variant.name, "overrides": list(variant.overrides), "took_s": took_s, **found})
            print(f"{variant.name}: {found.get('error', 'done')} ({took_s:.0f} s)", flush=True)
            write_result(args.out, results)
    return results


def _prepare_host(num_bytes: int, device: str) -> dict[str, float]:
    if device == "cuda":
        grow_host_memory(num_bytes)
    return probe_link(device)


def _in_child(target: Callable[..., Any], *arguments: Any) -> Any:
    """Call `target` in a new process and return its result; `{"error": ...}` where it fails."""
    context = multiprocessing.get_context("spawn")
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


def _child_main(sender: Any, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
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
