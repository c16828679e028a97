from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.data import ArithmeticConfig, ResponseDatasetConfig
from nemo_offload_rl.keys.worker import SchedulerSettings
from nemo_offload_rl.report.page import write_report
from nemo_offload_rl.runs.loading import load_grpo_config
from nemo_offload_rl.utils.logger import RunLogger

CPU = "tests/unit/config/cpu.yaml"
GPU = "examples/configs/grpo_math_1B.yaml"


def test_milestones_become_the_ends_of_the_phases() -> None:
    scheduler = load_grpo_config(GPU).worker.scheduler_phases
    assert [phase.until_step for phase in scheduler] == [50, None]
    assert scheduler[0] == SchedulerSettings(
        name="torch.optim.lr_scheduler.LinearLR",
        kwargs={"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50},
        until_step=50,
    )
    assert load_grpo_config(CPU).worker.scheduler_phases == ()


def test_derived_fields_follow_their_keys() -> None:
    config = load_grpo_config(CPU, ["grpo.seed=7", "policy.generation.temperature=0.7", "policy.generation.top_k=5"])
    assert (config.worker.seed, config.engine.seed, config.data.train.seed) == (7, 7, 7)
    assert config.worker.logprob_temperature == 0.7
    assert config.policy.generation.sampling.temperature == 0.7
    assert config.policy.generation.val_sampling.temperature == 0.0
    assert (config.policy.generation.sampling.top_k, config.policy.generation.val_sampling.top_k) == (5, 5)
    assert config.policy.tokenizer.name == config.policy.model_name == config.engine.model_name


def test_a_data_set_inherits_the_default_task_and_may_change_it() -> None:
    config = load_grpo_config(
        CPU,
        [
            "data.validation={dataset_name: ResponseDataset, path: held.jsonl, input_key: q, output_key: a,"
            " split_validation_size: 0, seed: 1, system_prompt_file: s.txt}"
        ],
    )
    assert isinstance(config.data.train, ArithmeticConfig)
    assert config.data.train.operators == ("+", "-")
    assert isinstance(config.data.validation, ResponseDatasetConfig)
    assert config.data.validation.system_prompt_file == "s.txt"
    assert config.data.validation.env_name == "arithmetic"
    assert config.data.train.system_prompt_file is None


def test_a_cluster_without_gpus_counts_cpu_workers() -> None:
    cpu = load_grpo_config(CPU, ["cluster.cpu_workers_per_node=2"]).cluster
    assert (cpu.device_type, cpu.world_size) == ("cpu", 2)
    gpu = load_grpo_config(GPU, ["cluster.gpus_per_node=8", "cluster.num_nodes=2"]).cluster
    assert (gpu.device_type, gpu.world_size) == ("cuda", 16)


def test_the_resolved_dictionary_has_every_section_and_no_interpolation() -> None:
    config = load_grpo_config(GPU)
    assert set(config.resolved) == {
        "grpo", "loss_fn", "policy", "data", "env", "logger", "cluster", "checkpointing",
    }  # fmt: skip
    assert "${" not in str(config.resolved)
    assert dataclasses.is_dataclass(config)


def test_secrets_of_the_environment_reach_the_code_that_uses_them_and_no_file_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "topsecretvalue")
    code = tmp_path / "secret_sink.py"
    code.write_text("given = []\ndef sink(step, metrics, token):\n    given.append((type(token), token))\n")
    overrides = [
        f"logger.sinks=[{{target: '{code}:sink', kwargs: {{token: '${{oc.env:MY_SECRET}}'}}}}]",
        "policy.model_name='runs/${oc.env:MY_SECRET}'",
        "data.train.seed=1",
        f"logger.log_dir={tmp_path / 'run'}",
        "logger.tensorboard_enabled=true",
    ]
    # A shell puts a value in the place of its variable.
    monkeypatch.setattr(sys, "argv", ["run_grpo.py", *overrides, "+x=topsecretvalue"])
    config = load_grpo_config(CPU, overrides)
    assert config.policy.model_name == config.engine.model_name == "runs/topsecretvalue"
    with RunLogger(config.logger, config.resolved) as logger:
        logger.log(1, {"loss": 1.0}, "train")
    assert sys.modules["secret_sink"].given == [(str, "topsecretvalue")]
    write_report(tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "run.json", "index.html"} <= {path.name for path in files}
    assert any("tfevents" in path.name for path in files)
    assert not [path for path in files if b"topsecretvalue" in path.read_bytes()]
    assert "token: ${oc.env:MY_SECRET}" in (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"seed: given the text '\$\{oc\.env:MY_SECRET\}', wanted"):
        load_grpo_config(CPU, ["grpo.seed='${oc.env:MY_SECRET}'"])
