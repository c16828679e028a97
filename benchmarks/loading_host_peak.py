"""How much host memory each rank takes while the DTensor backend builds and reads a model; gloo on CPU.

python benchmarks/loading_host_peak.py --json benchmarks/results/loading_host_peak.json

A random Qwen3 shape is written as bfloat16 first. Peaks are the kernel's high-water mark of the process's resident
memory (VmHWM, mapped pages of files included), reset after the imports, less what was resident then. The last row is
what `from_pretrained` takes for the whole model in float32, which every rank would take without reading by shards.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))
MIB = 2**20


def status_bytes(field: str) -> int:
    """A field of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def measured(load: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Peak and rest of resident memory over what is there now, in MiB, and what was loaded."""
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = status_bytes("VmRSS")
    loaded = load()
    peak_bytes, after_bytes = status_bytes("VmHWM") - before_bytes, status_bytes("VmRSS") - before_bytes
    return {"peak_mib": round(peak_bytes / MIB, 1), "after_mib": round(after_bytes / MIB, 1)}, loaded


def rank_main(rank: int, world_size: int, folder: str, out: str) -> None:
    """One rank; rank -1 stands for `from_pretrained` without any."""
    torch.set_num_threads(1)
    from policy_cases import make_settings  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    from nemo_offload_rl.backends.dtensor.backend import DTensorBackend
    from nemo_offload_rl.protocols.backend import ProcessInfo
    from nemo_offload_rl.residency import local_tensor

    if world_size == 0:
        found, _ = measured(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    else:
        process = ProcessInfo(rank=rank, world_size=world_size, init_method=f"file://{out}/join", device="cpu")
        torch.distributed.init_process_group("gloo", init_method=process.init_method, rank=rank, world_size=world_size)
        found, backend = measured(lambda: DTensorBackend(make_settings(folder), process))
        shard_bytes = sum(local_tensor(parameter).nbytes for _, parameter in backend._parameters)
        found["shard_mib"] = round(shard_bytes / MIB, 1)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    Path(out, f"rank_{rank}.json").write_text(json.dumps(found))


def run(world_size: int, folder: Path) -> list[dict[str, float]]:
    """What each rank took."""
    num_processes = max(world_size, 1)
    with tempfile.TemporaryDirectory() as out:
        spawn(rank_main, (world_size, str(folder), out), nprocs=num_processes)
        return [json.loads(Path(out, f"rank_{rank}.json").read_text()) for rank in range(num_processes)]


def make_folder(folder: Path, hidden_size: int, num_layers: int) -> dict[str, float]:
    """A random model in bfloat16; returns its sizes in MiB."""
    from tiny_models import make_tokenizer  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        head_dim=64,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100MB")
    make_tokenizer().save_pretrained(folder)
    sizes = [parameter.numel() for parameter in model.parameters()]
    files_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {
        "files_mib": round(files_bytes / MIB, 1),
        "float32_mib": round(4 * sum(sizes) / MIB, 1),
        "largest_tensor_float32_mib": round(4 * max(sizes) / MIB, 1),
    }


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import safetensors
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        sizes = make_folder(Path(folder), args.hidden_size, args.layers)
        rows = {str(world_size): run(world_size, Path(folder)) for world_size in args.ranks}
        whole = run(0, Path(folder))[0]
    print(sizes)
    for world_size, ranks in rows.items():
        print(world_size, "ranks:", *ranks, sep="\n  ")
    print("from_pretrained:", whole)
    if args.json is not None:
        result = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": shlex.join(["python", *sys.argv]),
            "machine": {"cpus": os.cpu_count(), "kind": "virtual machine without a GPU"},
            "versions": {
                "python": sys.version.split()[0],
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "safetensors": safetensors.__version__,
            },
            "model": sizes,
            "ranks": rows,
            "from_pretrained": whole,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
