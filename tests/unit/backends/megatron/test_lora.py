"""Adapters of the Megatron backend; what both backends promise is in ../../test_lora.py. CPU."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_close
from lora_cases import ALPHA, BFLOAT16, DIM, lora_settings, lora_worker, merged_by_peft, values_of
from model_families import save_family_folder
from policy_cases import NLL, assert_equal, hf_logprobs, make_batch, save_family
from resume_cases import train_steps, weights_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.hf.model_folder import local_config
from nemo_offload_rl.backends.megatron.supported import adapters_problem
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.memory.groups import adapter_elements

A, B = ".adapter.linear_in.weight", ".adapter.linear_out.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3-tied")
    save_family(path, "qwen3-tied")
    return path


def make_worker(folder, **changes):
    return lora_worker(folder, "megatron", **changes)


def parameters_of(worker):
    (chunk,) = worker._backend._chunks
    return dict(chunk.module.named_parameters())


def put_merged(worker, values):
    """Write W + scale * B @ A, computed in fp32, into a model without adapters."""
    with torch.no_grad():
        for name, parameter in parameters_of(worker).items():
            module = name.removesuffix(".weight")
            wrapped = f"{module}.to_wrap.weight"
            if wrapped not in values:
                parameter.copy_(values[name])
                continue
            product = values[module + B].float() @ values[module + A].float()
            parameter.copy_(values[wrapped].float() + ALPHA / DIM * product)


@pytest.mark.parametrize("changes", [{}, BFLOAT16], ids=["fp32", "bf16"])
def test_merged_weights_are_those_of_a_plain_merge_bit_by_bit_in_a_refit_and_an_export(folder, tmp_path, changes):
    with make_worker(folder, **changes) as worker:
        first, specs = values_of(worker), worker._backend.weight_specs()
        train_steps(worker, 1, 3)
        last, sent = values_of(worker), weights_of(worker)
        worker.export_hf(tmp_path / "hf")
    learned = {name for name in first if not torch.equal(first[name], last[name])}
    assert learned == {name for name in first if ".adapter." in name}
    with make_worker(folder, lora={"enabled": False}, **changes) as worker:
        before = weights_of(worker)
        put_merged(worker, last)
        assert_equal(sent, weights_of(worker))
    assert [spec.name for spec in specs] == list(sent)
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), sent)
    (dtype,) = {value.dtype for value in sent.values()}
    by_peft = merged_by_peft(folder, tmp_path / "hf/adapter", dtype)
    assert_equal({name: value.to(dtype) for name, value in by_peft.items()}, sent)
    assert sent.keys() == load_file(folder / "model.safetensors").keys()
    assert {name for name in sent if not torch.equal(sent[name], before[name])} == {n for n in sent if "_proj" in n}


def test_logprobs_are_those_of_the_merged_model_and_gradients_follow_from_its_own(folder, tmp_path):
    batch = make_batch()
    with make_worker(folder) as worker:
        train_steps(worker, 1, 2)
        values = values_of(worker)
        worker.export_hf(tmp_path / "hf")
        worker.prepare_for_training()
        loss, _ = worker.forward_backward(batch, NLL())
        trained = {name: parameter for name, parameter in parameters_of(worker).items() if parameter.requires_grad}
        gradients = {name: parameter.main_grad.clone() for name, parameter in trained.items()}
        worker.zero_grad()
        worker.prepare_for_lp_inference()
        logprobs = worker.get_logprobs(batch)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert_close(logprobs, hf_logprobs(merged, batch))
    with make_worker(folder, lora={"enabled": False}) as worker:
        put_merged(worker, values)
        worker.prepare_for_training()
        assert_close(worker.forward_backward(batch, NLL())[0], loss)
        for name, parameter in parameters_of(worker).items():
            module, scale = name.removesuffix(".weight"), ALPHA / DIM
            if module + A in values:
                of_a = scale * values[module + B].T @ parameter.main_grad
                of_b = scale * parameter.main_grad @ values[module + A].T
                assert_close(gradients.pop(module + A), of_a)
                assert_close(gradients.pop(module + B), of_b)
        worker.zero_grad()
    assert not gradients


def test_adapters_alone_have_gradients_and_optimizer_states_and_learn(folder):
    with make_worker(folder, lr=1e-2, **BFLOAT16) as worker:
        worker.prepare_for_training()
        losses = [worker.train(make_batch(), NLL()).loss[0] for _ in range(12)]
        num_trained = sum(value.numel() for name, value in values_of(worker).items() if ".adapter." in name)
        sizes = worker.residency.device_bytes()
    assert losses[-1] < 0.8 * losses[0]
    assert sizes["optimizer"] == 12 * num_trained
    assert sizes["grads"] == 4 * num_trained
    assert sizes["params"] == 2 * num_trained


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        {"recompute_granularity": "selective", "recompute_modules": None},
    ],
    ids=["full", "mlp", "core_attn"],
)
def test_recomputed_activations_give_every_adapter_its_gradient(folder, recompute):
    def train(**changes):
        with make_worker(folder, lora={"target_modules": ("linear_fc1",)}, **changes) as worker:
            worker.prepare_for_training()
            results = [worker.train(make_batch(seed=seed), NLL()) for seed in range(2)]
            return results, values_of(worker)

    results, expected = train()
    found, values = train(activation_checkpointing=True, **recompute)
    assert [result.grad_norm for result in found] == [pytest.approx(result.grad_norm) for result in results]
    assert_close(values, expected)


@pytest.mark.parametrize(
    ("lora", "layers"),
    [
        ({"target_modules": ("linear_qkv", "linear_fc2")}, {"linear_qkv", "linear_fc2"}),
        ({"target_modules": ("*.layers.0.*.linear_qkv",)}, {"linear_qkv"}),
        ({"exclude_modules": ("linear_qkv",)}, {"linear_proj", "linear_fc1", "linear_fc2"}),
    ],
)
def test_only_the_layers_asked_for_get_adapters(folder, lora, layers):
    with make_worker(folder, lora=lora) as worker:
        found = {name.split(".adapter.")[0].rpartition(".")[2] for name in parameters_of(worker) if ".adapter." in name}
        assert found == layers


def test_a_model_with_no_such_layer_is_refused(folder):
    with pytest.raises(ConfigError, match="fits no layer"), make_worker(folder, lora={"target_modules": ("q_proj",)}):
        pass


@pytest.mark.parametrize(
    ("changes", "has_experts", "message"),
    [
        ({"tensor_model_parallel_size": 2}, False, "set tensor_model_parallel_size to 1"),
        ({"pipeline_model_parallel_size": 2}, False, "set pipeline_model_parallel_size to 1"),
        ({"context_parallel_size": 2}, False, "set context_parallel_size to 1"),
        ({}, True, "mixture-of-experts"),
    ],
)
def test_adapters_that_cannot_be_are_refused(folder, changes, has_experts, message):
    cfg = lora_settings(folder, "megatron", **changes).megatron_cfg
    assert cfg is not None
    problem = adapters_problem(cfg, has_experts=has_experts)
    assert problem is not None
    assert message in problem


@pytest.mark.parametrize("family", ["qwen3", "nemotron", "nemotron_h"])
def test_a_plan_counts_the_adapters_that_a_model_with_or_without_gates_gets(family, tmp_path):
    save_family_folder(tmp_path, family)
    with make_worker(tmp_path) as worker:
        made = sum(parameter.numel() for parameter in parameters_of(worker).values() if parameter.requires_grad)
        config = local_config(str(tmp_path), {})
        assert config is not None
        assert made == adapter_elements(worker._settings, config) > 0
