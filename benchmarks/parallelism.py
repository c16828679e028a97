"""Every form of parallelism against one device: logprobs, a loss curve, residency bit by bit, resuming, memory at rest.

    python benchmarks/parallelism.py --out benchmarks/results/parallelism.json
    python benchmarks/parallelism.py --device cpu --only "DTensor, FSDP 2" "Megatron, PP 2, tied" --steps 4

Each arrangement is a group of processes, one for each device, each with a policy worker: a small Qwen3 shape, dense or
a mixture of experts, with random weights. The group scores a batch and makes `--steps` training steps, with all
transitions of a GRPO step between them. It saves half-way. It makes a quarter of the steps again with everything
resident. Then the checkpoint is resumed: by one device, or by the same group where Megatron's checkpoints are for one
layout. The reference is one device with the same rows. All runs set `policy.deterministic`. Columns:

- `logprob`: mean difference of logprobs from one device;
- `loss`: the largest difference of a step's loss from one device, relative, and `first`, that of the first step;
- `bits`: whether losses and gradient norms of the repeated steps are the same in every bit with residency and without;
- `resumed`: the largest difference of a resumed run's losses from those of the run that went on;
- `at rest`: GiB of a device that a process holds outside torch's allocator while all state is away: CUDA's context and
  NCCL's buffers, the most of all ranks; `s a step`: the median, which other work on the devices spoils.

Greedy tokens of an engine after a refit are compared in tests/functional/test_grpo_devices.py. Needs as many GPUs as an
arrangement has devices; those with more are left out. `--device cpu` shows that the script works, with gloo.
Docs: docs/measurements/parallelism.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import GIB, NLL, make_model, measured_with, write_result
from qwen3_shapes import MOE_SHAPES, SHAPES
from torch.multiprocessing.spawn import spawn
from workers import DTENSOR, MEGATRON, Run, on_device, random_batch, worker_of

DENSE, TIED, EXPERTS = "dense", "tied", "experts"
PACKING = "policy.sequence_packing"
# Four rows a pack. By calculation deterministic attention of 16 heads takes 16 GiB for 4096 tokens on one Hopper GPU.
PACKED = (f"{PACKING}.enabled=true", f"{PACKING}.train_mb_tokens=4096", f"{PACKING}.logprob_mb_tokens=4096")


@dataclass(frozen=True)
class Arrangement:
    """A row of the table.

    Attributes:
        name: Its title, that begins with the backend.
        overrides: What makes it.
        model: Which of the models.
        num_devices: Processes.
        rows: Of a step, each of `length` tokens; those of the command line without them.
    """

    name: str
    overrides: tuple[str, ...]
    model: str = DENSE
    num_devices: int = 2
    rows: int | None = None
    length: int | None = None

    @property
    def resumes_alone(self) -> bool:
        """Whether one device can go on from its checkpoint."""
        return self.backend == "DTensor" or not self.overrides

    @property
    def backend(self) -> str:
        """The first word."""
        return self.name.partition(",")[0]


NOT_COMPILED = f"{DTENSOR}.torch_compile=false"
LONG: dict[str, Any] = {"rows": 2, "length": 16384}
MEGATRON_TP2 = (f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.sequence_parallel=true")
ARRANGEMENTS = (
    Arrangement("DTensor, FSDP 2", ()),
    Arrangement(
        "DTensor, TP 2, sequences split",
        (f"{DTENSOR}.tensor_parallel_size=2", f"{DTENSOR}.sequence_parallel=true", NOT_COMPILED),
    ),
    Arrangement("DTensor, CP 2", (f"{DTENSOR}.context_parallel_size=2", NOT_COMPILED), **LONG),
    Arrangement("DTensor, EP 2", (f"{DTENSOR}.expert_parallel_size=2",), EXPERTS),
    Arrangement("Megatron, DP 2", ()),
    Arrangement("Megatron, TP 2, sequences split", MEGATRON_TP2),
    Arrangement("Megatron, CP 2", (f"{MEGATRON}.context_parallel_size=2",), **LONG),
    Arrangement("Megatron, CP 2, packed", (f"{MEGATRON}.context_parallel_size=2", *PACKED), rows=16, length=1024),
    Arrangement("Megatron, PP 2, tied", (f"{MEGATRON}.pipeline_model_parallel_size=2",), TIED),
    Arrangement("Megatron, PP 2, untied", (f"{MEGATRON}.pipeline_model_parallel_size=2",)),
    Arrangement("Megatron, EP 2", (f"{MEGATRON}.expert_model_parallel_size=2",), EXPERTS),
    Arrangement("Megatron, TP 2, EP 2", (*MEGATRON_TP2, f"{MEGATRON}.expert_model_parallel_size=2"), EXPERTS),
)


def alone(arrangement: Arrangement) -> Arrangement:
    """One device with the same model and backend."""
    overrides = PACKED if set(PACKED) <= set(arrangement.overrides) else ()
    suffix = ", packed" if overrides else ", long" if arrangement.length else ""
    name = f"{arrangement.backend}, one device, {arrangement.model}{suffix}"
    return Arrangement(name, overrides, arrangement.model, 1, arrangement.rows, arrangement.length)


def rank_main(rank: int, run: Run, arrangement: Arrangement, folder: str, resume: str | None) -> None:
    """One process: everything that is measured of it goes into a file."""
    from nemo_offload_rl.backends.ranks import join_process_group
    from nemo_offload_rl.protocols.backend import ProcessInfo

    process = ProcessInfo(
        rank=rank,
        world_size=arrangement.num_devices,
        init_method=f"file://{folder}/rendezvous",
        device=f"cuda:{rank}" if run.device == "cuda" else "cpu",
    )
    found: dict[str, Any] = {}
    join_process_group(process)  # once for the workers that follow each other
    with on_device(run.device):
        if resume is not None:
            found["losses"], *_ = steps_of(run, arrangement, process, {}, resume=resume)
        else:
            found["losses"], found["norms"], found["seconds"] = steps_of(run, arrangement, process, found, save=folder)
            repeated = replace(run, steps=max(run.steps // 4, 1))
            losses, norms, _ = steps_of(repeated, arrangement, process, {}, moves=False)
            found["is_same_bits"] = all(
                mine == all_[: len(mine)] for mine, all_ in ((losses, found["losses"]), (norms, found["norms"]))
            )
            if not arrangement.resumes_alone:
                found["resumed"], *_ = steps_of(run, arrangement, process, {}, resume=folder)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def steps_of(
    run: Run,
    arrangement: Arrangement,
    process: Any,
    found: dict[str, Any],
    *,
    moves: bool = True,
    save: str | None = None,
    resume: str | None = None,
) -> tuple[list[float], list[float], list[float]]:
    """Losses, gradient norms and seconds of steps; from the middle on with a checkpoint to `resume` from."""
    gpus = arrangement.num_devices if run.device == "cuda" else 0
    overrides = [f"cluster.gpus_per_node={gpus}", "policy.deterministic=true", *arrangement.overrides]
    overrides += ["policy.make_sequence_length_divisible_by=64"]  # whole pieces for each device
    if run.device == "cpu":
        overrides += [f"cluster.cpu_workers_per_node={arrangement.num_devices}"]
    if not moves:
        overrides += ["policy.residency_overrides={params: device, optimizer: device}"]
    worker = worker_of(run, overrides, process=process)
    half = run.steps // 2
    losses, norms, seconds = [], [], []
    if resume is not None:
        worker.load_checkpoint(Path(resume) / "saved")
    if save is not None:
        worker.prepare_for_lp_inference()
        found["logprobs"] = worker.get_logprobs(shard(batch_of(run, 0), worker)).tolist()
        found["dp_rank"] = worker._backend.rank_info.dp_rank
    for step in range(half if resume is not None else 0, run.steps):
        if save is not None and step == half:
            worker.save_checkpoint(Path(save) / "saved")
        begin = time.perf_counter()
        worker.prepare_for_lp_inference()
        worker.prepare_for_training()
        result = worker.train(shard(batch_of(run, step), worker), NLL())
        losses += result.loss
        norms += result.grad_norm
        worker.offload_before_refit()
        for _ in worker.named_weights():
            pass
        worker.offload_after_refit()
        seconds.append(time.perf_counter() - begin)
    if save is not None:
        found["at_rest_gib"] = memory_at_rest_gib(run.device)
        print(f"{arrangement.name}, rank {process.rank}: {found['at_rest_gib']} GiB at rest", flush=True)
    worker.shutdown()
    return losses, norms, seconds


def batch_of(run: Run, step: int) -> Any:
    """That of a step: few batches, so that losses fall."""
    return random_batch(run, run.lengths[0], torch.Generator().manual_seed(step % 4))


def shard(batch: Any, worker: Any) -> Any:
    """This rank's rows."""
    info = worker._backend.rank_info
    num_rows = len(batch) // info.dp_size
    return batch.select(range(info.dp_rank * num_rows, (info.dp_rank + 1) * num_rows))


