"""One rank, in this process, against plain Hugging Face and plain torch."""

import gc
import os
import weakref
from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from megatron.core import parallel_state
from policy_cases import (
    NLL,
    ONE_RANK,
    RaisesAt,
    assert_equal,
    cycle,
    full_grads,
    full_optimizer,
    full_params,
    has_grads,
    hf_logprobs,
    hf_loss_and_grads,
    hf_lowest,
    make_batch,
    make_settings,
    make_sparse_batch,
    one_rank_worker,
    output_layer,
    torch_optimizer,
)
from safetensors.torch import load_file
from token_stat_cases import hf_token_stats, with_predicted_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_offload_rl.backends.dtensor import parallel
from nemo_offload_rl.backends.dtensor.one_rank import use_one_rank
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.keys.policy import BatchingConfig, SchedulerMilestonesConfig, SchedulerPhaseConfig
from nemo_offload_rl.keys.worker import TokenFilter
from nemo_offload_rl.policy.passes import micro_batch_rows
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.loss import ReferenceLoss
from nemo_offload_rl.protocols.vocab import VocabShard, is_drawn
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryReceiver

PACKING = BatchingConfig(enabled=True, train_mb_tokens=40, logprob_mb_tokens=60, sequence_length_round=1)


# Schedules of three steps with the rates 0.5e-3, 0.75e-3 and 1e-3.
TORCH_SCHEDULE = (
    SchedulerPhaseConfig(
        name="torch.optim.lr_scheduler.LinearLR",
        kwargs={"start_factor": 0.5, "end_factor": 1.0, "total_iters": 2},
    ),
    SchedulerPhaseConfig(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 1.0}),
    SchedulerMilestonesConfig(milestones=(2,)),
)
MEGATRON_SCHEDULE = {"lr_warmup_init": 0.5e-3, "lr_warmup_iters": 2}
SCHEDULES = {"dtensor": {"scheduler": TORCH_SCHEDULE}, "megatron": MEGATRON_SCHEDULE}
# Of a resumed run, and its rate in the second step: fewer phases, and other groups of parameters; a longer warmup.
OTHER_SETTINGS = {
    "dtensor": (
        {
            "scheduler": (SchedulerPhaseConfig(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 0.25}),),
            "optimizer": torch_optimizer("AdamW", lr=8e-3, decay_norm_and_bias=False),
        },
        2e-3,
    ),
    "megatron": ({"lr": 8e-3, "lr_warmup_init": 0.0, "lr_warmup_iters": 4}, 2e-3),
}


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"sequence_packing": PACKING}], ids=["padded", "packed"])
def test_loss_metrics_gradients_and_logprobs_equal_hugging_faces(make_worker, backend, folders, changes):
    """Of one family; `unit/models/test_matrix.py` has all of them."""
    if backend == "megatron" and changes:
        pytest.skip("needs Transformer Engine: test_megatron_gpu.py")
    folder, model = folders("qwen3")
    batch = make_batch()
    expected_loss, expected_grads = hf_loss_and_grads(model, batch)
    with make_worker(folder, **changes) as worker:
        worker.prepare_for_lp_inference()
        assert_close(worker.get_logprobs(batch), hf_logprobs(model, batch).detach())
        worker.prepare_for_training()
        loss, metrics = worker.forward_backward(batch, NLL())
        assert_close(loss, expected_loss)
        assert metrics["tokens"] == float((batch.token_mask * batch.sample_mask[:, None]).sum())
        assert_close(metrics["logprob_min"], hf_lowest(model, batch))
        assert_close(full_grads(worker), expected_grads)


