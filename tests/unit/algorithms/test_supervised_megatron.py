"""SFT and DPO on the Megatron backend learn what they learn on the DTensor backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from megatron_cpu_shim import megatron_on_cpu
from supervised_cases import Run, dpo, sft, write_model, write_rows

from nemo_offload_rl.distributed.local import start_local_policy
from nemo_offload_rl.keys.master import SupervisedConfig
from nemo_offload_rl.policy.policy import Policy

MEGATRON = "policy.megatron_cfg"
OPTIMIZER = f"{MEGATRON}.optimizer"
ON_MEGATRON = [
    "cluster.gpus_per_node=1",  # which is what the shim pretends
    "policy.dtensor_cfg.enabled=false",
    f"{MEGATRON}.enabled=true",
    f"{MEGATRON}.transformer_impl=local",
    f"{MEGATRON}.apply_rope_fusion=false",
    f"{MEGATRON}.bias_activation_fusion=false",
    f"{MEGATRON}.moe_permute_fusion=false",
    f"{MEGATRON}.distributed_data_parallel_config.overlap_grad_reduce=false",
    f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather=false",
    f"{MEGATRON}.scheduler.lr_warmup_iters=0",
    f"{OPTIMIZER}.lr=1e-3",
    f"{OPTIMIZER}.min_lr=1e-3",
    f"{OPTIMIZER}.weight_decay=0.1",
    f"{OPTIMIZER}.adam_beta2=0.98",
    f"{OPTIMIZER}.adam_eps=1e-5",
    f"{OPTIMIZER}.bf16=false",
    f"{OPTIMIZER}.use_precision_aware_optimizer=false",
    "policy.optimizer=null",
    "checkpointing.enabled=false",
]


@contextmanager
def on_cpu(config: SupervisedConfig, keep_reference: bool) -> Iterator[Policy]:
    with megatron_on_cpu():
        policy = start_local_policy(config.worker, keep_reference, "cpu")
        try:
            yield policy
        finally:
            policy.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    return folder


@pytest.mark.parametrize("run", [sft, dpo])
def test_losses_equal_those_of_the_dtensor_backend(folder, run: Run):
    expected = run(folder, f"{run.__name__}-dtensor", "checkpointing.enabled=false")
    ours = run(folder, f"{run.__name__}-megatron", *ON_MEGATRON, start=on_cpu)
    for name in ("train/loss", "validation/loss"):
        losses = [[record[name] for record in records if name in record] for records in (ours, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-3)
