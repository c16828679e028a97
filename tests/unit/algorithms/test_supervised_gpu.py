"""SFT and DPO of one worker in this process on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from supervised_cases import Run, dpo, sft, write_model, write_rows

ON_GPU = (
    "cluster.gpus_per_node=1",
    "policy.use_pinned_optimizer_offload=true",
    "policy.dtensor_cfg.torch_compile=false",  # half a minute for each new model
)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("run", [sft, dpo])
def test_losses_of_a_gpu_are_those_of_a_cpu_also_with_states_streamed(tmp_path: Path, run: Run) -> None:
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    losses = {
        name: [record["train/loss"] for record in run(tmp_path, name, *overrides) if record["step"] > 0]
        for name, overrides in {
            "cpu": (),
            "gpu": ON_GPU,
            "streamed": (*ON_GPU, "policy.dtensor_cfg.offload_optimizer_states=true"),
        }.items()
    }
    assert len(losses["cpu"]) == 4
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-3)
    assert losses["streamed"] == losses["gpu"]
