r"""A GRPO step of nemo_offload_rl on both backends, of verl and of TRL's GRPOTrainer: the same work on the same GPU.

    python benchmarks/grpo_vs_peers.py --verl VERL_SITE --steps 4 --out results/grpo_vs_peers_0.6B.json
    python benchmarks/grpo_vs_peers.py --shape 8B --verl VERL_SITE --steps 3 --out results/grpo_vs_peers_8B.json
    python benchmarks/grpo_vs_peers.py --verl VERL_SITE --micro-batch auto --logprob-micro-batch auto \
        --peer-micro-batch 32 --out results/grpo_vs_peers_0.6B_own_best.json
    python benchmarks/grpo_vs_peers.py --shape tiny --cpu --sides dtensor trl --steps 2       # to try it

One side after the other, each in processes of its own, which end before the next one begins: the same random Qwen3
model, prompts of 8 tokens, temperature 1, KL to a frozen reference, logprobs of the policy before the update, one
optimizer step, vLLM on the same GPU, which sleeps meanwhile. At 0.6 B 512 responses of 1024 tokens (a few end earlier)
and float32 parameters and states. At 8 B 64 responses of 512 tokens, with recomputation; TRL and verl have bfloat16
parameters and states, since TRL's do not fit otherwise, and ours float32 parameters, on DTensor with 16-bit moments.

Micro-batches are the same for all sides unless options say otherwise. `--micro-batch` and `--logprob-micro-batch` are
ours, and the plan chooses where they are `auto`; `--peer-micro-batch` and `--peer-logprob-micro-batch` are the peers'.
To compare each side at its own best, try several of the peers', each with a file of its own. A side's result has
`micro_batches`, those that it took.

The rates of the GPU and its link are probed first. The **bound** of a phase is what its operations and bytes take at
these rates: products of the model (recomputation left out), reads of weights and KV cache by decoding, parameters and
states that an update reads and writes, copies of the plan of our DTensor run, if they take longer than the phase's
work. Medians are of the steps after the first, which compiles. A side that fails or takes too long (`--timeout-s`) is
among `failed` and ends no other.

A file of `--out` that has results of the same work on the same GPU keeps those of sides that this call leaves out, so
that a machine with a limit on a call's time can measure one side a call. It is written after each side, with all steps,
peaks of the GPU's memory, our metrics, who held that memory in our last two steps, and the time of our ways between
training and generation as multiples of their plain copies (`transitions`: `out` is the refit, `back` the waits between
the last token and the first kernel of training, `other` all of the step that is neither the engine's nor a pass).

It needs no network. In addition to what this repository needs:
- `trl`: the package trl 1.16, of which a wheel without its dependencies is enough;
- `verl`: a folder with verl 0.9.1, tensordict, transfer_queue, torchdata, codetiming, pylatexenc, mathruler, pyvers and
  orjson, which is put in front of the path of that side alone.
From archives of the GPU machine: 1_base, 2_vllm and, for `megatron`, 3_transformer_engine go to one folder on
PYTHONPATH, 4_verl goes to VERL_SITE alone.
Needs a GPU; of a CPU the bound says nothing. Docs: docs/measurements/grpo.md and docs/measurements/small-gpus.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml
from common import GB, make_model, measured_with, write_result
from grpo_sides import (
    OURS,
    PHASES,
    PROMPT_TOKENS,
    SIDES,
    WORKS,
    Work,
    our_config,
    our_result,
    run_ours,
    run_trl,
    run_verl,
    trl_result,
    verl_result,
)
from qwen3_shapes import TIED

if TYPE_CHECKING:
    from nemo_offload_rl.memory.gpus import Gpu

OUT = "timing/refit_s"
BACK = ("timing/generation/sleep_s", "timing/logprobs/enter_s", "timing/training/enter_s")
BUSY = ("generation", "logprobs", "reference_logprobs", "training")
SIZES = ("prompts", "group", "tokens", "peer_micro_batch", "peer_logprob_micro_batch")
CHOSEN_SIZES = ("micro_batch", "logprob_micro_batch")
FAILURE = "failure.json"
# Marks the processes of a side, so that all of them can be ended, Ray's included.
MARK = "GRPO_VS_PEERS_SIDE"


# -- what the hardware allows


def bounds(work: Work, folder: Path, gpu: Gpu) -> dict[str, float]:
    """Seconds of each phase at the GPU's rates; the step is their sum."""
    from nemo_offload_rl.plan import Target, plan_run

    path, overrides = our_config(work, "dtensor", folder, steps=1)
    plan, _ = plan_run(path, overrides, Target(gpu))
    account, sizes, rates = plan.account, plan.account.sizes, gpu.rates
    assert sizes is not None and rates is not None, "the model was made here, and the rates are probed"
    shape, groups, count = account.shape, account.groups, work.num_responses
    # An embedding of its own is looked up, not multiplied.
    embedding = 0 if account.ties_embeddings else (shape.vocab_size or 0) * (shape.hidden_size or 0)
    active, length = sizes.num_active - embedding, PROMPT_TOKENS + work.tokens
    attention_flops = 4.0 * sizes.num_layers * sizes.attention_width  # of a token with each one before it
    # Keys and values of a token in bfloat16.
    cache_bytes = 4.0 * sizes.num_layers * (shape.num_kv_heads or 0) * (shape.head_dim or 0)

    def forward_s(tokens: int) -> float:
        flops = sizes.forward_flops([tokens] * count) - 2.0 * embedding * count * tokens
        return flops / rates.matrix_flops

    def decode_s(place: int) -> float:
        read_bytes = 2.0 * active + count * place * cache_bytes
        flops = count * (2.0 * active + attention_flops * place)
        return max(read_bytes / rates.memory_bytes_per_s, flops / rates.matrix_flops)

    states_bytes = groups["params"] + groups.get("optimizer", 0) + groups.get("optimizer_part", 0)
    update_s = (2 * states_bytes + groups["grads"]) / rates.memory_bytes_per_s
    seconds = {
        "refit": 6.0 * sizes.num_parameters / rates.memory_bytes_per_s,  # float32 read, bfloat16 written
        "generation": forward_s(PROMPT_TOKENS) + sum(map(decode_s, range(PROMPT_TOKENS, length))),
        "logprobs": forward_s(length),
        "reference": forward_s(length),
        "training": 3 * forward_s(length) + update_s,
    }
    for stage, copies in plan.copies.items():
        phase = "training" if stage == "update" else str(stage)
        copies_s = max(copies.in_bytes / rates.in_bytes_per_s, copies.out_bytes / rates.out_bytes_per_s)
        seconds[phase] = max(seconds[phase], copies_s)
    return seconds | {"step": sum(seconds.values())}


