"""Adapters of the DTensor backend against peft itself; what both backends promise is in ../../test_lora.py."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from closeness import assert_close
from lora_cases import ALPHA, DIM, lora_settings, lora_worker, merged_by_peft
from peft import LoraConfig, get_peft_model
from policy_cases import (
    NLL,
    ONE_RANK,
    assert_equal,
    full,
    full_params,
    make_batch,
    run_ranks,
    save_family,
    shard,
)
from resume_cases import train_steps, weights_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.dtensor import built
from nemo_offload_rl.backends.factory import check_model
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.residency import local_tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3-tied")
    save_family(path, "qwen3-tied")
    return path


def make_worker(folder, **changes):
    return lora_worker(folder, "dtensor", **changes)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    save_family(path, "qwen3")
    return path


# Patterns of Automodel's: every linear layer but these, and so the output layer too.
WITH_OUTPUT = {"match_all_linear": False, "target_modules": ("*",), "exclude_modules": ("*o_proj*", "down_proj")}
OF_PEFT = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"]


def peft_model(folder, worker, targets="all-linear"):
    """peft's model with this worker's adapters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=DIM, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, config)
    adapters = {f"base_model.model.{name}": value for name, value in full_params(worker).items()}
    missing, unexpected = wrapped.load_state_dict(adapters, strict=False)
    assert not unexpected
    assert not [name for name in missing if "lora_" in name]
    return wrapped


def test_merged_weights_are_pefts_bit_by_bit_in_a_refit_and_an_export(folder, tmp_path):
    with make_worker(folder) as worker:
        train_steps(worker, 1, 3)
        sent = weights_of(worker)
        merged = dict(peft_model(folder, worker).merge_and_unload().named_parameters())
        assert_equal(sent, {name: value.detach() for name, value in merged.items()})
        assert [spec.name for spec in worker._backend.weight_specs()] == list(sent)
        worker.export_hf(tmp_path / "hf")
    assert_equal(merged_by_peft(folder, tmp_path / "hf/adapter"), sent)
    stored = load_file(folder / "model.safetensors")
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), sent)
    assert sent.keys() == stored.keys()
    changed = {name for name in sent if not torch.equal(sent[name], stored[name])}
    assert changed == {name for name in sent if "_proj" in name}


def test_an_output_layer_with_adapters_is_merged_as_pefts(untied, tmp_path):
    with make_worker(untied, lora=WITH_OUTPUT) as worker:
        train_steps(worker, 1, 3)
        sent = weights_of(worker)
        merged = dict(peft_model(untied, worker, OF_PEFT).merge_and_unload().named_parameters())
        worker.export_hf(tmp_path / "hf")
    assert_equal(merged_by_peft(untied, tmp_path / "hf/adapter"), sent)
    assert_equal(sent, {name: value.detach() for name, value in merged.items()})
    stored = load_file(untied / "model.safetensors")
    changed = {name.rpartition(".weight")[0].rpartition(".")[2] for name in sent if (sent[name] != stored[name]).any()}
    assert changed == set(OF_PEFT)


@pytest.mark.parametrize(("tied", "lora", "targets"), [(True, {}, "all-linear"), (False, WITH_OUTPUT, OF_PEFT)])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_logprobs_and_gradients_are_pefts(folder, untied, tied, lora, targets, chunk_size):
    folder = folder if tied else untied
    batch = make_batch()
    with make_worker(folder, lora=lora, logprob_chunk_size=chunk_size) as worker:
        train_steps(worker, 1, 2)
        model = peft_model(folder, worker, targets)
        worker.prepare_for_training()
        loss, _ = worker.forward_backward(batch, NLL())
        gradients = {name: full(parameter.grad) for name, parameter in worker._backend._parameters}
        worker.zero_grad()
    is_real = torch.arange(batch.input_ids.shape[1]) < batch.input_lengths.unsqueeze(1)
    logits = model(input_ids=batch.input_ids, attention_mask=is_real.long()).logits
    picked = logits.log_softmax(-1)[:, :-1].gather(-1, batch.input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    weights = (batch.token_mask * batch.sample_mask.unsqueeze(1))[:, 1:]
    expected = -(picked * weights).sum() / weights.sum()
    expected.backward()
    assert_close(loss, expected.item())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found = gradients.pop(name.removeprefix("base_model.model."))
            assert_close(found, parameter.grad)
    assert not gradients


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora": {"match_all_linear": False, "target_modules": ("q_proj", "query")}},
            "has query, but no linear",
        ),
        ({"lora": {"match_all_linear": False, "target_modules": ("*",)}}, "exclude it with exclude_modules"),
        ({"lora": {"exclude_modules": ("*",)}}, "fits no layer of the model, whose linear layers are called down_proj"),
        ({"tensor_parallel_size": 2}, "set tensor_parallel_size to 1"),
    ],
)
def test_adapters_that_cannot_be_are_refused(folder, changes, message):
    if "lora" in changes:  # a rule has the other
        with pytest.raises(ConfigError, match=message):
            check_model(lora_settings(folder, "dtensor", **changes))  # before Ray starts
    check_model(lora_settings(folder, "dtensor"))
    try:
        with pytest.raises(ConfigError, match=message), make_worker(folder, **changes):
            pass
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def saved_in(dtype, source, folder):
    """A copy of a model's folder with weights in another type."""
    shutil.copytree(source, folder)
    AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(folder)
    return folder


