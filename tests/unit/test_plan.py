"""Plans of runs for other machines, compared with what runs have taken."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import runpy
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.memory.account import model_sizes
from nemo_offload_rl.memory.calibrate import calibrate
from nemo_offload_rl.memory.gpus import KNOWN, Gpu, find_gpu
from nemo_offload_rl.memory.groups import has_adapters
from nemo_offload_rl.memory.stages import Stage
from nemo_offload_rl.memory.transfers import copies_of_step
from nemo_offload_rl.plan import (
    Plan,
    Target,
    as_tried,
    main,
    plan_run,
    render_changes,
    search_of,
    usable_host_bytes,
)
from nemo_offload_rl.residency import Phase
from nemo_offload_rl.runs.loading import load_grpo_config
from nemo_offload_rl.runs.planned import adapters_line, chosen_kv_line, planned_metrics, with_adapters, with_chosen_kv

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import plan_table  # noqa: E402
from hybrid_shapes import HYBRID_SHAPES  # noqa: E402

GIB = 2**30
H200_GIB, HOST_GIB = 139.8, 125.87
DTENSOR = "policy.dtensor_cfg"
MEGATRON = "policy.megatron_cfg"
CPU_OFFLOAD = f"{DTENSOR}.cpu_offload=true"
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


def plan_for(path, overrides, gpu_gib, host_gib, num_parameters=None) -> Plan:
    gpu = Gpu("some GPU", int(gpu_gib * GIB))
    return plan_run(path, overrides, Target(gpu, usable_host_bytes(host_gib), num_parameters))[0]


@pytest.mark.parametrize("name", CASES)
def test_a_run_took_of_the_host_what_was_planned_for_it(name):
    file, overrides = CASES[name]
    seen = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    plan = plan_for(ROOT / "benchmarks" / file, overrides, H200_GIB, HOST_GIB, seen["num_parameters"])
    assert not plan.problems
    state_gib = seen["plan_gib"]["policy"] - 3  # as the worker told it, with so much for its process then
    assert sum(plan.account.need.state_parts().values()) / GIB == pytest.approx(state_gib, abs=0.2)
    check_host(plan, seen)
    # What the GPU held while the engine generated, with a context of the policy's.
    state_gib = next(use.state_bytes for use in plan.phases if use.phase is Phase.GENERATION) / GIB
    assert state_gib < seen["steps"][-1]["memory/generation_policy_gib"] < state_gib + 3


def check_host(plan, seen):
    taken = plan_table.host_taken(seen)
    for owner, num_bytes in plan.owners.items():
        assert (num_bytes - taken[owner]) / plan.account.cfg.cluster.world_size / GIB == pytest.approx(0, abs=0.4)
    assert sum(taken.values()) == pytest.approx(sum(plan.owners.values()), rel=0.01)


@pytest.mark.parametrize("name", ["large_model_32b", "large_model_moe_30b", "reference_8b_four_gpus"])
def test_on_several_gpus_all_processes_took_of_the_host_what_is_planned(name, tmp_path):
    seen = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    check_host(plan_table.plan_case(plan_table.CASES[name], 520, tmp_path), seen)


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

QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_folder_with_nothing_but_a_config_tells_the_size_of_its_model(name, tmp_path):
    config, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **config}))
    sizes = model_sizes(str(tmp_path), without_weights=True)
    assert (sizes.num_parameters, sizes.num_in_experts) == expected
    assert model_sizes(str(tmp_path)) is None


def phases_gib(plan):
    return {use.phase.name: (use.state_bytes / GIB, use.engine_bytes / GIB) for use in plan.phases}


def test_phases_are_sums_of_bytes_for_each_parameter():
    file = ROOT / "examples" / "configs" / "grpo_math_1B.yaml"
    share = "policy.generation.vllm_cfg.gpu_memory_utilization=0.5"
    plan = plan_for(file, [share], 79.2, 2048, GIB)  # 4 bytes of parameters, 4 of gradients, 8 of Adam
    assert phases_gib(plan) == {
        "TRAINING": (16, 0),
        "OPTIM_STEP": (16, 0),
        # Adam's states were on the host during generation; the reference comes through two buffers of 64 MiB.
        "LP_INFERENCE": (4.125, 0),
        "REFIT": (6, 2),  # two buffers of 1 GiB
        "GENERATION": (0, pytest.approx(39.6)),
    }
    cache = "policy.generation.vllm_cfg.kv_cache_memory_gib=60"
    assert phases_gib(plan_for(file, [cache], 79.2, 2048, GIB))["GENERATION"] == (0, 62)
    assert plan.streamed == () and not plan.omits_teacher and not plan.problems
    assert plan_for(ROOT / "examples" / "configs" / "distillation_math.yaml", [], 79.2, 2048, GIB).omits_teacher
    whole = "policy.dtensor_cfg.offload_optimizer_states=true"
    in_parts = "policy.dtensor_cfg.offload_optimizer_states_chunk_mib=256"
    without_engine = plan_for(ROOT / "examples" / "configs" / "sft.yaml", [whole], 79.2, 2048, GIB)
    assert phases_gib(without_engine) == {"TRAINING": (8, 0), "OPTIM_STEP": (16, 0)}
    streamed = plan_for(file, [share, whole, in_parts], 79.2, 2048, GIB)
    assert phases_gib(streamed)["OPTIM_STEP"] == (8, 0) and streamed.streamed == ("optimizer/part",)


def test_what_does_not_fit_is_told_and_the_advice_fits():
    file = ROOT / "examples" / "configs" / "grpo_math_1B.yaml"
    plan = plan_for(file, [], 24, 64, 8 * GIB)
    gpu, engine, host = plan.problems
    assert gpu.startswith("policy.model_name needs 131.5 GiB on each GPU in training")
    assert "(params 32.00, optimizer 64.00, reference 16.00, process 2.75, engine 1.75), but the machine leaves" in host
    assert engine.startswith("the engine needs 16.0 GiB of each GPU (weights 16.0), but its share is 14.4;")
    offload = (CPU_OFFLOAD, "policy.dtensor_cfg.activation_checkpointing=true")
    offload += ("policy.generation.vllm_cfg.gpu_memory_utilization=0.8",)
    assert not plan_for(file, offload, 24, 256, 8 * GIB).problems


def test_what_is_wrong_whatever_the_machine_is_one_line(tmp_path):
    configs = ROOT / "examples" / "configs"
    folders = {}
    for name, text in (
        ("empty", None),
        ("broken", '{"model_type": '),
        ("unknown", '{"model_type": "no_such_family"}'),
        ("whole", json.dumps({**QWEN3, **PUBLISHED["Qwen3-8B"][0]})),
    ):
        (tmp_path / name).mkdir()
        folders[name] = f"policy.model_name={tmp_path / name}"
        if text is not None:
            (tmp_path / name / "config.json").write_text(text)
    gpus = "cluster.gpus_per_node="
    for file, overrides, message in (
        ("eval.yaml", [], "has no section grpo, distillation, sft, dpo"),
        ("sft_arithmetic_cpu.yaml", [], "cluster.gpus_per_node is 0"),
        ("no_such_file.yaml", [], "no such configuration file"),
        ("sft.yaml", [folders["empty"]], "has no config.json; .* or give --parameters"),
        ("sft.yaml", [folders["broken"]], "config.json is not valid JSON .* or give --parameters"),
        ("sft.yaml", [folders["unknown"]], "model_type no_such_family, but that backend trains afmoe, arcee"),
        ("sft.yaml", ["policy.model_name=no-owner/no-model"], "is no folder of this machine; give one"),
        ("sft.yaml", [folders["whole"], f"{DTENSOR}.tensor_parallel_size=3", f"{gpus}3"], "does not divide the 32 att"),
        ("sft.yaml", [folders["whole"], f"{DTENSOR}.tensor_parallel_size=2", f"{gpus}3"], "does not divide the 3 pol"),
        ("sft.yaml", [f"{gpus}3"], "train_global_batch_size 32 does not divide by the 3 data-parallel workers"),
        ("sft.yaml", [CPU_OFFLOAD, "policy.dtensor_cfg.offload_optimizer_states=true"], "cpu_offload"),
        ("sft.yaml", ["policy.no_such_key=3"], "no_such_key"),
    ):
        count = None if "model_name" in "".join(overrides) else GIB
        with pytest.raises(ConfigError, match=message):
            plan_for(configs / file, overrides, 80, 1000, count)


@pytest.mark.parametrize(
    "name",
    [
        *("dpo_packed", "dpo_megatron_rows", "sft_adapters", "sft_megatron_adapters"),
        *("two_sft_tensor_parallel", "two_sft_megatron_pipeline"),
    ],
)
def test_in_each_phase_the_policy_took_of_a_gpu_what_is_planned(name, tmp_path):
    seen = json.loads((ROOT / "benchmarks" / "results" / "plan_runs.json").read_text())["cases"][name]
    _, own = plan_table.short_plan(name, seen, "H200", tmp_path)
    assert own.keys() >= {Phase.TRAINING, Phase.OPTIM_STEP}
    for phase, num_bytes in own.items():
        taken_gib = max(step[f"residency/{phase.value}/peak_gib"] for step in seen["steps"])
        assert num_bytes / GIB == pytest.approx(taken_gib, rel=0.05), phase


def test_stages_of_a_pipeline_hold_their_layers_and_their_end_of_the_model(tmp_path):
    """Of 36 layers 12 and 24; the fullest stage counts on the GPU, and both on the host."""
    override, (config, (num_parameters, _)) = write_config(tmp_path, "Qwen3-8B"), PUBLISHED["Qwen3-8B"]
    keys = "pipeline_model_parallel_size=2", "num_layers_in_first_pipeline_stage=12"
    backend = ["policy.optimizer=null", f"{DTENSOR}.enabled=false", "policy.megatron_cfg.enabled=true"]
    backend += [f"policy.megatron_cfg.{key}" for key in keys] + ["cluster.gpus_per_node=2"]
    offloaded = ["policy.megatron_cfg.optimizer.offload_optimizer_states=true"]
    plan, _ = plan_run(
        ROOT / "examples" / "configs" / "sft.yaml", [override, *backend, *offloaded], Target(KNOWN["H200"])
    )
    matrix = QWEN3["vocab_size"] * config["hidden_size"]
    last = 2 * (num_parameters - 2 * matrix) // 3 + matrix
    groups, need = plan.account.groups, plan.account.need
    assert groups["params"] == 2 * last and groups["optimizer/part"] == 10 * last
    assert need.resolve().arena == {"optimizer/part": pytest.approx(10 * num_parameters / 2)}


def write_config(folder, name):
    config, _ = PUBLISHED[name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3, **config}))
    return f"policy.model_name={folder}"


# Measured by the runs of benchmarks/results; GPUs of the plan, tokens of a sequence.
MEASURED = {
    "large_model_8b": ("large_model_8b.yaml", "Qwen3-8B", "H200", 528),
    "large_model_8b_24gb": ("large_model_8b_24gb.yaml", "Qwen3-8B", "H200", 520),
    "reference_8b_four_gpus": ("reference_8b.yaml", "Qwen3-8B", "H200", 798),
    "large_model_moe_30b": ("large_model_moe_30b.yaml", "Qwen3-30B-A3B", "H200", 520),
    "large_model_moe_30b_h100": ("large_model_moe_30b.yaml", "Qwen3-30B-A3B", "H100", 520),
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_step_took_the_seconds_and_moved_the_bytes_that_are_planned(name, tmp_path):
    file, model, gpu, tokens = MEASURED[name]
    seen = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["steps"][1:]
    override = write_config(tmp_path, model)
    plan, _ = plan_run(ROOT / "benchmarks" / file, [override], Target(KNOWN[gpu], length=tokens))
    assert plan.step_s == pytest.approx(statistics.median(step["timing/total_s"] for step in seen), rel=0.15)
    in_bytes = plan.account.cfg.cluster.world_size * sum(copies.in_bytes for copies in plan.copies.values())
    assert in_bytes == pytest.approx(seen[-1]["residency/bytes_in"], rel=0.04)
    # What the GPU was seen to hold includes free memory that torch keeps, and state that came early.
    for use in plan.phases:
        if stage := {Phase.TRAINING: "training", Phase.LP_INFERENCE: "logprobs"}.get(use.phase):
            taken_gib = sum(seen[-1][f"memory/{stage}_{owner}_gib"] for owner in ("policy", "engine", "other"))
            assert use.pass_bytes
            assert use.total_bytes < 1.04 * taken_gib * GIB
    # What a run of this configuration logs: the same peaks, and more seconds, since its sequences may be longer.
    logged = planned_metrics(plan.account.cfg, KNOWN[gpu])
    assert {f"{use.phase.value}_gib": use.peak_bytes / GIB for use in plan.phases}.items() <= logged.items()
    assert {f"{stage.value}_s" for stage in plan.copies} <= logged.keys()
    assert logged["step_s"] > 0.99 * plan.step_s


# The cache of a token is nearly as large in the model of 0.6 B as in that of 8 B.
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}


HYBRID = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 35 + ["full_attention"]}


@pytest.mark.parametrize(("sizes", "is_kept"), [(SMALL, False), ({}, True), (HYBRID, False)])
def test_a_cache_is_kept_on_the_host_where_copies_take_less_time_than_computing_it_again(sizes, is_kept, tmp_path):
    keys = ["enabled=true", "order=finished", "in_flight_weight_updates=true", "paused_kv=auto", "paused_kv_host_gib=4"]
    overrides = [write_config(tmp_path, "Qwen3-8B"), *(f"grpo.async_grpo.{key}" for key in keys)]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))
    overrides += [
        "policy.generation.vllm_cfg.async_engine=true",
        "loss_fn.use_importance_sampling_correction=true",
        "policy.generation.colocated.enabled=true",
    ]
    config = load_grpo_config(str(ROOT / "examples/configs/grpo_math_1B.yaml"), overrides)
    chosen = with_chosen_kv(config, KNOWN["H200"])
    assert (chosen.engine.kept_kv_bytes, chosen.worker.engine_kept_kv_gib) == ((4 * GIB, 4.0) if is_kept else (None, 0))
    assert ("copied to the host" if is_kept else "computed again") in chosen_kv_line(chosen)
    # Both count in the host's memory, since only the run chooses.
    plan, _ = plan_run(ROOT / "examples/configs/grpo_math_1B.yaml", overrides, Target(KNOWN["H200"]))
    assert plan.account.need.parts()["the engine's kept KV blocks"] == 4 * GIB


def test_a_step_takes_as_long_as_the_slower_one_of_engine_and_trainer_where_both_go_on(tmp_path):
    keys = [write_config(tmp_path, "Qwen3-8B"), "policy.generation.vllm_cfg.async_engine=true"]
    keys += ["loss_fn.use_importance_sampling_correction=true", "cluster.gpus_per_node=2"]
    own = ["enabled=false", "resources.gpus_per_node=1", "resources.num_nodes=1"]
    keys += [f"policy.generation.colocated.{key}" for key in own]
    for num_rows, is_longer in ((512, Stage.TRAINING), (8, Stage.GENERATION)):
        of_engine, ahead = f"++policy.generation.vllm_kwargs.max_num_seqs={num_rows}", "grpo.async_grpo.enabled=true"
        in_turn = "grpo.async_grpo.max_trajectory_age_steps=0"
        plans = [
            plan_run(ROOT / "examples/configs/grpo_math_1B.yaml", [*keys, *more], Target(KNOWN["H200"]))[0]
            for more in ([of_engine], [of_engine, ahead], [of_engine, ahead, in_turn])
        ]
        stages = {stage: seconds.total_s for stage, seconds in plans[0].seconds.items()}
        others_s = sum(stages.values()) - stages[Stage.GENERATION]
        assert plans[0].step_s == plans[2].step_s == pytest.approx(sum(stages.values()))
        expected_s = {Stage.TRAINING: others_s, Stage.GENERATION: stages[Stage.GENERATION] + stages[Stage.REFIT]}
        assert plans[1].step_s == pytest.approx(expected_s[is_longer]) == max(expected_s.values())


def test_an_engine_that_applies_adapters_gets_weights_too_if_it_sleeps_and_the_host_holds_them_once(tmp_path):
    overrides = [write_config(tmp_path, "Qwen3-8B"), "policy.dtensor_cfg.lora_cfg.enabled=true"]
    overrides += ["policy.dtensor_cfg.lora_cfg.dim=16"]
    accounts = []
    for is_served, sleeps in [(False, True), (True, True), (True, False)]:
        more = [f"policy.generation.enable_lora={str(is_served).lower()}"]
        more += [f"policy.generation.vllm_cfg.enable_sleep_mode={str(sleeps).lower()}"]
        plan, _ = plan_run(ROOT / "examples/configs/grpo_math_1B.yaml", overrides + more, Target(KNOWN["H200"]))
        accounts.append(plan.account)
        config = load_grpo_config(str(ROOT / "examples/configs/grpo_math_1B.yaml"), overrides + more)
        assert config.worker.sends_adapters is is_served is (config.engine.adapters is not None)
        assert config.worker.sends_weights is sleeps is (not is_served or config.engine.adapters.with_weights)
        sent = "own weights" if sleeps else "adapters alone"
        assert (sent if is_served else "enable_lora is false") in adapters_line(with_adapters(config))
    merges, serves, _ = accounts
    buffers_bytes = serves.engine_weight_bytes - merges.engine_weight_bytes
    assert buffers_bytes == 2 * serves._elements.in_adapters > 0  # of bfloat16
    assert serves.need.parts() == merges.need.parts()
    assert copies_of_step(serves) == copies_of_step(merges)
    in_refit = [next(use for use in one.phases if use.phase is Phase.REFIT).state for one in accounts]
    assert in_refit[0] == in_refit[1]
    assert in_refit[1]["frozen params"] == 2 * serves.num_parameters
    assert in_refit[1]["refit buffers"] > in_refit[2]["refit buffers"] == 4 * serves._elements.in_adapters


def test_adapters_of_32_b_fit_an_h100_while_the_base_is_on_the_host_in_refits(tmp_path):
    plan_table.write_config(tmp_path, "32B")
    plans = {}
    target = Target(KNOWN["H100"], usable_host_bytes(128))
    for base, is_served in (("host", False), ("host", True), ("device", False)):
        overrides = [f"policy.model_name={tmp_path}", f"policy.residency_overrides.base={base}"]
        overrides += [f"policy.generation.enable_lora={str(is_served).lower()}"]
        plans[base, is_served], rules = plan_run(ROOT / "benchmarks" / "large_model_32b_lora.yaml", overrides, target)
    merges, serves = plans["host", False], plans["host", True]
    assert merges.account.groups["base"] == 2 * merges.account.num_parameters
    assert not merges.problems and not serves.problems
    (problem,) = plans["device", False].problems
    assert "frozen params" in problem
    (change,) = search_of(plans["device", False], rules).cheapest(1)
    assert change.overrides == ("++policy.residency_overrides.base=host",)
    # A refit reads each weight once, whoever applies the adapters, and no sleeping engine copies any.
    assert merges.copies[Stage.REFIT].in_bytes == 2 * merges.account.num_parameters
    assert serves.copies == merges.copies
    assert serves.seconds == merges.seconds
    phases, matrix_bytes = {use.phase: use for use in merges.phases}, 2 * 151_936 * 5120
    assert phases[Phase.REFIT].state["frozen params"] == matrix_bytes  # one of the largest
    # Passes copy neither the two matrices outside of the layers nor a layer.
    assert 0 < phases[Phase.LP_INFERENCE].pass_bytes < matrix_bytes


def test_a_micro_batch_that_does_not_fit_is_refused_with_the_keys_that_make_it_smaller(tmp_path):
    overrides = [write_config(tmp_path, "Qwen3-8B"), "policy.dtensor_cfg.activation_checkpointing=false"]
    overrides += ["policy.train_micro_batch_size=32", "++policy.dtensor_cfg.activation_offload=false"]
    plan, _ = plan_run(ROOT / "benchmarks" / "large_model_8b.yaml", overrides, Target(KNOWN["H200"]))
    (problem,) = plan.problems
    assert re.match(r"phase TRAINING needs [\d.]+ GiB on each GPU \(.*passes [\d.]+.*\), but it has 139\.\d;", problem)
    fix = "lower policy.train_micro_batch_size, or set policy.dtensor_cfg.activation_checkpointing=true"
    assert fix in problem
    # Where it is chosen, it fits.
    auto = [overrides[0], "policy.train_micro_batch_size=auto"]
    chosen, _ = plan_run(ROOT / "benchmarks" / "large_model_8b.yaml", auto, Target(KNOWN["H200"]))
    size = chosen.account.cfg.policy.train_micro_batch_size
    assert not chosen.problems
    assert size > 8
    assert 64 % size == 0


def test_the_command_prints_the_plan_and_its_status_says_whether_it_fits(tmp_path, capfd, monkeypatch):
    override = write_config(tmp_path, "Qwen3-8B")
    argv = ["--config", str(ROOT / "benchmarks" / "large_model_8b.yaml"), override]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:  # as `python -m` does
        patch.setattr(sys, "argv", ["plan", *argv, "--gpu", "H200", "--host-gib", "64"])
        runpy.run_path(inspect.getfile(plan_run), run_name="__main__")
    too_small = capfd.readouterr()
    assert (ended.value.code, too_small.err) == (2, "")
    page = tmp_path / "plan.html"
    assert main([*argv, "--gpu", "NVIDIA H200", "--gpus", "1", "--host-gib", "125.9", "--html", str(page)]) == 0
    drawn = page.read_text()
    assert drawn.count("<svg") == 3
    assert "does not fit" not in drawn
    assert main([*argv, "--gpu-gib=24", "--html", str(page)]) == 2
    assert capfd.readouterr().out.count("changes that make it fit:") == 1
    for shown in ("<h2>It does not fit</h2>", "<h2>Changes that make it fit</h2>", "cpu_offload=true ~policy.resid"):
        assert shown in page.read_text()
    assert main([*argv, "--gpu", "H200", "--host-gib", "125.9"]) == 0
    for text, fits in ((too_small.out, False), (capfd.readouterr().out, True)):
        assert text.startswith("8.19 B parameters; residency plan of each policy worker:\ngroup")
        assert " s a step of 64 sequences of 528 tokens" in text
        assert ("does not fit: " in text) != fits == ("\nfits: " in text)
    # Without a config.json or rates of the GPU, seconds are unknown; without --host-gib, main memory is not compared.
    assert main([*argv[:2], "--gpu-gib=139.8", "--parameters=8.19B", "--json"]) == 0
    read = json.loads(capfd.readouterr().out)
    assert read["fits"] and read["step_s"] is None
    assert read["phases"]["TRAINING"]["gib"]["params"] == pytest.approx(4 * 8.19e9 / GIB, abs=0.1)
    assert sum(read["host_gib"].values()) > 64
    with pytest.raises(ConfigError, match="--fit compares seconds, which are not known: they need rates of the GPU"):
        main([*argv[:2], "--gpu-gib=139.8", "--parameters=8.19B", "--fit"])


def test_the_guide_shows_what_the_command_prints(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = {name: tmp_path / name for name in ("QWEN3_8B", "QWEN3_30B_A3B", "QWEN3_32B")}
    for name, folder in folders.items():
        plan_table.write_config(folder, name.removeprefix("QWEN3_").replace("_", "-"))
    guide = (ROOT / "docs" / "guides" / "will-it-fit.md").read_text()
    blocks, printed = re.findall(r"```(bash|)\n(.*?)```", guide, re.DOTALL), ""
    assert [kind for kind, _ in blocks].count("bash") == 5
    for kind, text in blocks:
        if kind == "bash":
            argv = text.replace("\\\n", " ").split()
            assert argv[:3] == ["python", "-m", "nemo_offload_rl.plan"]
            argv = [re.sub(r"QWEN3_\w+", lambda found: str(folders[found.group()]), one) for one in argv[3:]]
            main(argv)
            printed = capfd.readouterr().out.replace(f"{tmp_path}/", "")
        else:
            assert [line for line in text.splitlines() if line not in printed.splitlines()] == []


def test_changes_and_the_fastest_values_were_tried_and_fit_when_loaded(tmp_path):
    file, override = ROOT / "examples" / "configs" / "grpo_math_1B.yaml", write_config(tmp_path, "Qwen3-8B")
    target = Target(KNOWN["H100"], usable_host_bytes(256))
    plan, rules = plan_run(file, [override], target)
    assert plan.problems
    search = search_of(plan, rules)
    changes = search.cheapest()
    assert 2 <= len(changes) <= 3
    ways = [({it.partition("=")[0] for it in trial.overrides}, trial.account.cfg.cluster) for trial in changes]
    assert not any(one <= other and gpus == same for (one, gpus), (other, same) in itertools.permutations(ways, 2))
    fastest = search.fastest()
    assert fastest is not None
    assert not fastest.changes_numbers and not fastest.changes_machine
    same = [trial for trial in changes if not (trial.changes_numbers or trial.changes_machine)]
    assert same
    assert all(fastest.step_s <= 1.02 * trial.step_s for trial in same)  # less memory may cost 1.5 %
    for trial in (*changes, fastest):
        tried, _ = plan_run(file, [override, *as_tried(plan, trial, file, [override]).overrides], target)
        assert not tried.problems
        assert tried.step_s == pytest.approx(trial.step_s)
    # The file's `logprob_batch_size` copies the size of micro-batches, but was tried with its own value.
    rows = "policy.train_micro_batch_size=2"
    trial = replace(search.given, overrides=(rows,), account=plan.account.with_keys(rows))
    assert as_tried(plan, trial, file, [override]).overrides == (rows, "policy.logprob_batch_size=4")
    text = render_changes(plan, changes)
    assert text.startswith("in TRAINING a GPU lacks ") and "; most is optimizer: 61.0 GiB\n" in text


GRIDS = {
    "grpo_math_1B.yaml": (
        [f"policy.train_micro_batch_size={rows}" for rows in (1, 4, 16)],
        [f"policy.generation.vllm_cfg.gpu_memory_utilization={share}" for share in (0.3, 0.6, 0.8)],
    ),
    "sft.yaml": (
        [f"policy.sequence_packing.train_mb_tokens={tokens}" for tokens in (4096, 16384, 65536)],
        ["policy.logprob_chunk_size=null", "policy.logprob_chunk_size=1024"],
    ),
}
PLACES = [
    f"{DTENSOR}.activation_checkpointing={recomputes} {DTENSOR}.activation_offload={offloads} {states}"
    for recomputes, offloads in (("false", "false"), ("true", "false"), ("true", "true"))
    for states in (
        f"{DTENSOR}.cpu_offload=false",
        f"{DTENSOR}.cpu_offload=true",
        f"{DTENSOR}.offload_optimizer_states=true {DTENSOR}.offload_optimizer_states_chunk_mib=1024.0",
    )
]


@pytest.mark.parametrize("file", GRIDS)
def test_no_point_of_a_grid_is_faster_than_the_fastest_that_is_found(file, tmp_path):
    override = write_config(tmp_path, "Qwen3-8B")
    target = Target(KNOWN["H100"], usable_host_bytes(256))
    plan, rules = plan_run(ROOT / "examples" / "configs" / file, [override], target)
    search = search_of(plan, rules)
    fastest = search.fastest()
    assert fastest is not None
    accounts = [plan.account.with_keys(" ".join(point)) for point in itertools.product(PLACES, *GRIDS[file])]
    fitting = [one for one in accounts if not search.judges.short_bytes(one) and search.judges.is_allowed(one)]
    assert len(fitting) > 5
    # Fewer keys are worth 0.2 % each, and less memory 1.5 %.
    assert fastest.step_s <= 1.025 * min(search.judges.step_s(one) for one in fitting)


def test_a_layout_that_fits_with_other_keys_only_is_found(tmp_path):
    override = write_config(tmp_path, "Qwen3-8B")
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))  # 70 B
    overrides = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", "policy.dropout=false"]
    overrides += [override, "policy.optimizer=null", "policy.scheduler=null", "cluster.gpus_per_node=8"]
    target = Target(KNOWN["H100"], usable_host_bytes(2048))
    plan, rules = plan_run(ROOT / "examples" / "configs" / "sft.yaml", overrides, target)
    search = search_of(plan, rules)
    stages = f"policy.sequence_packing.train_mb_tokens=4096 {MEGATRON}.pipeline_model_parallel_size=8"
    recomputed = f"{MEGATRON}.activation_checkpointing=true {MEGATRON}.recompute_granularity=selective"
    recomputed += f" {MEGATRON}.recompute_modules=[mlp]"
    offloaded = f"{MEGATRON}.optimizer.offload_optimizer_states=true"
    offloaded += f" {MEGATRON}.optimizer.offload_optimizer_states_chunk_mib=1024.0"
    assert search.judges.short_bytes(plan.account.with_keys(f"{stages} {offloaded}"))
    account = plan.account.with_keys(f"{stages} {recomputed} {offloaded}")
    assert not search.judges.short_bytes(account)
    fastest = search.fastest()
    assert fastest is not None
    assert fastest.step_s <= 1.025 * search.judges.step_s(account)


def test_of_choices_that_are_about_as_fast_the_one_with_less_memory_is_taken(tmp_path):
    file = ROOT / "benchmarks" / "large_model_8b_48gb.yaml"
    plan, rules = plan_run(file, [write_config(tmp_path, "Qwen3-8B")], Target(KNOWN["H200"], length=520))
    search = search_of(plan, rules)
    fastest = search.fastest()
    assert fastest is not None
    policy = fastest.account.cfg.policy
    whole = "policy.logprob_chunk_size=null"  # faster, and it fits
    sizes = {size: plan.account.with_keys(f"policy.train_micro_batch_size={size} {whole}") for size in (8, 16, 64)}
    seconds = {size: search.judges.step_s(account) for size, account in sizes.items()}
    assert seconds[64] < seconds[16] < 1.015 * seconds[64] < seconds[8]
    assert (policy.train_micro_batch_size, fastest.account.phases[0].pass_bytes) == (16, sizes[16].phases[0].pass_bytes)


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_sizes_that_are_auto_need_least_memory_of_those_that_are_about_as_fast_as_the_fastest(backend, tmp_path):
    file = ROOT / "benchmarks" / "grpo_gpu.yaml"
    plan_table.write_config(tmp_path, "0.6B")
    overrides = [f"policy.model_name={tmp_path}", "policy.max_total_sequence_length=1024"]
    overrides += plan_table.MEGATRON if backend == "megatron" else ()
    keys = ("policy.train_micro_batch_size", "policy.logprob_batch_size")
    chosen, rules = plan_run(file, [*overrides, *(f"{key}=auto" for key in keys)], Target(KNOWN["H200"]))
    policy, judges = chosen.account.cfg.policy, search_of(chosen, rules).judges
    sizes = policy.train_micro_batch_size, policy.logprob_batch_size

    def planned(*rows: int) -> tuple[float, int]:
        tried = chosen.account.with_keys(" ".join(map("{}={}".format, keys, rows)))
        assert not judges.short_bytes(tried)
        return judges.step_s(tried), sum(use.pass_bytes or 0 for use in tried.phases)

    grid = {rows: planned(*rows) for rows in itertools.product((8, 16, 32, 64), repeat=2)}
    limit_s = 1.015 * min(seconds for seconds, _ in grid.values())
    assert grid[sizes][0] < limit_s < grid[8, 8][0]
    for rows in ((sizes[0] // 2, sizes[1]), (sizes[0], sizes[1] // 2)):
        assert rows not in grid or grid[rows][0] > limit_s, rows
    # Without rates of the GPU they are those of a fast one.
    unknown, _ = plan_run(file, [*overrides, *(f"{key}=auto" for key in keys)], Target(Gpu("any", 140 * GIB)))
    policy = unknown.account.cfg.policy
    assert (policy.train_micro_batch_size, policy.logprob_batch_size) == sizes


def test_micro_batches_took_the_seconds_that_are_planned_and_whole_logits_the_memory(tmp_path):
    rows = plan_table.micro_batch_rows(tmp_path)
    misses = [row for row in rows if abs(int(row[4].removesuffix(" %"))) > 15]
    assert [row[:3] for row in misses] == [["megatron", "training", "16"]]  # a new width had just been compiled
    read = plan_table.read_result("micro_batches_dtensor_whole_logits")
    for name, found in read["rows"][0]["passes"].items():
        kind, size = name.removesuffix(" rows").split(", ")
        sizes = [f"policy.{key}={size}" for key in ("train_micro_batch_size", "logprob_batch_size")]
        overrides = [*sizes, f"policy.model_name={tmp_path}", "policy.max_total_sequence_length=1032"]
        overrides.append("policy.logprob_chunk_size=null")
        plan, _ = plan_run(ROOT / "benchmarks" / "grpo_gpu.yaml", overrides, Target(KNOWN["H200"]))
        phase = Phase.TRAINING if kind == "training" else Phase.LP_INFERENCE
        use = next(use for use in plan.phases if use.phase is phase)
        assert use.pass_bytes
        own_bytes = use.pass_bytes + use.state["params"] + use.state["grads"]  # the optimizer's were on the host
        assert own_bytes / GIB == pytest.approx(found["peak_gib"], rel=0.03), name


def test_the_fastest_is_never_slower_than_a_run_that_fits_without_the_margin_of_changes(tmp_path):
    file, override = ROOT / "examples" / "configs" / "grpo_math_1B.yaml", write_config(tmp_path, "Qwen3-8B")
    overrides = [
        override,
        f"{DTENSOR}.offload_optimizer_states=true",
        f"{DTENSOR}.offload_optimizer_states_chunk_mib=1024",
    ]
    roomy, _ = plan_run(file, overrides, Target(KNOWN["H200"]))
    gpu = replace(KNOWN["H200"], memory_bytes=int(1.01 * roomy.phases[0].total_bytes))  # of training
    plan, rules = plan_run(file, [*overrides, "policy.generation.vllm_cfg.gpu_memory_utilization=0.5"], Target(gpu))
    assert not plan.problems and plan.step_s
    search = search_of(plan, rules)
    assert search.given.fits
    fastest = search.fastest()
    assert fastest is not None
    assert fastest.step_s <= 1.015 * plan.step_s


def test_for_8_b_on_a_small_card_there_are_three_changes_that_fit(tmp_path):
    file, override = ROOT / "benchmarks" / "large_model_8b.yaml", write_config(tmp_path, "Qwen3-8B")
    target = Target(Gpu("24 GiB", int(23.9 * GIB)), usable_host_bytes(256))
    plan, rules = plan_run(file, [override], target)
    changes = search_of(plan, rules).cheapest()
    assert [has_adapters(trial.account.cfg.policy) for trial in changes] == [False, False, True]
    for trial in changes:
        tried, _ = plan_run(file, [override, *as_tried(plan, trial, file, [override]).overrides], target)
        assert not tried.problems


def test_states_that_are_updated_on_the_cpu_may_stream_instead(tmp_path):
    optimizer = "policy.megatron_cfg.optimizer"
    overrides = [write_config(tmp_path, "Qwen3-8B"), f"{optimizer}.optimizer_cpu_offload=true"]
    overrides += [f"{optimizer}.optimizer_offload_fraction=1.0", "policy.train_micro_batch_size=32"]
    file = ROOT / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
    plan, rules = plan_run(file, overrides, Target(KNOWN["H100"], usable_host_bytes(256)))
    assert plan.problems
    for trial in search_of(plan, rules).cheapest():
        optimizer_keys = trial.account.cfg.policy.backend.optimizer
        assert not (optimizer_keys.optimizer_cpu_offload and optimizer_keys.offload_optimizer_states)


# Small layers of families with soft-caps and windows, whose attention takes masks.
_WITH_MASKS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
_WITH_MASKS |= {"head_dim": 64, "vocab_size": 1024, "num_hidden_layers": 2, "sliding_window": 512}
_WITH_MASKS |= {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 64}


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "mistral"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_passes_with_masks_grow_with_the_square_of_the_rows(family, is_packed, tmp_path):
    windows = {"layer_types": None} if family == "mistral" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **_WITH_MASKS, **windows}))
    needs = []
    for tokens in (2048, 8192):
        overrides = [f"policy.model_name={tmp_path}", f"policy.max_total_sequence_length={tokens}"]
        overrides += [f"policy.sequence_packing.enabled={str(is_packed).lower()}", "policy.logprob_chunk_size=1024"]
        overrides += [f"policy.sequence_packing.train_mb_tokens={tokens}", f"{DTENSOR}.torch_compile=false"]
        overrides += [f"policy.sequence_packing.logprob_mb_tokens={tokens}"]
        plan, _ = plan_run(ROOT / "examples" / "configs" / "grpo_math_1B.yaml", overrides, Target(KNOWN["H200"]))
        needs.append({use.phase: use.pass_bytes for use in plan.phases})
    for phase in (Phase.TRAINING, Phase.LP_INFERENCE):
        assert needs[0][phase] and needs[1][phase] > 5 * needs[0][phase]  # of four times the tokens


GEMMA2_2B = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
}


def test_scores_with_caps_cost_seconds_that_grow_with_packed_rows(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2_2B))
    overrides = [f"policy.model_name={tmp_path}", f"{DTENSOR}.torch_compile=false"]
    short, long = (
        plan_run(
            ROOT / "examples" / "configs" / "sft.yaml",
            [*overrides, f"policy.sequence_packing.train_mb_tokens={tokens}"],
            Target(KNOWN["H200"]),
        )[0]
        for tokens in (8192, 32768)
    )
    assert short.step_s and long.step_s
    assert long.step_s > 1.5 * short.step_s


def test_a_layout_is_found_that_pays_with_other_micro_batches_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **QWEN3_32B}))
    divided = [f"{DTENSOR}.tensor_parallel_size=8", f"{DTENSOR}.sequence_parallel=true"]
    overrides = [
        f"policy.model_name={tmp_path}",
        *("cluster.gpus_per_node=8", "policy.generation.vllm_cfg.tensor_parallel_size=4"),
        *(*divided, f"{DTENSOR}.torch_compile=false", f"{DTENSOR}.activation_checkpointing=true"),
        *("policy.max_total_sequence_length=16384", "policy.train_micro_batch_size=1"),
    ]
    target = Target(KNOWN["H200"], length=6000)
    plan, rules = plan_run(ROOT / "examples" / "configs" / "grpo_math_1B.yaml", overrides, target)
    search = search_of(plan, rules)
    fastest = search.fastest()
    assert fastest is not None
    parallel = ("tensor_parallel_size=1", "context_parallel_size=2", "sequence_parallel=false")
    sizes = "policy.train_micro_batch_size=2 policy.logprob_batch_size=32 policy.make_sequence_length_divisible_by=4"
    point = plan.account.with_keys(" ".join([*(f"{DTENSOR}.{key}" for key in parallel), sizes]))
    assert not search.judges.short_bytes(point) and search.judges.is_allowed(point)
    assert fastest.step_s <= 1.025 * search.judges.step_s(point)


@pytest.mark.parametrize(("shape", "is_known"), [("moonlight-12-layers", True), ("qwen3.5-4B", False)])
def test_megatron_s_passes_are_known_with_latent_attention_and_unknown_with_states(shape, is_known, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID_SHAPES[shape]))
    overrides = [f"policy.model_name={tmp_path}", "policy.megatron_cfg.apply_rope_fusion=false"]
    file = ROOT / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
    plan, rules = plan_run(file, overrides, Target(KNOWN["H200"]))
    assert plan.counts_passes == is_known
    assert is_known or search_of(plan, rules).fastest() is not None
    training = next(use for use in plan.phases if use.phase is Phase.TRAINING)
    assert bool(training.pass_bytes) == is_known


LONG_ROWS = [
    "policy.max_total_sequence_length=262144",
    "policy.generation.max_new_tokens=200000",
    "policy.train_micro_batch_size=1",
    "policy.logprob_chunk_size=1024",
    "cluster.gpus_per_node=8",
]


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_long_rows_are_divided_over_workers_in_two_ways(backend, tmp_path):
    file = {"dtensor": "grpo_math_1B.yaml", "megatron": "grpo_math_1B_megatron.yaml"}[backend]
    recomputed = f"policy.{backend}_cfg.activation_checkpointing=true"
    overrides = [write_config(tmp_path, "Qwen3-8B"), *LONG_ROWS, recomputed, f"{DTENSOR}.torch_compile=false"]
    plan, rules = plan_run(ROOT / "examples" / "configs" / file, overrides, Target(KNOWN["H100"]))
    by_rows, by_layers = (trial.account.cfg.policy.backend for trial in search_of(plan, rules).cheapest(2))
    assert (by_rows.model_parallel.context, by_rows.model_parallel.tensor) == (4, 1)
    assert (by_layers.model_parallel.context, by_layers.model_parallel.tensor) == (1, 4)
    assert by_layers.sequence_parallel


def test_short_rows_are_packed_for_speed(tmp_path):
    target, file = Target(KNOWN["H200"], length=100), ROOT / "benchmarks" / "large_model_8b.yaml"
    plan, rules = plan_run(file, [write_config(tmp_path, "Qwen3-8B")], target)
    fastest = search_of(plan, rules).fastest()
    assert fastest is not None
    assert fastest.account.cfg.policy.sequence_packing.enabled


def test_activations_that_megatron_offloads_cost_seconds_and_main_memory(tmp_path):
    file, model = ROOT / "examples" / "configs" / "grpo_math_1B_megatron.yaml", write_config(tmp_path, "Qwen3-8B")
    offload = "policy.megatron_cfg.fine_grained_activation_offloading=true"
    modules = "policy.megatron_cfg.offload_modules=[qkv_linear,core_attn,attn_proj]"
    kept, offloaded = (
        plan_run(file, [model, "policy.train_micro_batch_size=16", *overrides], Target(KNOWN["H200"]))[0]
        for overrides in ((), (offload, modules))
    )
    before, after = ({use.phase: use.pass_bytes or 0 for use in plan.phases} for plan in (kept, offloaded))
    freed = {phase: before[phase] - after[phase] for phase in before}
    assert freed.pop(Phase.TRAINING) > 10 * GIB and not any(freed.values())
    assert kept.step_s and offloaded.step_s
    assert kept.step_s < offloaded.step_s < 1.2 * kept.step_s
    moved_gib = (offloaded.owners["policy"] - kept.owners["policy"]) / GIB
    assert 10 < moved_gib < 40


def test_of_a_teacher_whose_layers_stream_two_are_on_the_gpu(tmp_path):
    override = write_config(tmp_path, "Qwen3-8B")
    file = ROOT / "examples" / "configs" / "distillation_math.yaml"
    teacher = f"teacher.model_name={tmp_path}"
    target = Target(Gpu("some GPU", 64 * GIB), usable_host_bytes(512))
    sizes = {}
    for streams in ("false", "true"):
        overrides = [override, teacher, f"teacher.stream_layers={streams}", CPU_OFFLOAD]
        plan, _ = plan_run(file, overrides, target)
        sizes[streams] = plan.gib_by_owner()["TEACHER_INFERENCE"]["teacher"]
        read_gb = plan.to_json()["stages"]["teacher"]["gb_in"]
    whole_gib = 2 * PUBLISHED["Qwen3-8B"][1][0] / GIB
    rest_gib = 2 * 2 * 151936 * 4096 / GIB
    assert sizes["false"] == pytest.approx(whole_gib)
    assert sizes["true"] == pytest.approx(rest_gib + (whole_gib - rest_gib) * 2 / 36)
    assert read_gb > (whole_gib - rest_gib) * GIB / 1e9 * 2  # once for each micro-batch


def test_a_gpu_is_known_by_name_or_by_a_file_and_others_are_told_so(tmp_path):
    assert find_gpu("NVIDIA H100 80GB HBM3") == find_gpu("h100") == KNOWN["H100"]
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(asdict(calibrate(torch.device("cpu"), 0.0))))
    measured = find_gpu(str(file))
    assert measured.name == "CPU" and measured.rates is not None and "--calibrate" in measured.rates.source
    file.write_text(json.dumps(asdict(KNOWN["H200"])))
    assert find_gpu(str(file)) == KNOWN["H200"]
    file.write_text(json.dumps({**asdict(KNOWN["H200"]), "memory_bytes": -1}))
    for name, message in (("H2", "known here (H100, H200)"), (str(file), "not above 0"), ("no.json", "No such file")):
        with pytest.raises(ConfigError, match=re.escape(message)):
            find_gpu(name)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--gpu-gib=0", "0 is no number above 0; give one"),
        ("--host-gib=-1", "-1 is no number above 0; give one"),
        ("--host-gib=270000000000", "more than any machine has; give GiB, not bytes"),
        ("--gpu-gib=nan", "nan is no number above 0"),
        ("--gpus=0", "0 is no number above 0"),
        ("--gpus=x", "x is no number; give one above 0"),
        ("--gpus=1.5", "1.5 is no whole number"),
        ("--parameters=8x", "8x is no number"),
        ("--parameters=0B", "0 is no number above 0"),
        ("--parameters=8", "8 is 8 parameters; for billions, write 8B or 8e9"),
        ("--parameters=1e300", "1e300 is more than any model has"),
        ("--no-such-option", "unrecognized arguments: --no-such-option; --help lists the options"),
        ("--gpu=H200", "--gpu and --gpu-gib are both given"),
        ("plan.json", "plan.json is no override; write KEY=VALUE, and for a file of JSON: --json > plan.json"),
        ("--html=.", "is a folder; give the name of a file"),
        ("--html=no/such/plan.html", "the folder no/such does not exist; give the name of a file"),
        ("--calibrate=rates.txt", "--gpu takes names that end with .json"),
        ("--calibrate=no/such/rates.json", "the folder no/such does not exist"),
        ("--calibrate=rates.json", "torch finds none; run it where there is one"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(option, message):
    if option == "--calibrate=rates.json" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU to calibrate")
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(["--gpu-gib=80", "--host-gib=100", "--parameters=8B", "--config=c.yaml", option])
