from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hub_cache import fill_hub_cache
from safetensors.torch import save_file

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.memory import account, gpus, host_plan, machine
from nemo_offload_rl.memory.limits import HostLimit
from nemo_offload_rl.policy import communicators
from nemo_offload_rl.runs.loading import load_dpo_config, load_grpo_config, load_sft_config
from nemo_offload_rl.utils.flops import ModelSizes
from nemo_offload_rl.utils.gpu_memory import GpuUse

GIB = 2**30
QWEN2 = {"model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 1024}
QWEN3_14B = 14_768_307_200  # parameters
ONE_GPU = ["policy.model_name=a-folder", "cluster.gpus_per_node=1"]
HOST_HELD = [f"policy.dtensor_cfg.{key}=true" for key in ("cpu_offload", "activation_checkpointing")]
HOST_BYTES = 1000 * GIB
CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
EXEMPLAR = CONFIGS / "grpo_math_1B.yaml"
PRECOMPUTED = "dpo.precompute_reference_logprobs=true"
SUPERVISED = {"sft.yaml": load_sft_config, "dpo.yaml": load_dpo_config}


@pytest.fixture
def load(monkeypatch):
    """Load the exemplar, or a file of SFT or DPO, for a model and GPUs of given sizes."""

    def loaded(
        overrides: list[str],
        *,
        parameters: int,
        gpu_gib: float | None,
        name: str | None = None,
        path: Path = EXEMPLAR,
        in_experts: int = 0,
    ):
        found = {} if gpu_gib is None else {"u": GpuUse("a GPU", int(gpu_gib * GIB), 0)}
        monkeypatch.setattr(gpus, "read_gpus", lambda: found)
        monkeypatch.setattr(machine, "host_limits", lambda _: [HostLimit("host", "MemAvailable", HOST_BYTES)])
        monkeypatch.setattr(machine, "resident_bytes", lambda: 0)
        monkeypatch.setattr(account, "read_model_sizes", lambda name: ModelSizes(parameters, 0, 1, 1, in_experts))
        return load_grpo_config(path, overrides) if name is None else SUPERVISED[name](CONFIGS / name, overrides)

    return loaded


def counted_here(config) -> account.Account:
    return account.Account(config, machine.Machine.here(config.cluster))


def host_bytes(state_gib: float, num_workers: int = 1, *, has_engine: bool = True) -> int:
    """Of a host that has so much for the state of all workers beside their processes, the engines' and the driver's."""
    engine_bytes = host_plan.ENGINE_PROCESS_BYTES["cuda"] if has_engine else 0
    process_bytes = host_plan.DTENSOR_PROCESS_BYTES["compiled"] + engine_bytes
    return int(state_gib * GIB) + num_workers * process_bytes + host_plan.DRIVER_BYTES


def test_an_engine_that_leaves_too_little_is_refused_with_the_share_that_works(load):
    key = "policy.generation.vllm_cfg.gpu_memory_utilization"
    load([f"{key}=0.9"], parameters=GIB, gpu_gib=80)
    with pytest.raises(
        ConfigError, match=r"needs 80.4 GiB .*\(contexts 2.0, the awake engine 78.4\), .* lower .*utilization to 0.97"
    ):
        load([f"{key}=0.98"], parameters=GIB, gpu_gib=80)
    load([f"{key}=0.97"], parameters=GIB, gpu_gib=80)
    kept = "policy.residency_overrides={optimizer: device}"
    with pytest.raises(ConfigError, match=r"\(optimizer 8.0, contexts 2.0, the awake .* lower .*utilization to 0.87"):
        load([f"{key}=0.9", kept], parameters=GIB, gpu_gib=80)


def test_weights_in_8_bits_take_half_but_for_embedding_output_and_kept_layers(load, tmp_path):
    sizes = {"vocab_size": 65536, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | sizes))
    in_matrices, engine = 2 * 65536 * 1024, "policy.generation.vllm_cfg"
    for kept, share in ((0, 1.0), (1, 0.75), (4, 0.0)):
        keys = [f"{engine}.precision=fp8", f"{engine}.num_first_layers_in_bf16={kept}"]
        overrides = [f"policy.model_name={tmp_path}", "cluster.gpus_per_node=1"]
        in_layers = GIB - in_matrices
        in_8_bits = int(share * in_layers)
        wanted = 2 * (in_matrices + in_layers - in_8_bits) + in_8_bits * (1 + 4 / 128**2)
        config = load([*overrides, *keys], parameters=GIB, gpu_gib=80)
        assert counted_here(config).engine_weight_bytes == pytest.approx(wanted, abs=2)
        assert counted_here(load(overrides, parameters=GIB, gpu_gib=80)).engine_weight_bytes == 2 * GIB