@pytest.mark.parametrize(
    "changes",
    [
        {"train_micro_batch_size": 1},
        {"train_micro_batch_size": 3},
        {"train_micro_batch_size": 8, "logprob_chunk_size": 4},
        {"train_micro_batch_size": 4, "activation_checkpointing": True},
        {"make_sequence_length_divisible_by": 4},
        {
            "dynamic_batching": BatchingConfig(
                enabled=True, train_mb_tokens=40, logprob_mb_tokens=60, sequence_length_round=4
            )
        },
        {"sequence_packing": PACKING},
        {"sequence_packing": PACKING, "logprob_chunk_size": 5, "activation_checkpointing": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_how_a_global_batch_is_cut_changes_neither_gradients_nor_logprobs(make_worker, backend, folders, changes):
    if backend == "megatron" and "sequence_packing" in changes:
        pytest.skip("needs Transformer Engine: test_megatron_gpu.py")
    folder, model = folders("qwen3-tied")
    batch = make_batch()
    _, expected_grads = hf_loss_and_grads(model, batch)
    with make_worker(folder, **changes) as worker:
        worker.prepare_for_lp_inference()
        assert_close(worker.get_logprobs(batch), hf_logprobs(model, batch).detach())
        worker.prepare_for_training()
        worker.forward_backward(batch, NLL())
        assert_close(full_grads(worker), expected_grads)
        worker.zero_grad()
        measures_tokens_and_changes_no_gradient(worker, model)


def test_micro_batches_by_tokens_are_within_their_budget_once_they_are_padded():
    by_tokens = BatchingConfig(enabled=True, train_mb_tokens=40, logprob_mb_tokens=40, sequence_length_round=5)
    settings = make_settings("any", make_sequence_length_divisible_by=4, dynamic_batching=by_tokens)
    batch = replace(make_batch(width=16), input_lengths=torch.full((8,), 9))
    plan = micro_batch_rows(settings, batch, lambda count: count, is_training=True, size=1)
    assert max(batch.select(rows).trim(4).input_ids.numel() for rows in plan) <= 40


def measures_tokens_and_changes_no_gradient(worker, model, temperature=1.0):
    batch = with_predicted_tokens(model, make_batch())
    loss, metrics = worker.forward_backward(batch, NLL())
    grads = full_grads(worker)
    for stat, expected in hf_token_stats(model, batch, temperature).items():
        worker.zero_grad()
        *found, measured = worker.forward_backward(batch, NLL(stat))
        assert measured.pop(stat.value) == pytest.approx(expected, rel=1e-5)
        assert (*found, measured) == (loss, metrics)
        assert_equal(full_grads(worker), grads)
        assert worker.evaluate(batch, NLL(stat)).metrics[stat.value] == [pytest.approx(expected, rel=1e-5)]
    assert "token_accuracy" not in metrics and "entropy" not in metrics


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_the_entropy_is_that_at_the_temperature_of_rollouts(make_worker, folders, chunk_size):
    folder, model = folders("qwen3-tied")
    with make_worker(folder, logprob_temperature=0.6, logprob_chunk_size=chunk_size) as worker:
        worker.prepare_for_training()
        measures_tokens_and_changes_no_gradient(worker, model, temperature=0.6)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_rank_computes_the_gradients_and_logprobs_of_fsdp_itself(folders, precision, monkeypatch):
    folder, _ = folders("qwen3-tied")
    ends_uncounted = make_sparse_batch().select(range(7, -1, -1))  # its last two micro-batches count nothing
    assert not ends_uncounted.token_mask[4:].mul(ends_uncounted.sample_mask[4:, None]).any()
    found = []
    for replaces in (use_one_rank, lambda units, **_: None):
        monkeypatch.setattr(parallel, "use_one_rank", replaces)
        with one_rank_worker(folder, precision=precision, train_micro_batch_size=2) as worker:
            found.append([])
            for batch in (make_batch(), ends_uncounted):
                worker.prepare_for_training()
                worker.forward_backward(batch, NLL())
                found[-1].append(full_grads(worker))
                worker.zero_grad()
                worker.prepare_for_lp_inference()
                found[-1].append({"logprobs": worker.get_logprobs(batch)})
    for ours, theirs in zip(*found, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_of_a_pass_that_broke_off_are_given_up(folders, precision):
    folder, _ = folders("qwen3-tied")
    grads = []
    for gives_up in (False, True):
        with one_rank_worker(folder, precision=precision, train_micro_batch_size=2) as worker:
            worker.prepare_for_training()
            if gives_up:
                with pytest.raises(ArithmeticError):
                    worker.train(make_batch(seed=1), RaisesAt(call=3))
            worker.forward_backward(make_batch(), NLL())
            grads.append(full_grads(worker))
    assert_equal(*grads)


@pytest.mark.parametrize(
    "changes", [{}, {"logprob_chunk_size": 3}, {"sequence_packing": PACKING}], ids=lambda changes: "-".join(changes)
)
def test_logits_are_computed_for_counted_tokens_only_and_gradients_are_those_of_all(
    make_worker, backend, folders, changes
):
    if backend == "megatron" and "sequence_packing" in changes:
        pytest.skip("needs Transformer Engine: test_megatron_gpu.py")
    folder, model = folders("qwen3-tied")
    batch = make_sparse_batch()
    is_counted = batch.token_mask * batch.sample_mask[:, None] > 0
    assert is_counted.any() and not is_counted[:4].any()  # two micro-batches of two rows count nothing
    expected_loss, expected_grads = hf_loss_and_grads(model, batch)
    sizes = []
    with make_worker(folder, **changes) as worker:
        hook = output_layer(worker).register_forward_pre_hook(lambda _, args: sizes.append(args[0][..., 0].numel()))
        worker.prepare_for_lp_inference()
        counted = worker.get_logprobs(batch, counted_only=True)
        assert_close(counted, hf_logprobs(model, batch).detach() * is_counted)
        assert sum(sizes) == is_counted.sum()
        worker.prepare_for_training()
        sizes.clear()
        loss, metrics = worker.forward_backward(batch, NLL())
        # Backward computes the chunks' logits again.
        assert sum(sizes) == is_counted.sum() * (2 if "logprob_chunk_size" in changes else 1)
        hook.remove()
        assert_close(loss, expected_loss)
        assert_close(metrics["logprob_min"], hf_lowest(model, batch))
        # A mean over few tokens has gradients above 1, where Hugging Face's own are 2e-6 from those in float64.
        assert_close(full_grads(worker), expected_grads)
        worker.zero_grad()
        assert_close(worker.evaluate(batch, NLL()).loss, [expected_loss])


@pytest.mark.parametrize("decay_norm_and_bias", [True, False])
def test_steps_equal_plain_torch_with_clipping_and_a_schedule(make_worker, backend, folders, decay_norm_and_bias):
    if backend == "megatron" and decay_norm_and_bias:
        pytest.skip("Megatron never decays norms and biases")
    folder, _ = folders("qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = [p for name, p in model.named_parameters() if "norm" in name and not decay_norm_and_bias]
    decayed = [p for p in model.parameters() if not any(p is other for other in plain)]
    groups = [{"params": decayed, "weight_decay": 10.0}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)
    batch = make_batch(num_rows=24)
    # The schedule goes on once for each call of train, whatever updates it has, as in NeMo-RL.
    rates, norms, losses = [1e-3 * 0.5, 1e-3 * 0.5, 1e-3 * 0.75], [], []
    for step, rate in enumerate(rates):
        loss, grads = hf_loss_and_grads(model, batch.select(range(8 * step, 8 * step + 8)))
        for name, parameter in model.named_parameters():
            parameter.grad = grads[name]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(loss)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

    adamw = torch_optimizer("AdamW", lr=1e-3, weight_decay=10.0, decay_norm_and_bias=decay_norm_and_bias)
    changes = {
        "dtensor": {"max_grad_norm": 0.5, "optimizer": adamw},
        "megatron": {"clip_grad": 0.5, "start_weight_decay": 10.0, "end_weight_decay": 10.0},
    }[backend]
    with make_worker(folder, **changes, **SCHEDULES[backend]) as worker:
        worker.prepare_for_training()
        results = [worker.train(batch.select(rows), NLL()) for rows in (range(16), range(16, 24))]
        assert [rate for result in results for rate in result.learning_rate] == pytest.approx(rates)
        assert_close([norm for result in results for norm in result.grad_norm], norms)
        assert_close([loss for result in results for loss in result.loss], losses)
        assert [len(result.metrics["tokens"]) for result in results] == [2, 1]
        # Adam divides by a small number where a gradient is near 0.
        assert_close(full_params(worker), dict(model.state_dict()))


def test_logprobs_are_those_of_the_sampling_temperature(make_worker, folders):
    folder, model = folders("qwen3")
    batch = make_batch()
    logits = model(input_ids=batch.input_ids).logits.detach()
    expected = (logits / 0.6).log_softmax(-1)[:, :-1].gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    is_real = torch.arange(1, 14) < batch.input_lengths[:, None]
    with make_worker(folder, logprob_temperature=0.6) as worker:
        worker.prepare_for_lp_inference()
        assert_close(worker.get_logprobs(batch)[:, 1:], expected * is_real)


class WithReference(ReferenceLoss):
    """Reads both kinds of logprobs."""

    token_stat = None
    reads_whole = True

    def __call__(self, logprobs_BS, batch, norm, whole_logprobs_BS=None):
        terms = -logprobs_BS.masked_fill(logprobs_BS.isneginf(), 0.0) + 0.3 * whole_logprobs_BS.square()
        return (terms * batch.loss_mask).sum() / norm.num_valid_tokens, {}


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_with_filters_logprobs_are_those_of_what_is_drawn_and_the_references_those_of_all(
    make_worker, backend, folders, chunk_size
):
    folder, model = folders("qwen3")
    batch = make_batch()
    logits = model(input_ids=batch.input_ids).logits[:, :-1] / 0.6
    kept = TokenFilter(top_k=9, top_p=0.8)
    # What the model predicts, so that some of the tokens are drawn.
    batch.input_ids[:, 1::2] = logits.argmax(-1)[:, ::2]
    logits = model(input_ids=batch.input_ids).logits[:, :-1] / 0.6
    targets = batch.input_ids[:, 1:, None]
    whole = logits.log_softmax(-1).gather(-1, targets).squeeze(-1)
    is_kept = is_drawn(logits.detach(), kept, 1.0, VocabShard(0, None))
    drawn = logits.masked_fill(~is_kept, float("-inf")).log_softmax(-1).gather(-1, targets).squeeze(-1)
    drawn = torch.where(is_kept.gather(-1, targets).squeeze(-1), drawn, 0.0)
    is_real, counted = torch.arange(1, 14) < batch.input_lengths[:, None], batch.loss_mask[:, 1:]
    is_inside = is_kept.gather(-1, targets).squeeze(-1) | ~is_real
    assert not is_inside.all() and (drawn[is_real] < 0).any()
    model.zero_grad()
    (((-drawn + 0.3 * whole.square()) * counted).sum() / counted.sum()).backward()
    expected_grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    changes = {"logprob_temperature": 0.6, "logprob_filter": kept, "logprob_chunk_size": chunk_size}
    if backend == "dtensor" and chunk_size is not None:  # Megatron needs Transformer Engine for it
        changes["sequence_packing"] = PACKING
    with make_worker(folder, keep_reference=True, **changes) as worker:
        worker.prepare_for_lp_inference()
        found = worker.get_logprobs(batch)[:, 1:]
        assert torch.equal(found.isneginf(), ~is_inside)
        assert_close(found.masked_fill(~is_inside, 0.0), (drawn * is_real).detach())
        assert_close(worker.get_reference_logprobs(batch)[:, 1:], (whole * is_real).detach())
        worker.prepare_for_training()
        worker.forward_backward(batch, WithReference())
        assert_close(full_grads(worker), expected_grads)


def test_bfloat16_is_for_compute_only(folders):
    folder, _ = folders("qwen3")
    batch = make_batch()
    with one_rank_worker(folder, precision="bfloat16") as worker:
        worker.prepare_for_lp_inference()
        half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        torch.testing.assert_close(worker.get_logprobs(batch), hf_logprobs(half, batch).detach(), rtol=0, atol=0.2)
        worker.prepare_for_training()
        worker.train(batch, NLL())
        assert {value.dtype for value in full_params(worker).values()} == {torch.float32}
        assert {value.dtype for value in full_optimizer(worker).values()} == {torch.float32}
        assert {value.dtype for _, value in worker.named_weights()} == {torch.bfloat16}
        assert {spec.dtype for spec in worker._backend.weight_specs()} == {torch.bfloat16}


def test_evaluate_gives_the_loss_and_leaves_no_gradient(make_worker, folders):
    folder, model = folders("qwen3")
    batch = make_batch()
    expected_loss, _ = hf_loss_and_grads(model, batch)
    with make_worker(folder) as worker:
        worker.prepare_for_lp_inference()
        result = worker.evaluate(batch, NLL())
        assert_close(result.loss, [expected_loss])
        assert not has_grads(worker)


# -- refit -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied"])
def test_a_refit_sends_hugging_faces_tensors_bit_by_bit_and_tied_ones_once(make_worker, folders, family):
    folder, _ = folders(family)
    stored = load_file(folder / "model.safetensors")
    with make_worker(folder) as worker:
        worker.offload_after_refit()
        worker.offload_before_refit()
        received = {}
        for _ in range(2):
            received.clear()
            worker.start_refit()
            receiver = SharedMemoryReceiver()
            num_buckets = 0
            while (bucket := worker.next_bucket()) is not None:
                received |= {name: tensor.clone() for name, tensor in receiver.tensors(bucket)}
                num_buckets += 1
            assert num_buckets > 2
            receiver.close()
        assert_equal(received, stored)


def test_a_refit_after_training_sends_what_was_trained_whether_or_not_another_came_before(make_worker, folders):
    folder, _ = folders("qwen3-tied")

    def trained(*, sent_before: bool) -> dict[str, torch.Tensor]:
        with make_worker(folder) as worker:
            worker.prepare_for_training()
            if sent_before:
                assert_equal(dict(worker.named_weights()), load_file(folder / "model.safetensors"))
            worker.train(make_batch(), NLL())
            worker.offload_before_refit()
            worker.offload_after_refit()
            worker.prepare_for_lp_inference()
            return {name: tensor.clone() for name, tensor in worker.named_weights()}

    first, second = trained(sent_before=False), trained(sent_before=True)
    assert_equal(second, first)
    stored = load_file(folder / "model.safetensors")
    assert all(not torch.equal(tensor, stored[name]) for name, tensor in second.items())


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["training", "generation"])
def test_a_run_resumed_from_a_checkpoint_goes_on_bit_by_bit(make_worker, backend, folders, tmp_path, phase):
    folder, _ = folders("qwen3-tied")
    first, second = make_batch(seed=1), make_batch(seed=2)
    with make_worker(folder, **SCHEDULES[backend]) as worker:
        worker.prepare_for_training()
        worker.train(first, NLL())
        if phase == "generation":
            worker.offload_after_refit()
        worker.save_checkpoint(tmp_path / "step_1")
        assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
        worker.prepare_for_training()
        expected = worker.train(second, NLL())
        params, optimizer = full_params(worker), full_optimizer(worker)
    with make_worker(folder, keep_reference=True, **SCHEDULES[backend]) as worker:
        worker.prepare_for_training()
        if phase == "generation":
            worker.offload_after_refit()
        worker.load_checkpoint(tmp_path / "step_1")
        cycle(worker, first)
        assert worker.train(second, NLL()) == expected
        assert_equal(full_params(worker), params)
        assert_equal(full_optimizer(worker), optimizer)
    if phase == "training":
        changes, rate = OTHER_SETTINGS[backend]
        with make_worker(folder, **changes) as worker:
            worker.load_checkpoint(tmp_path / "step_1")
            worker.prepare_for_training()
            assert worker.train(second, NLL()).learning_rate == [pytest.approx(rate)]


def test_a_checkpoint_of_another_model_is_refused(make_worker, folders, tmp_path):
    folder, _ = folders("qwen3")
    with make_worker(folder) as worker:
        with pytest.raises(UserError, match="no policy checkpoint"):
            worker.load_checkpoint(tmp_path)
        worker.save_checkpoint(tmp_path / "qwen3")
    with make_worker(folders("qwen2")[0]) as worker, pytest.raises(UserError, match="another model"):
        worker.load_checkpoint(tmp_path / "qwen3")


# What an optimizer keeps that the other one does not: neither an update nor a resume may pass over it.
OTHER_OPTIMIZERS = {
    "dtensor": (
        ({"optimizer": torch_optimizer("AdamW", amsgrad=True)}, {}, "max_exp_avg_sq"),
        ({}, {"optimizer": torch_optimizer("SGD")}, "exp_avg"),
        (
            {},
            {"optimizer": torch_optimizer("SGD"), "cpu_offload": True, "activation_checkpointing": True},
            "exp_avg",
        ),
    ),
    "megatron": (({"precision": "bfloat16", "bf16": True, "pipeline_dtype": "bfloat16"}, {}, "exp_avg"),),
}


def test_a_checkpoint_of_another_optimizer_or_backend_is_refused(make_worker, backend, folders, tmp_path):
    folder, _ = folders("qwen3-tied")
    for number, (saved, resumed, state) in enumerate(OTHER_OPTIMIZERS[backend]):
        path = tmp_path / str(number)
        with make_worker(folder, **saved) as worker:
            worker.prepare_for_training()
            worker.train(make_batch(), NLL())
            worker.save_checkpoint(path)
        refused = rf"has optimizer/.*/{state} and \d+ more tensors, which this run lacks; .*: resume with the settings"
        with make_worker(folder, **resumed) as worker, pytest.raises(UserError, match=refused):
            worker.load_checkpoint(path)
    other = {"dtensor": "megatron", "megatron": "dtensor"}[backend]
    with one_rank_worker(folder, backend=other) as worker, pytest.raises(UserError, match=r"or begin anew .* export$"):
        worker.load_checkpoint(path)


def test_an_exported_folder_loads_in_hugging_face_with_the_trained_weights(make_worker, folders, tmp_path):
    folder, _ = folders("qwen3-tied")
    batch = make_batch()
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        worker.train(batch, NLL())
        params = full_params(worker)
        worker.offload_after_refit()
        worker.export_hf(tmp_path / "hf")
        worker.export_hf(tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.dtype == torch.float32
    assert_equal(dict(exported.named_parameters()), params)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").pad_token_id == 256


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size 2 = 2 does not divide the 1 policy workers"),
        ({"context_parallel_size": 2, "expert_parallel_size": 2}, "but they do not work together"),
        ({"enabled": False}, "dtensor_cfg.enabled"),
        ({"precision": "int8"}, "precision=int8"),
        ({"tensor_parallel_size": 3}, "does not divide the 4 attention heads"),
        ({"tensor_parallel_size": 2}, "does not divide the 1 policy workers"),
        ({"hf_config_overrides": {"rope_thetta": 1}}, "rope_thetta"),
        ({"optimizer": torch_optimizer("Adamm")}, "Adamm"),
        (
            {"optimizer": replace(torch_optimizer("SGD"), name="torch.nn.Linear")},
            "does not derive from Optimizer",
        ),
        ({"optimizer": torch_optimizer("AdamW", learning_rate=1)}, "learning_rate"),
        (
            {
                "scheduler": (
                    SchedulerPhaseConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs={}),
                    SchedulerMilestonesConfig(milestones=(5,)),
                )
            },
            "milestone",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_cannot_work_is_refused_by_its_key(folders, changes, named):
    folder, _ = folders("qwen3")
    with pytest.raises(UserError, match=named):
        PolicyWorker(make_settings(folder, **changes), ONE_RANK, keep_reference=False)
    assert not torch.distributed.is_initialized()


# The optimizer and its schedule are the last that a backend builds; experts fail while Megatron makes its groups.
@pytest.mark.parametrize(
    ("backend", "bad"),
    [
        ("dtensor", {"optimizer": torch_optimizer("Adamm")}),
        ("megatron", {"expert_model_parallel_size": 2}),
        ("megatron", {"lr_decay_style": "lineer"}),
    ],
    indirect=["backend"],
)
def test_a_worker_that_could_not_be_built_does_not_keep_the_next_one_from_it(make_worker, folders, bad):
    folder, _ = folders("qwen3")
    with pytest.raises(Exception, match=r"(?i)adamm|expert|lineer"), make_worker(folder, **bad):
        pass
    assert not torch.distributed.is_initialized()
    assert not parallel_state.is_initialized()
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        assert worker.train(make_batch(), NLL()).grad_norm[0] > 0
    assert not torch.distributed.is_initialized()
    assert not parallel_state.is_initialized()


def test_a_deterministic_worker_asks_torch_cublas_and_transformer_engine_for_it(
    make_worker, backend, folders, monkeypatch
):
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    try:
        with make_worker(folders("qwen3")[0]) as worker:
            assert not torch.are_deterministic_algorithms_enabled()
        with make_worker(folders("qwen3")[0], deterministic=True) as worker:
            worker.prepare_for_training()
            worker.train(make_batch(), NLL())
        assert torch.are_deterministic_algorithms_enabled()
        # torch's attention, which DTensor has, repeats only where nothing else is let through.
        assert torch.is_deterministic_algorithms_warn_only_enabled() == (backend == "megatron")
        assert {name: os.environ[name] for name in variables} == variables
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_keeps_the_model_of_a_worker_that_has_ended(make_worker, folders):
    with make_worker(folders("qwen3")[0]) as worker:
        worker.prepare_for_training()
        worker.train(make_batch(), NLL())
        layer = weakref.ref(output_layer(worker))
    del worker
    gc.collect()
    assert layer() is None


def test_weights_that_do_not_fit_the_config_are_refused(folders, tmp_path):
    folder, _ = folders("qwen3")
    with pytest.raises(UserError, match=r"another shape .*, first model.*\(64, 128\) instead of \(64, 64\)"):
        PolicyWorker(
            make_settings(folder, hf_config_overrides={"intermediate_size": 64}), ONE_RANK, keep_reference=False
        )


def test_each_micro_batch_and_each_tensor_read_or_written_shows_progress(
    make_worker, backend, folders, tmp_path, monkeypatch
):
    folder, _ = folders("qwen3-tied")
    seen = []
    utime = os.utime

    def seen_utime(*args, **kwargs):
        seen.append(args)
        utime(*args, **kwargs)

    monkeypatch.setattr(os, "utime", seen_utime)

    def num_shown(work, *args):
        seen.clear()
        work(*args)
        return seen.count((2,))  # standard error

    with make_worker(folder) as worker:
        num_tensors = len(full_params(worker))
        assert seen.count((2,)) >= num_tensors or backend == "megatron"  # its loader writes to standard output
        batch = make_batch()
        num_micro_batches = len(batch) // worker._settings.train_micro_batch_size
        worker.prepare_for_training()
        assert num_shown(worker.get_logprobs, batch) >= len(batch) // worker._settings.logprob_batch_size
        assert num_shown(worker.train, batch, NLL()) >= num_micro_batches
        assert num_shown(worker.evaluate, batch, NLL()) >= num_micro_batches
        assert num_shown(worker.save_checkpoint, tmp_path / "saved") > num_tensors
        assert num_shown(worker.load_checkpoint, tmp_path / "saved") > num_tensors
        assert num_shown(worker.export_hf, tmp_path / "exported") > 0