def memory_at_rest_gib(device: str) -> float:
    """GiB that this process has of its device outside torch's allocator."""
    if device == "cpu":
        return 0.0
    from nemo_offload_rl.utils.gpu_memory import read_gpus

    use = read_gpus()[str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)]
    return (use.by_pid[os.getpid()] - torch.cuda.memory_reserved()) / GIB


def start(run: Run, arrangement: Arrangement, folder: Path, resume: Path | None = None) -> list[dict[str, Any]]:
    """Run an arrangement and return the results of each rank.

    Raises:
        Exception: A rank's.
    """
    folder.mkdir(parents=True)
    arguments = (run, arrangement, str(folder), None if resume is None else str(resume))
    spawn(rank_main, arguments, nprocs=arrangement.num_devices)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(arrangement.num_devices)]


def compare(ranks: list[dict[str, Any]], base: dict[str, Any]) -> dict[str, Any]:
    """A row of the table: what the ranks found, against one device."""
    by_part = {found["dp_rank"]: found["logprobs"] for found in ranks}
    logprobs = torch.tensor([row for _, rows in sorted(by_part.items()) for row in rows])
    losses = ranks[0]["losses"]
    return {
        "logprob": float((logprobs - torch.tensor(base["logprobs"])).abs().mean()),
        "first": farthest(losses[:1], base["losses"][:1]),
        "loss": farthest(losses, base["losses"]),
        "is_same_bits": all(found["is_same_bits"] for found in ranks),
        "at_rest_gib": max(found["at_rest_gib"] for found in ranks),
        "step_s": statistics.median(ranks[0]["seconds"]),
        "losses": losses,
    }