def outcome(folder, process=ONE_RANK, *, casts=True, **changes):
    """Train in bfloat16 with adapters and a reference; without `casts` the base is in float32.

    Returns bytes of the base before the first refit and in the last one, results of the steps, and adapters, merged
    weights, those that a refit sends, and logprobs.
    """
    with pytest.MonkeyPatch.context() as patched:
        if not casts:
            patched.setattr(built, "keep_as_stored", lambda *args: None)
        settings = {"precision": "bfloat16", **changes}
        with lora_worker(folder, "dtensor", process=process, keep_reference=True, **settings) as worker:
            whole_bytes = worker.residency.device_bytes()["base"]
            steps = train_steps(worker, 1, 3)
            worker.offload_before_refit()
            base_bytes = whole_bytes, worker.residency.device_bytes()["base"]
            sent = {f"sent {name}": full(tensor) for name, tensor in worker.named_weights()}
            worker.prepare_for_lp_inference()
            batch = shard(make_batch(), worker)
            scores = torch.stack([worker.get_logprobs(batch), worker.get_reference_logprobs(batch)])
            tensors = {**steps.weights, **sent, **full_params(worker), "scores": scores}
            return SimpleNamespace(base_bytes=base_bytes, results=steps.results, tensors=tensors)


def assert_same_bits(one, other):
    assert one.results == other.results
    assert_equal(one.tensors, other.tensors)


def assert_a_base_in_bfloat16_and_on_the_host_gives_the_same_bits(folder, process=ONE_RANK, **changes):
    narrow, wide = outcome(folder, process, **changes), outcome(folder, process, casts=False, **changes)
    assert wide.base_bytes[0] / 2 <= narrow.base_bytes[0] < 0.51 * wide.base_bytes[0]  # some buffers are float32
    assert narrow.base_bytes[1] == narrow.base_bytes[0]
    assert_same_bits(narrow, wide)
    on_host = outcome(folder, process, residency_overrides={"base": "host"}, **changes)
    assert on_host.base_bytes == (narrow.base_bytes[0], 0)
    assert_same_bits(on_host, narrow)


def two_ranks(process, root):
    assert_a_base_in_bfloat16_and_on_the_host_gives_the_same_bits(f"{root}/bf16", process)


@pytest.mark.processes
def test_a_base_in_the_files_type_takes_half_the_bytes_and_refits_read_it_from_the_host(untied, tmp_path):
    folder = saved_in(torch.bfloat16, untied, tmp_path / "bf16")
    changes = {"lora": WITH_OUTPUT, "activation_checkpointing": True}
    assert_a_base_in_bfloat16_and_on_the_host_gives_the_same_bits(folder, **changes)
    run_ranks(2, tmp_path, two_ranks, str(tmp_path))
    with make_worker(folder, precision="bfloat16") as worker:
        held, read = {local_tensor(it).data_ptr() for _, it in worker._backend._lora.base}, set[int]()
        for module in worker._backend._built.module.modules():
            module.register_forward_pre_hook(lambda it, _: read.update(own.data_ptr() for own in it.parameters(False)))
        worker.prepare_for_lp_inference()
        worker.get_logprobs(make_batch())
        assert held <= read  # without a copy
    # Rounding a base that the files have in float32 would change merged weights.
    with make_worker(untied, precision="bfloat16") as worker:
        assert {parameter.dtype for _, parameter in worker._backend._lora.base} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_a_base_in_the_files_type_and_on_the_host_changes_no_bit_either(untied, tmp_path):
    folder = saved_in(torch.bfloat16, untied, tmp_path / "bf16")
    process = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")
    try:
        assert_a_base_in_bfloat16_and_on_the_host_gives_the_same_bits(folder, process, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_biases_of_routers_are_read_from_the_host_too(tmp_path):
    save_family(tmp_path / "whole", "deepseek_v3")
    folder = saved_in(torch.bfloat16, tmp_path / "whole", tmp_path / "bf16")
    assert_same_bits(outcome(folder, residency_overrides={"base": "host"}), outcome(folder))


def test_only_the_modules_asked_for_get_adapters(folder):
    lora = {"match_all_linear": False, "target_modules": ("q_proj", "v_proj")}
    with make_worker(folder, lora=lora) as worker:
        names = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in worker._backend._parameters}
        assert names == {"q_proj", "v_proj"}