def test_training_state_larger_than_the_gpu_is_refused_and_sharding_helps(load):
    with pytest.raises(ConfigError, match=r"needs 83.5 GiB .*params 20.0, grads 20.0, optimizer 40.0, contexts 3.5"):
        load([], parameters=5 * GIB, gpu_gib=80)
    load(["cluster.gpus_per_node=2"], parameters=5 * GIB, gpu_gib=80)


MEGATRON = [
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.optimizer=null",
    "policy.scheduler=null",
]
OPTIMIZER = "policy.megatron_cfg.optimizer"


def test_megatrons_training_state_is_counted_as_its_optimizer_keeps_it(load):
    load(MEGATRON, parameters=5 * GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"needs 88.0 GiB .*params 12.0, grads 12.0, optimizer 60.0, contexts 4.0"):
        load(MEGATRON, parameters=6 * GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"optimizer 60.0.* or policy.megatron_cfg.optimizer.offload_optimizer_st"):
        load(MEGATRON, parameters=6 * GIB, gpu_gib=80)
    whole_masters = [f"{OPTIMIZER}.use_precision_aware_optimizer=false"]
    with pytest.raises(ConfigError, match=r"needs 84.0 GiB .*params 10.0, grads 10.0, optimizer 60.0, contexts 4.0"):
        load([*MEGATRON, *whole_masters], parameters=5 * GIB, gpu_gib=80)


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.gpus_per_node=2"],
        ["cluster.gpus_per_node=2", "policy.megatron_cfg.tensor_model_parallel_size=2"],
        [f"{OPTIMIZER}.optimizer_cpu_offload=true", f"{OPTIMIZER}.optimizer_offload_fraction=1.0"],
        [f"{OPTIMIZER}.offload_optimizer_states=true", f"{OPTIMIZER}.offload_optimizer_states_chunk_mib=1024"],
        ["policy.megatron_cfg.peft.enabled=true"],
    ],
    ids=["data parallel", "tensor parallel", "optimizer on the host", "in chunks", "adapters"],
)
def test_what_makes_megatrons_state_smaller_is_not_refused(load, overrides):
    load([*MEGATRON, *overrides], parameters=6 * GIB, gpu_gib=80)


def test_gradients_and_parameters_count_where_the_optimizer_comes_in_parts(load):
    in_parts = [f"{OPTIMIZER}.offload_optimizer_states=true", f"{OPTIMIZER}.offload_optimizer_states_chunk_mib=1024"]
    fp32 = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=true"
    load([*MEGATRON, *in_parts], parameters=18 * GIB, gpu_gib=80)
    with pytest.raises(
        ConfigError, match=r"needs 82\.0 .*params 26\.0, grads 52\.0, contexts 4\.0\), .*_in_fp32=false"
    ):
        load([*MEGATRON, *in_parts, fp32], parameters=13 * GIB, gpu_gib=80)
    staying = f"{OPTIMIZER}.offload_optimizer_states_fraction=0.75"  # and a quarter stays
    with pytest.raises(ConfigError, match=r"params 26\.0, grads 26\.0, optimizer 32\.5, contexts 4\.0\)"):
        load([*MEGATRON, *in_parts, staying], parameters=13 * GIB, gpu_gib=80)
    with pytest.raises(
        ConfigError, match=r"needs 84\.0 .*params 40\.0, grads 40\.0, contexts 4\.0\), .*use more GPUs$"
    ):
        load([*MEGATRON, *in_parts], parameters=20 * GIB, gpu_gib=80)


