"""A program: trains a small model on a GPU with and without activation offloading and prints what happened, as JSON.

A program of its own, since Transformer Engine reads its environment variables when it is imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, "tests/support")
from policy_cases import NLL, make_batch, make_settings
from tiny_models import qwen3_config, save_model_folder

from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo

OFFLOAD = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ("qkv_linear", "core_attn", "attn_proj"),
    "min_offloaded_tensor_size": 1024,
}


def run(folder: Path, changes: dict[str, Any], logprobs_first: bool) -> dict[str, Any]:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    copied = {"count": 0, "num_bytes": 0}
    offload = ChunkOffloadHandler.offload

    def counted(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
        copied["count"] += 1
        copied["num_bytes"] += tensor.nbytes
        return offload(self, tensor, **options)

    ChunkOffloadHandler.offload = counted
    settings = make_settings(
        folder,
        backend="megatron",
        transformer_impl="transformer_engine",
        precision="bfloat16",
        bf16=True,
        pipeline_dtype="bfloat16",
        max_total_sequence_length=2048,
        train_global_batch_size=4,
        train_micro_batch_size=1,
        residency_verify=False,
        **changes,
    )
    worker = PolicyWorker(settings, ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0"), False)
    batch = make_batch(num_rows=4, width=2048)
    if logprobs_first:
        worker.prepare_for_lp_inference()
        worker.get_logprobs(batch)
    worker.prepare_for_training()
    steps = []
    for _ in range(3):
        copied.update(count=0, num_bytes=0)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, _ = worker.forward_backward(batch, NLL())
        peak = torch.cuda.max_memory_allocated() - before
        steps.append({"loss": loss, "peak_bytes": peak, **copied, "grad_norm": worker.optim_step().grad_norm})
    worker.shutdown()
    ChunkOffloadHandler.offload = offload
    return {"steps": steps}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_model_folder(Path(folder), 0, qwen3_config(num_layers=6, hidden_size=256))
        found = {
            "resident": run(Path(folder), {}, logprobs_first=False),
            "offloaded": run(Path(folder), OFFLOAD, logprobs_first=False),
            "logprobs first": run(Path(folder), OFFLOAD, logprobs_first=True),
        }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