def transition(record: Mapping[str, float], gpu: Gpu) -> dict[str, float]:
    """Seconds of a step's two ways between training and generation, those of their bytes over the link, and the ratio.

    Out: from the last optimizer step to the first prompt. Back: what is waited for between the last token and the first
    kernel of training, where the driver neither scores nor collates. `other` is the whole step less engine and passes.
    For one worker: bytes are of all, and the link is one GPU's.
    """
    assert gpu.rates is not None
    back_s = sum(record.get(name, 0.0) for name in BACK)  # there may be no logprob pass
    busy_s = sum(record.get(f"timing/{name}_s", 0.0) for name in BUSY) - back_s
    seconds = {"out_s": record[OUT], "back_s": back_s}
    copies_s = {
        "copies_out_s": record["residency/bytes_out"] / gpu.rates.out_bytes_per_s,
        "copies_back_s": record["residency/bytes_in"] / gpu.rates.in_bytes_per_s,
    }
    total_s, all_copies_s = record["timing/total_s"], sum(copies_s.values())
    ratios = {
        "ratio": sum(seconds.values()) / all_copies_s if all_copies_s else 0.0,
        "of_step": sum(seconds.values()) / total_s,
        "other_s": total_s - busy_s,
        "other_ratio": (total_s - busy_s) / all_copies_s if all_copies_s else 0.0,
    }
    return seconds | copies_s | ratios


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


# -- one side


def run_one(arguments: argparse.Namespace, work: Work) -> dict[str, Any]:
    """The side of `--one`, or the probe, in this process."""
    folder, side, steps = arguments.folder, arguments.one, arguments.steps
    if side == "rates":
        import torch

        from nemo_offload_rl.memory.calibrate import calibrate

        on_gpu = not arguments.cpu
        return asdict(calibrate(torch.device("cuda" if on_gpu else "cpu"), 3.0 if on_gpu else 0.2))
    if side == "verl":
        return run_verl(work, folder, steps, arguments.verl_keys, arguments.verl)
    if side == "trl":
        changes = {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in arguments.trl_keys)}
        return run_trl(work, folder, steps, changes, on_cpu=arguments.cpu)
    return run_ours(work, side, folder, steps, arguments.overrides, on_cpu=arguments.cpu)