@pytest.mark.parametrize(("name", "gpu_gib", "grads_gib"), [("", 139.8, 55.0), ("_80gb", 79.6, 27.5)])
def test_the_benchmark_of_14_b_parameters_fits_its_gpu_and_128_gib_of_main_memory(load, name, gpu_gib, grads_gib):
    path = Path(__file__).parents[3] / "benchmarks" / f"large_model_14b{name}.yaml"
    loaded = partial(load, parameters=QWEN3_14B, gpu_gib=gpu_gib, path=path)
    config = loaded(ONE_GPU)
    counted = counted_here(config)
    assert counted.groups["grads"] / GIB == pytest.approx(grads_gib, abs=0.1)
    need = counted.need
    bytes_a_parameter = {row: size / QWEN3_14B for row, size in need.resolve().arena.items()}
    assert bytes_a_parameter == {"optimizer/part": 6, "reference": 2}
    assert sum(host_plan.host_bytes_by_owner(need, "cuda", 1).values()) < 118 * GIB
    share = "policy.generation.vllm_cfg.gpu_memory_utilization"
    largest = int((gpu_gib - 30.01) / gpu_gib * 100) / 100
    loaded([*ONE_GPU, f"{share}={largest}"])
    with pytest.raises(
        ConfigError, match=rf"\(params 27.5, contexts 2.5, the awake engine .* lower .*utilization to {largest}"
    ):
        loaded([*ONE_GPU, f"{share}={largest + 0.01}"])
    with pytest.raises(ConfigError, match=r"use .*residency_overrides.params=device"):
        loaded([*ONE_GPU, "policy.residency_overrides.params=host"])


@pytest.mark.parametrize(("changes", "most"), [([], 8), (["loss_fn.reference_policy_kl_penalty=0"], 6)])
def test_14_b_parameters_whose_states_stay_in_part_take_8_bytes_each_of_all_processes_with_a_reference(
    load, changes, most
):
    path = Path(__file__).parents[3] / "benchmarks" / "large_model_14b.yaml"
    kept = [f"{OPTIMIZER}.offload_optimizer_states_fraction=0.85", "++policy.residency_overrides.optimizer=device"]
    config = load([*ONE_GPU, *kept, *changes], parameters=QWEN3_14B, gpu_gib=139.8, path=path)
    need = counted_here(config).need
    assert most - 0.5 < sum(host_plan.host_bytes_by_owner(need, "cuda", 1).values()) / QWEN3_14B < most


def test_each_rank_of_a_mixture_has_its_experts_and_all_of_the_rest(load):
    path, in_experts = Path(__file__).parents[3] / "benchmarks" / "large_model_moe_30b.yaml", 48 * 128 * 3 * 2048 * 768
    config = load([], parameters=30_532_122_624, gpu_gib=139.8, path=path, in_experts=in_experts)
    groups = counted_here(config).groups
    assert groups["params"] / GIB == pytest.approx(29.87, abs=0.005)  # as two workers on GPUs said
    assert groups["optimizer/part"] == 6 * 30_532_122_624 // 2


PARTS = {"params/part": 4, "grads/part": 4, "optimizer/part": 4}


@pytest.mark.parametrize(
    ("name", "parameters", "on_host"),
    [
        ("large_model_8b", 8_190_735_360, {"optimizer/part": 4, "params": 4, "reference": 2}),
        ("large_model_8b_48gb", 8_190_735_360, {**PARTS, "reference": 2}),
        ("large_model_8b_24gb", 8_190_735_360, {**PARTS, "reference": 2}),
        ("megatrain_7b", 7_615_494_656, {**PARTS, "reference": 2}),
        ("megatrain_10b", 9_927_253_248, PARTS),
    ],
)
def test_benchmarks_of_large_models_on_dtensor_fit_128_gib_of_main_memory(load, name, parameters, on_host):
    path = Path(__file__).parents[3] / "benchmarks" / f"{name}.yaml"
    config = load(ONE_GPU, parameters=parameters, gpu_gib=139.8, path=path)
    need = counted_here(config).need
    assert {row: size / parameters for row, size in need.resolve().arena.items() if size} == on_host
    assert sum(host_plan.host_bytes_by_owner(need, "cuda", 1).values()) < 119 * GIB


