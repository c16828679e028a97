"""Adapters against peft itself: which are trained, what moves, what is sent and what is saved."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from policy_cases import (
    NLL,
    NO_LORA,
    assert_close,
    assert_equal,
    full,
    full_params,
    make_batch,
    make_settings,
    run_ranks,
    save_family,
)
from resume_cases import goes_on_bitwise, train_steps, weights_of
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.backends.base import ProcessInfo
from nemo_offload_rl.policy.worker import PolicyWorker

ONE_RANK = ProcessInfo(rank=0, world_size=1, init_method="", device="cpu")
LORA = replace(NO_LORA, enabled=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3-tied")
    save_family(path, "qwen3-tied")
    return path


@contextmanager
def make_worker(folder, *, process=ONE_RANK, keep_reference=False, lora=LORA, **changes):
    settings = make_settings(folder, **changes)
    settings = replace(settings, dtensor_cfg=replace(settings.dtensor_cfg, lora_cfg=lora))
    worker = PolicyWorker(settings, process, keep_reference)
    try:
        yield worker
    finally:
        worker.shutdown()


def peft_model(folder, worker, lora=LORA):
    """peft's model with this worker's adapters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=lora.dim, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
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
    stored = load_file(folder / "model.safetensors")
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), sent)
    assert sent.keys() == stored.keys()
    changed = {name for name in sent if not torch.equal(sent[name], stored[name])}
    assert changed == {name for name in sent if "_proj" in name}


def test_logprobs_and_gradients_are_pefts(folder):
    batch = make_batch()
    with make_worker(folder) as worker:
        train_steps(worker, 1, 2)
        model = peft_model(folder, worker)
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
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found = gradients.pop(name.removeprefix("base_model.model."))
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
    assert not gradients


def test_the_frozen_base_crosses_to_the_host_once_and_comes_back_for_each_use(folder):
    with make_worker(folder) as worker:
        base_bytes = worker.residency.device_bytes()["base"]
        assert base_bytes > 5 * worker.residency.device_bytes()["params"]
        train_steps(worker, 1, 1)
        out = [report.group("base").bytes_out for report in worker.residency_reports()]
        assert sum(out) == base_bytes
        train_steps(worker, 2, 3)
        reports = worker.residency_reports()
        assert sum(report.group("base").bytes_out for report in reports) == 0
        assert sum(report.group("base").bytes_clean for report in reports) >= 2 * base_bytes
        assert sum(worker.residency.device_bytes().values()) == 0


def test_the_reference_is_the_model_without_adapters_and_keeps_only_them(folder):
    batch = make_batch()
    with make_worker(folder, lora=NO_LORA) as plain:
        plain.prepare_for_lp_inference()
        expected = plain.get_logprobs(batch)
    with make_worker(folder, keep_reference=True) as worker:
        assert worker.residency.host_bytes()["reference"] < worker.residency.device_bytes()["base"] / 5
        train_steps(worker, 1, 2)
        worker.prepare_for_lp_inference()
        assert torch.equal(worker.get_reference_logprobs(batch), expected)
        assert not torch.equal(worker.get_logprobs(batch), expected)


def test_a_checkpoint_has_adapters_and_their_optimizer_only_and_a_run_goes_on_from_it_bitwise(folder, tmp_path):
    dropout = replace(LORA, dropout=0.2)
    with make_worker(folder, lora=dropout) as worker:
        uninterrupted = train_steps(worker, 1, 8)
        names = set(full_params(worker))
    goes_on_bitwise(lambda: make_worker(folder, lora=dropout), tmp_path, uninterrupted, in_background=True)
    metadata = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    saved = {key.removeprefix("model/") for key in metadata if key.startswith("model/")}
    assert saved == names
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": replace(LORA, match_all_linear=False, target_modules=("query",))}, "fits no layer"),
        ({"tensor_parallel_size": 2}, "with lora_cfg is not supported"),
    ],
)
def test_adapters_that_cannot_be_are_refused(folder, changes, message):
    try:
        with pytest.raises(ConfigError, match=message), make_worker(folder, **changes):
            pass
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_only_the_modules_asked_for_get_adapters(folder):
    lora = replace(LORA, match_all_linear=False, target_modules=("q_proj", "v_proj"))
    with make_worker(folder, lora=lora) as worker:
        names = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in worker._backend._parameters}
        assert names == {"q_proj", "v_proj"}


def two_ranks(process: ProcessInfo, folder: str, root: str) -> None:
    expected = torch.load(f"{root}/one.pt")
    with make_worker(folder, process=process) as worker:
        assert_equal(weights_of(worker), expected["first"])
        assert_close(train_steps(worker, 1, 2).weights, expected["trained"], rtol=1e-4, atol=1e-5)


def test_two_data_parallel_ranks_begin_with_the_same_adapters_and_train_as_one(folder, tmp_path):
    with make_worker(folder) as worker:
        torch.save({"first": weights_of(worker), "trained": train_steps(worker, 1, 2).weights}, tmp_path / "one.pt")
    run_ranks(2, tmp_path, two_ranks, str(folder), str(tmp_path))
