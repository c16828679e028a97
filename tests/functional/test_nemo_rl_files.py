"""A file of NeMo-RL's keys and form, started by `--config` with overrides in its names: two steps of GRPO on a CPU."""

from __future__ import annotations

import json

import yaml
from nemo_rl_files import grpo_file

ON_A_CPU = (
    "policy.precision=float32",
    "policy.megatron_cfg.enabled=false",
    "policy.dtensor_cfg.enabled=true",
    "policy.optimizer={name: torch.optim.AdamW, kwargs: {lr: 1e-4}}",
    "policy.scheduler=null",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "+policy.generation.vllm_kwargs.kv_cache_memory_bytes=134217728",
    "cluster.gpus_per_node=0",
    "logger.tensorboard_enabled=false",
    "checkpointing.enabled=false",
    "grpo.val_period=0",
    "grpo.max_num_steps=2",
    "~data.train",
    "+data.train={dataset_name: ResponseDataset, data_path: rows.jsonl}",
)


def test_a_file_that_inherits_runs_on_a_cpu_with_overrides_alone(
    model_folder, run_in_one_process, read_metrics, tmp_path
):
    base = grpo_file()
    # As in NeMo-RL: the prompt's limit is that of the whole sequence, and the engine ends what is longer.
    base["policy"] |= {"max_total_sequence_length": 24}
    base["policy"]["generation"] |= {"max_new_tokens": 24}
    base["policy"]["generation"]["vllm_cfg"]["max_model_len"] = "${policy.max_total_sequence_length}"
    base["data"]["max_input_seq_length"] = "${policy.max_total_sequence_length}"
    leaf = {
        "defaults": "base.yaml",
        "policy": {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}, "optimizer": None},
    }
    for name, contents in (("base", base), ("megatron", leaf)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(contents))
    rows = [{"input": f"{number}+{number}=", "output": str(2 * number)} for number in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_in_one_process(
        f"policy.model_name={model_folder}",
        f"policy.tokenizer.name={model_folder}",
        f"logger.log_dir={tmp_path / 'logs'}",
        *(key.replace("rows.jsonl", str(tmp_path / "rows.jsonl")) for key in ON_A_CPU),
        config=tmp_path / "megatron.yaml",
    )
    assert done.status == 0, done.stderr
    assert "megatron.yaml is NeMo-RL's; what becomes of its keys:" in done.stderr
    steps = read_metrics(tmp_path / "logs/exp_001")
    assert list(steps) == [1, 2]
    for record in steps.values():
        assert record["train/max_response_tokens"] < 24
        assert record["train/token_mult_prob_error"] < 1.01
