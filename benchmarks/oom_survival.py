"""Steps with rows of four times the usual length, for which device memory does not suffice.

    python benchmarks/oom_survival.py --out results/oom_survival.json
    python benchmarks/oom_survival.py --ranks 2 --out results/oom_survival_two_gpus.json
    python benchmarks/oom_survival.py --ranks 2 --no-preflight --steps 20 --out results/oom_survival_two_gpus_real.json
    python benchmarks/oom_survival.py --device cpu --shape tiny --length 8 --steps 8

For each backend, in a process of its own: steps of logprobs and training with and without the code that survives
running out of memory, in turn, to compare their seconds; then `--steps` steps, of which every fifth has one row of four
times the length in each micro-batch. The memory that torch may take is limited to what the usual steps took and a
tenth. A micro-batch with a long row would need about three times the activations of a usual one; the long row alone
fits. Of several data-parallel ranks only the first has long rows; all run the pass again.

`--no-preflight` leaves out the estimates before a pass, so that every pass that is too large fails for real, each time:
what was too large is forgotten after each step.

Needs a GPU a rank, for Megatron with Transformer Engine. On a CPU an error in the loss takes the place of the limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import GIB, NLL
from qwen3_shapes import SHAPES, TIED
from torch.multiprocessing.spawn import spawn
from workers import CONFIGS, Run, Variant, on_device, random_batch, run_variants, worker_of

LONGER = 4
PERIOD = 5
ROWS = 8


@dataclass(frozen=True)
class LimitedNLL(NLL):
    """NLL that runs out of memory above a number of tokens, in place of a device's limit."""

    most_tokens: int = sys.maxsize

    def __call__(self, logprobs_BS: Any, batch: Any, norm: Any) -> tuple[Any, dict[str, Any]]:
        if logprobs_BS.numel() > self.most_tokens:
            raise torch.OutOfMemoryError(f"no memory for {logprobs_BS.numel()} tokens")
        return super().__call__(logprobs_BS, batch, norm)


def survive(num_ranks: int, foresees: bool, num_pairs: int, run: Run, variant: Variant) -> dict[str, Any]:
    """Measure one backend; `run.rows` are those of a micro-batch, of which each rank has two in a step."""
    run = replace(run, backend=variant.name, rows=2 * run.rows)
    if num_ranks == 1:
        with on_device(run.device):
            return measured_on(run, worker_of(run, overrides_of(run, variant, 1)), num_pairs, foresees=foresees)
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (num_ranks, foresees, num_pairs, run, variant, folder), nprocs=num_ranks)
        return json.loads((Path(folder) / "0.json").read_text())


def overrides_of(run: Run, variant: Variant, num_ranks: int) -> tuple[str, ...]:
    """Sizes of batches, and what the variant overrides."""
    return (
        f"policy.train_global_batch_size={run.rows * num_ranks}",
        f"policy.train_micro_batch_size={run.rows // 2}",
        f"policy.logprob_batch_size={run.rows // 2}",
        *variant.overrides,
    )