def test_what_megatron_keeps_beside_the_engine_counts(load):
    kept = [*MEGATRON, "policy.residency_overrides={optimizer: device}"]
    with pytest.raises(ConfigError, match=r"\(optimizer 10.0, contexts 2.5, the awake .* lower .*utilization to 0.84"):
        load([*kept, "policy.generation.vllm_cfg.gpu_memory_utilization=0.9"], parameters=GIB, gpu_gib=80)


def test_an_engine_that_never_sleeps_counts_beside_training(load):
    awake = "policy.generation.vllm_cfg.enable_sleep_mode=false"
    load([], parameters=2 * GIB, gpu_gib=80)
    with pytest.raises(
        ConfigError, match=r"needs 82\.0 GiB .*contexts 2\.0, the awake engine 48\.0\), .*sleep_mode=true, or"
    ):
        load([awake], parameters=2 * GIB, gpu_gib=80)
    load([awake, "policy.generation.vllm_cfg.kv_cache_memory_gib=40"], parameters=2 * GIB, gpu_gib=80)


def test_workers_and_engines_over_several_gpus_leave_more_of_each_with_contexts_and_communicators(load):
    def message(*overrides: str) -> str:
        with pytest.raises(ConfigError) as told:
            load(["cluster.gpus_per_node=2", *overrides], parameters=10 * GIB, gpu_gib=80)
        return str(told.value)

    assert "contexts 4.5)" in message()
    two = "policy.generation.vllm_cfg.tensor_parallel_size=2"
    assert "contexts 7.5)" in message(two)
    assert "contexts 8.5)" in message(two, *MEGATRON)
    share = "policy.generation.vllm_cfg.gpu_memory_utilization"
    with pytest.raises(ConfigError, match=r"\(contexts 3.0, the awake .*; lower .*utilization to 0.96$"):
        load(["cluster.gpus_per_node=2", f"{share}=0.97"], parameters=GIB, gpu_gib=80)


def test_nothing_is_said_where_the_gpu_or_the_model_is_unknown(load, monkeypatch):
    load([], parameters=50 * GIB, gpu_gib=None)
    monkeypatch.setattr(gpus, "read_gpus", lambda: {"u": GpuUse("a GPU", GIB, 0)})
    monkeypatch.setattr(account, "read_model_sizes", lambda name: None)
    load_grpo_config(EXEMPLAR, [])


def test_adapters_and_other_optimizers_need_less(load):
    load(["policy.dtensor_cfg.lora_cfg.enabled=true"], parameters=12 * GIB, gpu_gib=80)
    sgd = ["policy.optimizer.name=torch.optim.SGD", "~policy.optimizer.kwargs.betas", "~policy.optimizer.kwargs.eps"]
    load(sgd, parameters=8 * GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"needs 131.5 GiB"):
        load([], parameters=8 * GIB, gpu_gib=80)


@pytest.mark.parametrize("name", SUPERVISED)
def test_sft_and_dpo_are_refused_alike_but_no_engine_rests_beside_them(load, name):
    one = ["cluster.gpus_per_node=1"]
    load(one, parameters=5 * GIB, gpu_gib=82, name=name)  # where an engine's 1.5 GiB are refused
    with pytest.raises(
        ConfigError, match=r"needs 82\.0 GiB .*optimizer 40\.0, contexts 2\.0\), .* has 81\.0; use more GPUs, or"
    ):
        load(one, parameters=5 * GIB, gpu_gib=81, name=name)
    load(["cluster.gpus_per_node=2"], parameters=5 * GIB, gpu_gib=81, name=name)