def farthest(losses: list[float], others: list[float]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(mine - other) / abs(other) for mine, other in zip(losses, others, strict=True))


def cause_of(error: Exception) -> str:
    """The line of a process's traceback that names what was raised; notes and further lines follow it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines or [type(error).__name__])[-1]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Of all arrangements."""
    names = ("logprob", "first", "loss", "resumed", "is_same_bits", "at_rest_gib", "step_s")
    titles = ("logprob", "first", "loss", "resumed", "bits", "at rest", "s a step")
    lines = [f"{'arrangement':36}" + "".join(f"{title:>11}" for title in titles)]
    for name, row in rows.items():
        cells = "".join(f"{row[key]:11.2g}" if key in row else f"{'-':>11}" for key in names)
        lines.append(f"{name:36}" + (f"  {row['error'][:150]}" if "error" in row else cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8-layers", choices=list(SHAPES), help="of the dense models")
    parser.add_argument("--moe-shape", default="4-layers", choices=list(MOE_SHAPES))
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row, but of CP's")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", help="these arrangements, by their whole names")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--overrides", nargs="*", default=(), metavar="KEY=VALUE", help="of every arrangement")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        arguments.shape, arguments.moe_shape, arguments.length = "tiny", "moe-tiny", min(arguments.length, 64)
    unknown = set(arguments.only or ()) - {arrangement.name for arrangement in ARRANGEMENTS}
    if unknown:
        sys.exit(f"--only: no arrangement is called {sorted(unknown)}; there are {[a.name for a in ARRANGEMENTS]}")
    on_gpu = arguments.device == "cuda"
    num_devices = torch.cuda.device_count() if on_gpu else sys.maxsize  # cores are shared
    rows: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {**measured_with(), "rows": rows}
    with tempfile.TemporaryDirectory(prefix="parallelism_") as name:
        folder = Path(name)
        shapes = {DENSE: arguments.shape, TIED: arguments.shape, EXPERTS: arguments.moe_shape}
        bases: dict[str, dict[str, Any]] = {}
        for arrangement in ARRANGEMENTS:
            if (arguments.only and arrangement.name not in arguments.only) or arrangement.num_devices > num_devices:
                continue
            model = folder / arrangement.model
            is_tied = arrangement.model == TIED
            make_model(model, shapes[arrangement.model], arguments.device, ties_embeddings=is_tied)
            rows_of = arrangement.rows if on_gpu else None
            length = arrangement.length if on_gpu else None
            counts = (rows_of or arguments.rows, arguments.steps, 0)
            run = Run(
                shapes[arrangement.model],
                str(model),
                arguments.device,
                (length or arguments.length,),
                *counts,
                tuple(arguments.overrides),
                arrangement.backend.lower(),
            )
            one = alone(arrangement)
            try:
                if one.name not in bases:
                    bases[one.name] = start(run, one, folder / one.name)[0]
                    rows[one.name] = compare([bases[one.name]], bases[one.name])
                ranks = start(run, arrangement, folder / arrangement.name)
                row = rows[arrangement.name] = compare(ranks, bases[one.name])
                if arrangement.resumes_alone:
                    resumed = start(run, one, folder / f"{arrangement.name}, resumed", folder / arrangement.name)
                    row["resumed"] = farthest(resumed[0]["losses"], bases[one.name]["losses"][run.steps // 2 :])
                else:
                    row["resumed"] = farthest(ranks[0]["resumed"], row["losses"][run.steps // 2 :])
            except Exception as error:
                rows.setdefault(arrangement.name, {})["error"] = cause_of(error)
            print(table({arrangement.name: rows[arrangement.name]}).splitlines()[1], flush=True)
            write_result(arguments.out, results)
    print(table(rows))


if __name__ == "__main__":
    main()