def rank_main(
    rank: int, num_ranks: int, foresees: bool, num_pairs: int, run: Run, variant: Variant, folder: str
) -> None:
    """One of several processes; writes its results into a file."""
    if run.device == "cpu":
        sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
        from abortable_gloo import use_abortable_gloo  # pyright: ignore[reportMissingImports]

        use_abortable_gloo()
    from nemo_offload_rl.backends.ranks import join_process_group
    from nemo_offload_rl.protocols.backend import ProcessInfo

    process = ProcessInfo(
        rank=rank,
        world_size=num_ranks,
        init_method=f"file://{folder}/rendezvous",
        device=f"cuda:{rank}" if run.device == "cuda" else "cpu",
        workers_per_host=num_ranks,
        collective_timeout_s=60,
    )
    join_process_group(process)
    with on_device(run.device):
        worker = worker_of(run, overrides_of(run, variant, num_ranks), process=process)
        found = measured_on(run, worker, num_pairs, rank, num_ranks, foresees=foresees)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measured_on(
    run: Run, worker: Any, num_pairs: int, rank: int = 0, num_ranks: int = 1, *, foresees: bool
) -> dict[str, Any]:
    """Measure a rank's worker."""
    length, is_alone = max(run.lengths) // LONGER, num_ranks == 1
    generator = torch.Generator().manual_seed(rank)
    usual, troubled = (batch_of(run, length, generator, has_long=long and not rank) for long in (False, True))
    limit = run.rows // 2 * length if run.device == "cpu" else sys.maxsize
    if not foresees:
        worker.residency.too_large_size = lambda kind, size: sys.maxsize
    guarded, bare = worker._passes, unguarded(worker)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(3):
        step(worker, usual, NLL())
    for pair in range(num_pairs):
        for is_guarded in (True, False) if pair % 2 else (False, True):
            worker._passes = guarded if is_guarded else bare
            seconds[is_guarded].append(timed(run, lambda: step(worker, usual, NLL())))
    limit_gib = limit_memory(run.device)
    loss = LimitedNLL(most_tokens=limit)
    worker._passes = bare
    # Several ranks would wait for the one that failed.
    error_without = error_of(lambda: worker.forward_backward(troubled, loss)) if is_alone else "not tried"
    worker._passes = guarded
    found = steps(run, worker, usual, troubled, loss, foresees=foresees)
    worker.shutdown()
    return {
        "ranks": num_ranks,
        "foresees": foresees,
        "usual_s": statistics.median(seconds[True]),
        "usual_without_s": statistics.median(seconds[False]),
        "ratio": statistics.median(one / other for one, other in zip(seconds[True], seconds[False], strict=True)),
        "limit_gib": limit_gib,
        "error_without": error_without,
        **found,
    }


def steps(run: Run, worker: Any, usual: Any, troubled: Any, loss: NLL, *, foresees: bool) -> dict[str, Any]:
    """Run the steps, and count what was cut, how often ranks were connected again, and what failed."""
    times: dict[bool, list[float]] = {True: [], False: []}
    splits, errors, reconnections = [], [], []
    peers = worker._passes._peers
    if peers is not None:
        reconnect = peers.reconnect

        def timed_reconnect() -> None:
            begin = time.perf_counter()
            reconnect()
            reconnections.append(time.perf_counter() - begin)

        peers.reconnect = timed_reconnect

    def one_step(batch: Any) -> None:
        splits.append(step(worker, batch, loss).oom_splits)

    for index in range(run.steps):
        has_long = index % PERIOD == PERIOD - 1
        begin = time.perf_counter()
        error = error_of(lambda batch=troubled if has_long else usual: one_step(batch))
        synchronize(run.device)
        times[has_long].append(time.perf_counter() - begin)
        if error is not None:
            errors.append(f"step {index}: {error}")
            if peers is not None:
                raise RuntimeError(errors[-1])
        if not foresees:
            worker._passes._too_large.clear()
    return {
        "steps": run.steps,
        "splits": sum(splits),
        "reconnections": len(reconnections),
        "reconnection_s": statistics.median(reconnections) if reconnections else None,
        "errors": errors,
        "first_long_s": times[True][0] if times[True] else None,
        "long_s": statistics.median(times[True][1:]) if times[True][1:] else None,
        "between_s": statistics.median(times[False]) if times[False] else None,
    }