def test_a_frozen_base_that_does_not_fit_is_named_and_no_optimizer_is_blamed(load, monkeypatch):
    frozen = ["policy.dtensor_cfg.lora_cfg.enabled=true"]
    load([*frozen, "cluster.gpus_per_node=1"], parameters=38 * GIB, gpu_gib=80, name="sft.yaml")
    with pytest.raises(
        ConfigError, match=r"needs 86\.0 GiB .*\(frozen params 84\.0, contexts .* 80\.0; use more GPUs$"
    ):
        load([*frozen, "cluster.gpus_per_node=1"], parameters=42 * GIB, gpu_gib=80, name="sft.yaml")
    # Of float32 files, nothing is rounded.
    monkeypatch.setattr(account, "local_model_config", lambda cfg: {"dtype": "float32"})
    with pytest.raises(ConfigError, match=r"needs 86\.0 GiB .*\(frozen params 84\.0"):
        load([*frozen, "cluster.gpus_per_node=1"], parameters=21 * GIB, gpu_gib=80, name="sft.yaml")


def test_a_host_that_cannot_hold_what_its_workers_offload_is_refused_before_anything_starts(load, monkeypatch):
    monkeypatch.setitem(globals(), "HOST_BYTES", host_bytes(17))
    one = ["cluster.gpus_per_node=1"]
    load(one, parameters=GIB, gpu_gib=80)  # params 4, optimizer 8, reference 2 in bfloat16
    in_fp32 = ["policy.precision=float32"]
    with pytest.raises(
        ConfigError, match=r"needs 32\.50 GiB .*process 2.75, engine 1.75.*leaves 21\.50 GiB; use .* needs 16\.50"
    ):
        load(one, parameters=2 * GIB, gpu_gib=80)
    # Where the engine leaves the GPU no room for the optimizer, the advice is another, and works.
    larger = [*one, "policy.generation.vllm_cfg.gpu_memory_utilization=0.8"]
    with pytest.raises(ConfigError, match=r"use \+\+policy\.residency_overrides\.params=device loss_fn\.\S+=0, which"):
        load(larger, parameters=2 * GIB, gpu_gib=80)
    stays = ["++policy.residency_overrides.params=device", "loss_fn.reference_policy_kl_penalty=0"]
    load([*larger, *stays], parameters=2 * GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"needs 36\.50 GiB .*reference 8\.00"):
        load([*one, *in_fp32], parameters=2 * GIB, gpu_gib=80)
    monkeypatch.setitem(globals(), "HOST_BYTES", host_bytes(17, 2))
    two = ["cluster.gpus_per_node=2", "policy.dtensor_cfg.tensor_parallel_size=1"]
    load(two, parameters=GIB, gpu_gib=80)  # of each worker half as much
    # Megatron's workers each have all parameters, 2 + 2 for the reference, and half of the optimizer's 12.
    load([*MEGATRON, *two[:1]], parameters=int(0.8 * GIB), gpu_gib=80)
    with pytest.raises(ConfigError, match=r"leaves 25\.75 GiB for 2 workers that need 27\.00; use"):
        load([*MEGATRON, *two[:1]], parameters=GIB, gpu_gib=80)
    load([*one, "policy.host_memory_budget_gib=40"], parameters=2 * GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"policy\.host_memory_budget_gib leaves 13\.00 GiB; use "):
        load([*one, "policy.host_memory_budget_gib=13"], parameters=GIB, gpu_gib=80)


