"""What a run will take of another machine, beside what runs have taken."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.fit import main, plan_fit
from nemo_offload_rl.memory.account import model_sizes
from nemo_offload_rl.residency import Phase

ROOT = Path(__file__).parents[2]
GIB = 2**30
H200_GIB, HOST_GIB = 139.8, 125.87
CPU_OFFLOAD = "policy.dtensor_cfg.cpu_offload=true"
CASES = {
    "large_model_14b": ("large_model_14b.yaml", ()),
    "large_model_14b_fraction": (
        "large_model_14b.yaml",
        (
            "policy.megatron_cfg.optimizer.offload_optimizer_states_fraction=0.7",
            "++policy.residency_overrides.optimizer=device",
        ),
    ),
    "large_model_8b": ("large_model_8b.yaml", ()),
    "large_model_8b_24gb": ("large_model_8b_24gb.yaml", ()),
    "megatrain_7b": ("megatrain_7b.yaml", ()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_took_of_the_host_what_was_planned_for_it(name):
    file, overrides = CASES[name]
    seen = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    fit = plan_fit(ROOT / "benchmarks" / file, overrides, H200_GIB, HOST_GIB, seen["num_parameters"])
    assert not fit.problems
    assert fit.owners["policy"] / GIB == pytest.approx(seen["plan_gib"]["policy"], abs=0.2)  # shares are of tensors
    taken = {owner: sum(sizes.values()) for owner, sizes in seen["peak_bytes"].items()}
    for owner, num_bytes in fit.owners.items():
        assert -0.5 < (num_bytes - taken[owner]) / GIB < 1.4
    assert sum(taken.values()) == pytest.approx(sum(fit.owners.values()), rel=0.03)
    # What the GPU held while the engine generated, with a context of the policy's.
    state_gib = next(use.state_bytes for use in fit.phases if use.phase is Phase.GENERATION) / GIB
    assert state_gib < seen["steps"][-1]["memory/generation_policy_gib"] < state_gib + 3


@pytest.mark.parametrize("name", ["large_model_32b", "large_model_moe_30b"])
def test_on_two_gpus_engines_and_driver_took_of_the_host_what_is_planned(name):
    seen = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    path = ROOT / "benchmarks" / f"{name}.yaml"
    fit = plan_fit(path, [], H200_GIB, 2 * HOST_GIB, seen["num_parameters"])
    for owner in ("engine", "driver"):
        taken_bytes = sum(seen["peak_bytes"][owner].values())
        assert 0 <= fit.owners[owner] - taken_bytes < GIB // 2


# Sizes as published, and the number of parameters that the model's card gives.
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": False}
PUBLISHED = {
    "Qwen3-8B": (
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        (8_190_735_360, 0),
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        (30_532_122_624, 48 * 128 * 3 * 2048 * 768),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_folder_with_nothing_but_a_config_tells_the_size_of_its_model(name, tmp_path):
    config, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **config}))
    sizes = model_sizes(str(tmp_path), without_weights=True)
    assert (sizes.num_parameters, sizes.num_in_experts) == expected
    assert model_sizes(str(tmp_path)) is None


def phases_gib(fit):
    return {use.phase.name: (use.state_bytes / GIB, use.engine_bytes / GIB) for use in fit.phases}


def test_phases_are_sums_of_bytes_for_each_parameter():
    file = ROOT / "examples" / "configs" / "grpo_math_1B.yaml"
    share = "policy.generation.vllm_cfg.gpu_memory_utilization=0.5"
    fit = plan_fit(file, [share], 79.2, 2048, GIB)  # 4 bytes of parameters, 4 of gradients, 8 of Adam
    assert phases_gib(fit) == {
        "TRAINING": (16, 0),
        "OPTIM_STEP": (16, 0),
        "LP_INFERENCE": (12, 0),
        "REFIT": (4, 2),
        "GENERATION": (0, pytest.approx(39.6)),
    }
    cache = "policy.generation.vllm_cfg.kv_cache_memory_gib=60"
    assert phases_gib(plan_fit(file, [cache], 79.2, 2048, GIB))["GENERATION"] == (0, 62)
    assert fit.streamed == () and not fit.omits_teacher and not fit.problems
    assert plan_fit(ROOT / "examples" / "configs" / "distillation_math.yaml", [], 79.2, 2048, GIB).omits_teacher
    whole = "policy.dtensor_cfg.offload_optimizer_states=true"
    in_parts = "policy.dtensor_cfg.offload_optimizer_states_chunk_mib=256"
    without_engine = plan_fit(ROOT / "examples" / "configs" / "sft.yaml", [whole], 79.2, 2048, GIB)
    assert phases_gib(without_engine) == {"TRAINING": (8, 0), "OPTIM_STEP": (16, 0), "LP_INFERENCE": (4, 0)}
    streamed = plan_fit(file, [share, whole, in_parts], 79.2, 2048, GIB)
    assert phases_gib(streamed)["OPTIM_STEP"] == (8, 0) and streamed.streamed == ("optimizer/part",)


def test_what_does_not_fit_is_told_and_the_advice_fits():
    file = ROOT / "examples" / "configs" / "grpo_math_1B.yaml"
    fit = plan_fit(file, [], 24, 64, 8 * GIB)
    gpu, host, engine = fit.problems
    assert gpu.startswith("policy.model_name needs 131.5 GiB on each GPU in training")
    assert "(params 32.00, optimizer 64.00, reference 16.00, process 3.00, engine 2.00), but the machine leaves" in host
    assert engine.startswith("the engine needs 16.0 GiB of each GPU (weights 16.0), but its share is 14.4;")
    offload = (CPU_OFFLOAD, "policy.dtensor_cfg.activation_checkpointing=true")
    offload += ("policy.generation.vllm_cfg.gpu_memory_utilization=0.8",)
    assert not plan_fit(file, offload, 24, 256, 8 * GIB).problems


def test_what_is_wrong_whatever_the_machine_is_one_line(tmp_path):
    configs = ROOT / "examples" / "configs"
    for file, overrides, message in (
        ("eval.yaml", [], "has no section grpo, distillation, sft, dpo"),
        ("sft_arithmetic_cpu.yaml", [], "cluster.gpus_per_node is 0"),
        ("sft.yaml", [f"policy.model_name={tmp_path}"], "give --parameters"),
        ("sft.yaml", [CPU_OFFLOAD, "policy.dtensor_cfg.offload_optimizer_states=true"], "cpu_offload"),
        ("sft.yaml", ["policy.no_such_key=3"], "no_such_key"),
    ):
        count = None if "model_name" in "".join(overrides) else GIB
        with pytest.raises(ConfigError, match=message):
            plan_fit(configs / file, overrides, 80, 1000, count)


def test_the_command_prints_the_plan_and_its_status_says_whether_it_fits(monkeypatch, capsys):
    file = str(ROOT / "benchmarks" / "large_model_14b.yaml")
    argv = ["--config", file, "--gpu-gib", "139.8", "--parameters", "14.77B", "--host-gib"]
    done = subprocess.run(
        [sys.executable, "-m", "nemo_offload_rl.fit", *argv, "64"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "")
    monkeypatch.setattr(sys, "argv", ["fit", *argv, "125.9"])
    assert main() == 0
    for text, fits in ((done.stdout, False), (capsys.readouterr().out, True)):
        assert text.startswith("14.77 B parameters; residency plan of each policy worker:\ngroup")
        assert ("does not fit: " in text) != fits


@pytest.mark.parametrize(
    "option", ["--gpu-gib=0", "--host-gib=-1", "--gpu-gib=nan", "--parameters=8x", "--parameters=0B", "--parameters=8"]
)
def test_sizes_that_are_none_are_refused(option, monkeypatch, capsys):
    others = ["--gpu-gib=80", "--host-gib=100", "--parameters=8B", "--config=c.yaml"]
    monkeypatch.setattr(sys, "argv", ["fit", *others, option])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = rf"argument {option.partition('=')[0]}: \S+ is (no number|not above 0|8 parameters; .* write 8B or 8e9)"
    assert re.search(told, capsys.readouterr().err)