def batch_of(run: Run, length: int, generator: torch.Generator, *, has_long: bool) -> Any:
    """Rows of `length` tokens; with `has_long`, the first row of each micro-batch is longer."""
    width = length * (LONGER if has_long else 1)
    batch = random_batch(run, width, generator)
    lengths = torch.full((run.rows,), length)
    lengths[:: run.rows // 2] = width
    is_real = torch.arange(width) < lengths.unsqueeze(1)
    return replace(batch, input_lengths=lengths, token_mask=batch.token_mask * is_real)


def step(worker: Any, batch: Any, loss: NLL) -> Any:
    """Logprobs and an update."""
    worker.prepare_for_lp_inference()
    worker.get_logprobs(batch)
    worker.prepare_for_training()
    return worker.train(batch, loss)


def unguarded(worker: Any) -> Any:
    """Passes of the worker that run once, and end with the error of running out of memory."""
    from nemo_offload_rl.policy.passes import Attempt, Passes

    class Unguarded(Passes):
        def attempts(
            self,
            kind: Any,
            batch: Any,
            rows: Sequence[Sequence[int]],
            after_failure: Callable[[], None],
        ) -> Iterator[Any]:
            micro_batches = self._cut(batch, rows, sys.maxsize)
            self._residency.expect_work(kind, self._most_tokens(micro_batches))
            attempt = Attempt(micro_batches)
            yield attempt
            if attempt.error is not None:
                raise attempt.error

    return Unguarded(worker._settings, worker.residency)


def error_of(call: Callable[[], Any]) -> str | None:
    """Return the error that a call ends with, in one line; None if there is none."""
    told = None
    try:
        call()
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    gc.collect()  # of tensors that the error's traceback held
    return told


def limit_memory(device: str) -> float | None:
    """Let torch take a tenth more than it has taken at most; the limit in GiB."""
    if device == "cpu":
        return None
    torch.cuda.empty_cache()
    limit_bytes = 1.1 * torch.cuda.max_memory_reserved()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / torch.cuda.mem_get_info()[1]))
    return limit_bytes / GIB


def timed(run: Run, call: Callable[[], Any]) -> float:
    """Seconds of a call and of the work that it queued."""
    synchronize(run.device)
    begin = time.perf_counter()
    call()
    synchronize(run.device)
    return time.perf_counter() - begin


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Make a table of the backends' results, below the errors of steps that failed."""
    lines = [f"{row['variant']}: {error}" for row in rows for error in (row.get("errors") or [])[:3]]
    titles = (
        "limit_gib",
        "steps",
        "errors",
        "splits",
        "reconnections",
        "reconnection_s",
        "usual_s",
        "usual_without_s",
        "ratio",
    )
    titles += "first_long_s", "long_s", "between_s"
    lines.append("| | " + " | ".join(titles) + " |")
    lines.append("|---" * (len(titles) + 1) + "|")
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['variant']} | {row['error']} |")
            continue
        values = {**row, "errors": len(row["errors"])}
        lines.append(f"| {row['variant']} | " + " | ".join(_in_cell(values[title]) for title in titles) + " |")
    return "\n".join(lines)


def _in_cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help="dtensor, megatron; both if none is named")
    parser.add_argument("--shape", default="0.6B", choices=list(SHAPES))
    parser.add_argument("--length", type=int, default=1024, help="tokens of a usual row")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=24, help="of usual steps, with and without the code that survives")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--host-gib", type=int, default=4, help="host memory to touch before anything is measured")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--overrides", nargs="*", default=(), metavar="KEY=VALUE", help="of both backends")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks, each on a device")
    parser.add_argument("--no-preflight", action="store_true", help="let passes fail; forget what was too large")
    args = parser.parse_args()
    run = Run(
        shape=args.shape,
        folder="",
        device=args.device,
        lengths=(LONGER * args.length,),
        rows=ROWS,
        steps=args.steps,
        warmup_steps=0,
        overrides=tuple(args.overrides),
    )
    # Compiling takes longer than all steps.
    of_backend = {"dtensor": ("policy.dtensor_cfg.torch_compile=false",), "megatron": ()}
    variants = [Variant(name, of_backend[name]) for name in args.backends or CONFIGS]
    results = run_variants(
        args,
        run,
        variants,
        partial(survive, args.ranks, not args.no_preflight, args.pairs),
        ties_embeddings=args.shape in TIED,
    )
    print(f"{results['machine']['gpu']}, {args.shape}, rows of {args.length} and {LONGER * args.length} tokens")
    for row in results["rows"]:
        if not args.no_preflight and args.ranks == 1:
            print(f"{row['variant']}, without it a long row ends in: {row.get('error_without') or 'no error'}")
    print(table(results["rows"]))


if __name__ == "__main__":
    main()