def test_on_a_cpu_the_engine_s_weights_and_cache_are_counted_before_it_starts(load, monkeypatch):
    monkeypatch.setitem(globals(), "HOST_BYTES", 20 * GIB)
    cpu = partial(load, parameters=GIB, gpu_gib=None, path=CONFIGS / "grpo_arithmetic_cpu.yaml")
    with pytest.raises(
        ConfigError, match=r"process 0\.50, engine 6\.75, state in use 16\.00\), but MemAvailable leaves 19\.00"
    ):
        cpu(["policy.generation.vllm_cfg.kv_cache_memory_gib=2", "policy.model_name=a-folder"])
    cache, small = "policy.generation.vllm_cfg.kv_cache_memory_gib", GIB // 4
    with pytest.raises(ConfigError, match=rf"; use {cache}=8\.75, which needs 19\.00 GiB, or raise the limit"):
        cpu([f"{cache}=20", "policy.model_name=a-folder"], parameters=small)
    cpu([f"{cache}=8.75", "policy.model_name=a-folder"], parameters=small)


def test_a_hub_s_model_whose_weights_are_in_the_cache_has_a_size(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN2, "num_attention_heads": 8}))
    save_file({"weight": torch.zeros(5, 6)}, folder / "model.safetensors")
    fill_hub_cache(monkeypatch, tmp_path / "cache", "some/model", folder)
    sizes = [account.model_sizes(name) for name in ("some/model", str(folder), "some/other")]
    assert [found and found.num_parameters for found in sizes] == [30, 30, None]


def test_activations_that_leave_are_counted_with_the_state_so_that_what_is_advised_fits(load, monkeypatch):
    model = {**QWEN2, "hidden_size": 1 << 24}
    monkeypatch.setattr(account, "local_model_config", lambda cfg: model)
    monkeypatch.setitem(globals(), "HOST_BYTES", host_bytes(48))
    leave = ["cluster.gpus_per_node=1"]
    leave += [f"policy.dtensor_cfg.{key}=true" for key in ("activation_offload", "activation_checkpointing")]
    limit = "policy.dtensor_cfg.activation_offload_host_limit_gib"
    with pytest.raises(
        ConfigError, match=rf"offloaded activations 64\.00, .*\), but .*; lower {limit} to 34\.0, or raise"
    ):
        load(leave, parameters=GIB, gpu_gib=80)  # of the exemplar's state 14
    load([*leave, f"{limit}=34"], parameters=GIB, gpu_gib=80)
    model["hidden_size"] = 1024
    load(leave, parameters=GIB, gpu_gib=80)


def test_state_that_passes_through_the_gpu_needs_sixteen_bytes_a_parameter_of_the_host(load, monkeypatch):
    monkeypatch.setitem(globals(), "HOST_BYTES", host_bytes(321, has_engine=False))
    on_host = ["cluster.gpus_per_node=1", *HOST_HELD]
    load(on_host, parameters=20 * GIB, gpu_gib=80, name="sft.yaml")
    with pytest.raises(ConfigError, match=r"needs 339\.35 GiB .*\(params/part 84\.00, grads/part 84\.00, "):
        load(on_host, parameters=21 * GIB, gpu_gib=80, name="sft.yaml")
    with pytest.raises(ConfigError, match=r"needs 365\.10 GiB .*reference 40\.00, process"):
        load(on_host, parameters=20 * GIB, gpu_gib=80)


def test_a_limit_of_gpu_memory_bounds_the_policy_s_state_alone_and_is_refused_where_it_means_nothing(load):
    key = "policy.gpu_memory_limit_gib"
    load([f"{key}=64"], parameters=4 * GIB, gpu_gib=80)
    with pytest.raises(
        ConfigError, match=r"needs 64\.0 GiB .*params 16\.0, grads 16\.0, optimizer 32\.0\), .* has 63\.0 within"
    ):
        load([f"{key}=63"], parameters=4 * GIB, gpu_gib=80)
    load([f"{key}=8", *HOST_HELD], parameters=20 * GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"gpu_memory_limit_gib is 81.0, but the GPU has 80.0 GiB; set it to less"):
        load([f"{key}=81"], parameters=GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"is 8.0, but the policy trains on a CPU"):
        load([f"{key}=8", "cluster.gpus_per_node=0"], parameters=GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"gpu_memory_limit_gib"):
        load([f"{key}=0"], parameters=GIB, gpu_gib=80)