def write_one(arguments: argparse.Namespace, work: Work) -> None:
    """Write the result of `run_one`; of a side that raises, its error and where it was, and end with status 1."""
    folder = arguments.folder
    try:
        result = run_one(arguments, work)
    except Exception as error:
        traceback.print_exc()
        where = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        (folder / FAILURE).write_text(json.dumps({"error": f"{type(error).__name__}: {error}"[:500], "where": where}))
        sys.exit(1)
    (folder / f"{arguments.one}.json").write_text(json.dumps(result))


def probe(folder: Path, timeout_s: float) -> Gpu:
    """The GPU with its rates, measured in a process that leaves nothing on it."""
    from nemo_offload_rl.memory.gpus import Gpu, GpuRates

    is_well, found = measure("rates", folder, timeout_s)
    if not is_well:
        sys.exit(f"the rates could not be probed: {found['error']}")
    return Gpu(found["name"], found["memory_bytes"], GpuRates(**found["rates"]))


def measure(side: str, folder: Path, timeout_s: float) -> tuple[bool, dict[str, Any]]:
    """Run a side in processes of its own; whether it ended well, and its result or the steps until its failure."""
    (folder / FAILURE).unlink(missing_ok=True)
    peak = PeakMemory()
    peak.start()
    command = [sys.executable, __file__, *sys.argv[1:], "--one", side, "--folder", str(folder)]
    begin_s = time.monotonic()
    # TRL's engine and its policy share a process.
    status = run_and_end(command, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if side == "trl" else {}, timeout_s)
    about = {"gpu_peak_gib": peak.stop(), "with_start_s": time.monotonic() - begin_s}
    file, failure = folder / f"{side}.json", folder / FAILURE
    if status == 0:
        return True, json.loads(file.read_text()) | about
    error = (
        json.loads(failure.read_text())
        if failure.exists()
        else {"error": status if isinstance(status, str) else f"status {status}"}
    )
    readers = {"verl": verl_result, "trl": trl_result, **{ours: partial(our_result, backend=ours) for ours in OURS}}
    steps = readers[side](folder) if side in readers else {}
    return False, error | steps | about


