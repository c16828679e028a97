"""Adapters of the DTensor backend against peft itself; what both backends promise is in ../../test_lora.py."""

from __future__ import annotations

import shutil

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


def results_of(folder, process=ONE_RANK, *, casts=True, **changes):
    """The base's bytes, and what a run with adapters and a reference gives; without `casts` the base is float32."""
    with pytest.MonkeyPatch.context() as patched:
        if not casts:
            patched.setattr(built, "keep_as_stored", lambda *args: None)
        settings = {"precision": "bfloat16", **changes}
        with lora_worker(folder, "dtensor", process=process, keep_reference=True, **settings) as worker:
            base_bytes = worker.residency.device_bytes()["base"]
            steps = train_steps(worker, 1, 3)
            worker.prepare_for_lp_inference()
            batch = shard(make_batch(), worker)
            scores = torch.stack([worker.get_logprobs(batch), worker.get_reference_logprobs(batch)])
            return base_bytes, steps.results, {**steps.weights, **full_params(worker), "scores": scores}


def assert_half_of_the_base_gives_the_same_bits(folder, process=ONE_RANK, **changes):
    base_bytes, results, tensors = results_of(folder, process, **changes)
    wider_bytes, expected, wider = results_of(folder, process, casts=False, **changes)
    assert wider_bytes / 2 <= base_bytes < 0.51 * wider_bytes  # rotary frequencies are float32
    assert results == expected
    assert_equal(tensors, wider)


def two_ranks(process, root):
    assert_half_of_the_base_gives_the_same_bits(f"{root}/bf16", process)


@pytest.mark.processes
def test_a_base_in_the_files_type_takes_half_the_bytes_and_changes_no_bit(untied, tmp_path):
    folder = saved_in(torch.bfloat16, untied, tmp_path / "bf16")
    assert_half_of_the_base_gives_the_same_bits(folder, lora=WITH_OUTPUT, activation_checkpointing=True)
    run_ranks(2, tmp_path, two_ranks, str(tmp_path))
    # Rounding a base that the files have in float32 would change merged weights.
    with make_worker(untied, precision="bfloat16") as worker:
        assert {parameter.dtype for _, parameter in worker._backend._lora.base} == {torch.float32}


def test_only_the_modules_asked_for_get_adapters(folder):
    lora = {"match_all_linear": False, "target_modules": ("q_proj", "v_proj")}
    with make_worker(folder, lora=lora) as worker:
        names = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in worker._backend._parameters}
        assert names == {"q_proj", "v_proj"}