def test_where_workers_run_elsewhere_the_driver_s_host_says_nothing(load, monkeypatch):
    monkeypatch.setitem(globals(), "HOST_BYTES", GIB)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    load(["cluster.gpus_per_node=1"], parameters=GIB, gpu_gib=80)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConfigError, match=r"MemAvailable leaves 0\.00 GiB"):
        load(["cluster.gpus_per_node=1"], parameters=GIB, gpu_gib=80)


def test_without_anything_that_leaves_the_gpu_no_host_memory_is_asked_for(load, monkeypatch):
    monkeypatch.setitem(globals(), "HOST_BYTES", 0)
    load(["cluster.gpus_per_node=1"], parameters=GIB, gpu_gib=80, name="sft.yaml")
    monkeypatch.setitem(globals(), "HOST_BYTES", host_bytes(0, has_engine=False))
    with pytest.raises(ConfigError, match=r"use dpo\.precompute_reference_logprobs=true, which needs 2\.75"):
        load(["cluster.gpus_per_node=1"], parameters=GIB, gpu_gib=80, name="dpo.yaml")


def test_a_refit_without_room_for_the_weights_of_both_is_refused_also_with_adapters(load):
    frozen = ["policy.dtensor_cfg.lora_cfg.enabled=true"]
    with pytest.raises(
        ConfigError,
        match=r"^phase REFIT needs 85\.5 GiB on each GPU \(frozen params 40\.0, refit buffers 2\.0, contexts 3\.5, "
        r"the engine's weights 40\.0\), but it has 80\.0; use more GPUs, with .*vllm_cfg.tensor_parallel_size .*"
        r", or \+\+policy.residency_overrides.base=host$",
    ):
        load(frozen, parameters=20 * GIB, gpu_gib=80)
    on_host = ["++policy.residency_overrides.base=host"]
    load([*frozen, *on_host], parameters=20 * GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"base is host, but no adapters are trained"):
        load(on_host, parameters=GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"base is host, but Megatron's refits read the frozen model on the GPU"):
        load([*MEGATRON, "policy.megatron_cfg.peft.enabled=true", *on_host], parameters=GIB, gpu_gib=80)
    load([*frozen, *OWN_GPUS], parameters=20 * GIB, gpu_gib=80)
    load([*frozen, "cluster.gpus_per_node=2"], parameters=20 * GIB, gpu_gib=80)


def test_an_engine_whose_share_is_less_than_its_weights_is_refused_and_so_is_a_cache_without_room(load):
    small = ["policy.generation.vllm_cfg.gpu_memory_utilization=0.2", "policy.dtensor_cfg.lora_cfg.enabled=true"]
    with pytest.raises(
        ConfigError, match=r"^the engine needs 20\.0 GiB of each GPU \(weights 20\.0\), but its share is 16\.0"
    ):
        load(small, parameters=10 * GIB, gpu_gib=80)
    cache = "policy.generation.vllm_cfg.kv_cache_memory_gib"
    load([*small, f"{cache}=40"], parameters=10 * GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"^phase GENERATION needs 92\.0 GiB .*; lower .*kv_cache_memory_gib"):
        load([*small, f"{cache}=70"], parameters=10 * GIB, gpu_gib=80)