def run_and_end(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> int | str:
    """Exit status; then everything that the command started has ended too, so that the GPU is free."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(command, env={**os.environ, **env, MARK: mark})
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"stopped after {timeout_s:.0f} s, its limit (--timeout-s)"
    finally:
        left = [process, *marked_processes(mark)]
        for one in left:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
        process.wait()
        psutil.wait_procs(left[1:], timeout=30)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Processes that a command with this mark in its environment has started, daemons included."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


# -- the whole


def kept_results(path: Path | None, new: Mapping[str, Any], sides: Sequence[str]) -> dict[str, Any]:
    """Sides of an earlier result of the same work on the same GPU that are not measured again."""
    if path is None or not path.is_file():
        return {}
    old = json.loads(path.read_text())
    is_same = old.get("work") == new["work"] and old["machine"]["gpu_uuid"] == new["machine"]["gpu_uuid"]
    return {side: result for side, result in old["sides"].items() if is_same and side not in sides}


def table(results: Mapping[str, Any]) -> str:
    """Seconds of each phase by side, the share of them that the bound takes, and the ratio of ours to a peer's."""
    medians = {side: result["median"] for side, result in results["sides"].items() if "median" in result}
    sides = [side for side in SIDES if side in medians]
    base = next((medians[side] for side in sides if side in OURS), None)
    titles = (f"{side:>10s}{'bound':>7s}" + ("" if side in OURS else f"{'ours/it':>9s}") for side in sides)
    lines = [f"{'seconds':12s}{'bound':>9s}" + "".join(titles)]
    for phase in PHASES:
        bound_s = results["bound_s"][phase]
        line = f"{phase:12s}{bound_s:9.3f}"
        for side in sides:
            taken_s = medians[side][phase]
            line += f"{taken_s:10.3f}" + (f"{bound_s / taken_s:7.0%}" if taken_s else f"{'-':>7s}")
            if side not in OURS:
                line += f"{base[phase] / taken_s:9.2f}" if base is not None and taken_s else f"{'-':>9s}"
        lines.append(line)
    shown = ", ".join(f"{side} {results['sides'][side]['gpu_peak_gib']:.1f}" for side in sides)
    rates = results["rates"]
    lines.append(f"GPU memory peak, GiB: {shown}")
    lines.append(
        f"probed: {rates['matrix_flops'] / 1e12:.0f} TFLOP/s, memory {rates['memory_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"link {rates['out_bytes_per_s'] / GB:.1f} GB/s out and {rates['in_bytes_per_s'] / GB:.1f} in, launch "
        f"{rates['launch_s'] * 1e6:.1f} us"
    )
    taken = {side: results["sides"][side].get("micro_batches") for side in sides}
    shown = ", ".join(f"{side} {sizes['training']} and {sizes['logprobs']}" for side, sizes in taken.items() if sizes)
    lines.append(f"micro-batches of training and of logprobs: {shown}")
    lines += [f"{side}: {result['error'][:200]}" for side, result in results["failed"].items()]
    return "\n".join(lines)


def size_of(text: str) -> int | str:
    """A positive number, or `auto`.

    Raises:
        argparse.ArgumentTypeError: It is neither.
    """
    if text == "auto" or (text.isdecimal() and int(text)):
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a positive number nor auto")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="all; without --verl all but verl")
    parser.add_argument("--shape", default="0.6B", choices=list(WORKS))
    for size in SIZES:
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, help="if not as the shape has it")
    for size in CHOSEN_SIZES:
        help_text = "responses of our passes, in place of the shape's; auto: the plan chooses"
        parser.add_argument(f"--{size.replace('_', '-')}", type=size_of, metavar="N|auto", help=help_text)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=540.0, help="for each side, with its start")
    parser.add_argument("--verl", type=Path, metavar="DIR", help="folder of verl and what it needs")
    parser.add_argument("--trl-keys", nargs="+", default=[], metavar="KEY=VALUE", help="of TRL's configuration")
    parser.add_argument("--verl-keys", nargs="+", default=[], metavar="KEY=VALUE", help="further overrides for verl")
    parser.add_argument("--cpu", action="store_true", help="to try it; DTensor and TRL, which then lacks vLLM")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for our sides")
    arguments = parser.parse_args()
    if arguments.sides is None:
        arguments.sides = [side for side in SIDES if side != "verl" or arguments.verl]
    if "verl" in arguments.sides and not (arguments.verl and (arguments.verl / "verl").is_dir()):
        parser.error("the side verl needs --verl DIR, a folder with the package verl; unpack it there, or leave it out")
    return arguments


def main() -> None:
    arguments = parse()
    given = {size: getattr(arguments, size) for size in (*SIZES, *CHOSEN_SIZES)}
    work = replace(WORKS[arguments.shape], **{size: value for size, value in given.items() if value is not None})
    for size in (work.peer_micro_batch, work.peer_logprob_micro_batch):
        if size < 1 or work.num_responses % size:
            sys.exit(f"the peers' micro-batch of {size} does not divide {work.num_responses} responses; give another")
    if arguments.one:
        write_one(arguments, work)
        return
    results: dict[str, Any] = {**measured_with(), "work": asdict(work), "sides": {}, "failed": {}}
    results["sides"] = kept_results(arguments.out, results, arguments.sides)
    # A fixed path: vLLM finds compiled code by it, so that only the first call compiles.
    folder = Path(tempfile.gettempdir()) / f"grpo_vs_peers_{work.shape}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        device = "cpu" if arguments.cpu else "cuda"
        make_model(folder / "model", work.shape, device, ties_embeddings=work.shape in TIED)
        gpu = probe(folder, arguments.timeout_s)
        results["rates"], results["bound_s"] = asdict(gpu)["rates"], bounds(work, folder, gpu)
        for side in arguments.sides:
            is_well, result = measure(side, folder, arguments.timeout_s)
            if side in OURS:
                # Without a refit of its own a step began with an engine that a validation had left awake.
                steady = [record for record in result["records"] if record["step"] > 1 and OUT in record]
                result["transitions"] = [transition(record, gpu) for record in steady]
            else:
                logprobs = work.peer_logprob_micro_batch if side == "verl" else work.peer_micro_batch
                result["micro_batches"] = {"training": work.peer_micro_batch, "logprobs": logprobs}
            results["sides" if is_well else "failed"][side] = result
            write_result(arguments.out, results)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(results))


if __name__ == "__main__":
    main()