@pytest.mark.parametrize("name", [None, "sft.yaml"])
def test_the_part_of_the_embedding_fits_the_gpu_wherever_state_comes_in_parts(load, monkeypatch, name):
    monkeypatch.setattr(account, "local_model_config", lambda cfg: {"vocab_size": 1 << 18, "hidden_size": 1 << 12})
    loaded = partial(load, parameters=4 * GIB, gpu_gib=20, name=name)
    passing = ["cluster.gpus_per_node=1", *HOST_HELD]
    share = [] if name else ["policy.generation.vllm_cfg.gpu_memory_utilization=0.5"]
    loaded([*passing, *share])  # 16 GiB in its update
    key = "policy.gpu_memory_limit_gib"
    with pytest.raises(
        ConfigError,
        match=r"^the embedding of policy.model_name, the largest part .* needs 16\.0 GiB .*\(params 4\.0, grads 4\.0, "
        r"optimizer 8\.0\), .* has 15\.9 within policy.gpu_memory_limit_gib; raise that limit$",
    ):
        loaded([*passing, *share, f"{key}=15.9"])
    with pytest.raises(ConfigError, match=r"largest part .* has 17\.0; use a GPU with more memory$"):
        loaded([*passing, *share], gpu_gib=17)
    in_parts = [f"policy.dtensor_cfg.offload_optimizer_states{end}" for end in ("=true", "_chunk_mib=256")]
    two = ["cluster.gpus_per_node=1", *in_parts]
    # 32 of parameters and gradients, and 8 of the embedding's states.
    loaded(two, gpu_gib=46)
    needed = r"\(params 16\.0, grads 16\.0, optimizer 8\.0, contexts .*; use more GPUs$"
    with pytest.raises(ConfigError, match=needed):
        loaded(two, gpu_gib=41)


def test_state_that_passes_through_the_gpu_stays_nowhere_else(load):
    on_host = partial(load, parameters=GIB, gpu_gib=80)
    passing = [*ONE_GPU, *HOST_HELD]
    on_host(passing)
    with pytest.raises(ConfigError, match=r"names params and optimizer, but all state .* residency_overrides to \{\}"):
        on_host([*passing, "policy.residency_overrides={params: device, optimizer: host}"])


SUSPENDS = "policy.suspend_nccl_comms=true"
OWN_GPUS = [
    "cluster.gpus_per_node=2",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources={gpus_per_node: 1, num_nodes: 1}",
]


def test_communicators_are_suspended_for_an_engine_on_the_same_gpus_alone(load, monkeypatch):
    monkeypatch.setattr(communicators, "loaded_nccl", lambda: (2, 29, 7))
    loaded = partial(load, parameters=GIB, gpu_gib=80)
    assert loaded([SUSPENDS, "cluster.gpus_per_node=2"]).worker.suspend_nccl_comms
    loaded([SUSPENDS, *ONE_GPU])
    for overrides in (OWN_GPUS, [*ONE_GPU, "policy.generation.vllm_cfg.enable_sleep_mode=false"]):
        loaded(overrides)
        with pytest.raises(ConfigError, match=r"suspend_nccl_comms is true, but no engine on the same GPUs sleeps"):
            loaded([SUSPENDS, *overrides])
    with pytest.raises(ConfigError, match=r"workers on a CPU have no NCCL communicators; set .*=false"):
        load_grpo_config("tests/unit/config/cpu.yaml", [SUSPENDS])
    for name in SUPERVISED:
        with pytest.raises(ConfigError, match="suspend_nccl_comms"):
            loaded([SUSPENDS, *ONE_GPU], name=name)


def test_an_older_nccl_is_refused_before_ray_starts_where_the_workers_have_the_same(load, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(communicators, "loaded_nccl", lambda: (2, 28, 9))
    loaded = partial(load, parameters=GIB, gpu_gib=80)
    with pytest.raises(ConfigError, match=r"needs NCCL 2.29.7 or later, and NCCL 2.28.9 is loaded; .*LD_PRELOAD"):
        loaded([SUSPENDS, *ONE_GPU])
    loaded([SUSPENDS, *ONE_GPU, "cluster.num_nodes=2"])
    preloaded = [*MEGATRON, "policy.megatron_cfg.env_vars={LD_PRELOAD: /opt/nccl/libnccl.so.2}"]
    loaded([SUSPENDS, *ONE_GPU, *preloaded])
    monkeypatch.setattr(communicators, "loaded_nccl", lambda: (2, 29, 7))
    with pytest.raises(ConfigError, match=r"with NCCL_CUMEM_ENABLE=0 NCCL cannot release its memory; unset"):
        loaded([SUSPENDS, *ONE_GPU, *MEGATRON, "policy.megatron_cfg.env_vars={NCCL_CUMEM_ENABLE: '0'}"])
