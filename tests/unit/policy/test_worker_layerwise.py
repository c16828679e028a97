"""Passes that go layer by layer over many micro-batches, against training that stays on the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from deferred_device import DeferredDevice
from model_families import FAMILIES, save_family_folder, trained_by
from passing_cases import assert_same_steps, in_parts, steps
from policy_cases import (
    NLL,
    Poisoned,
    RaisesAt,
    assert_equal,
    forward_hook_on_layer,
    full_params,
    make_batch,
    one_rank_worker,
)
from transformers import Qwen3Model
from transformers.modeling_outputs import BaseModelOutputWithPast

from nemo_offload_rl.backends.dtensor.stand_ins import LayerInputs, SteppedModel
from nemo_offload_rl.errors import CheckpointError, ConfigError, UserError
from nemo_offload_rl.keys.policy import BatchingConfig
from nemo_offload_rl.keys.worker import TokenFilter
from nemo_offload_rl.models.families import DTENSOR, has_shared_keys
from nemo_offload_rl.protocols.loss import TokenStat
from nemo_offload_rl.residency import CpuDevice, ResidencyError

PACKED = BatchingConfig(enabled=True, train_mb_tokens=30, logprob_mb_tokens=30, sequence_length_round=1)
FORMS = {
    "float32": {"logprob_chunk_size": 3, "max_grad_norm": 0.1},
    "bfloat16": {"precision": "bfloat16"},
    "packed": {"precision": "bfloat16", "sequence_packing": PACKED},
}
recomputed = partial(one_rank_worker, activation_checkpointing=True)


@dataclass
class Counted:
    """NLL that counts its calls, without tokens that a filter leaves out."""

    token_stat: TokenStat | None
    num_calls: int = 0

    def __call__(self, logprobs_BS, *args):
        self.num_calls += 1
        return NLL(self.token_stat)(logprobs_BS.masked_fill(logprobs_BS.isneginf(), 0.0), *args)


def crossings(worker, run):
    """How often `run` had each part of the parameters and of the gradients come, and leave by a copy."""
    worker.residency.settle()  # what is still leaving might stay
    worker.residency_reports()
    run()
    num_in, num_out = Counter(), Counter()
    sizes = [sum(parameter.nbytes for _, parameter in part.parameters) for part in worker._backend._built.parts]
    for report in worker.residency_reports():
        for name, move in report.groups.items():
            row, _, index = name.partition(".")
            if row in ("params/part", "grads/part"):
                num_in[name] += move.bytes_in / sizes[int(index)]
                num_out[name] += move.bytes_out / sizes[int(index)]
    return [
        [found[f"{row}.{i}"] for i in range(len(sizes))]
        for row in ("params/part", "grads/part")
        for found in (num_in, num_out)
    ]


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", "bfloat16"),
        ("qwen3-tied", "float32"),
        ("gemma2-tied", "packed"),  # windows over packed rows
        ("qwen3-moe", "packed"),
        ("olmo2", "float32"),
    ],
)
def test_steps_layer_by_layer_equal_bit_by_bit_those_of_a_model_that_stays_on_the_device(folders, family, form):
    folder, _ = folders(family)
    changes = FORMS[form]
    with recomputed(folder, keep_reference=True, **changes) as worker:
        expected = steps(worker, 2)
    with in_parts(folder, keep_reference=True, **changes) as worker:
        assert_same_steps(steps(worker, 2), expected)


@pytest.mark.models
@pytest.mark.parametrize(
    "family", [it for it in FAMILIES if DTENSOR in trained_by(it) and not has_shared_keys(FAMILIES[it][1])]
)
def test_steps_of_every_family_equal_bit_by_bit_those_of_a_model_that_stays_on_the_device(tmp_path, family):
    save_family_folder(tmp_path, family)
    with recomputed(tmp_path, keep_reference=True, precision="bfloat16") as worker:
        expected = steps(worker, 2)
    with in_parts(tmp_path, keep_reference=True, precision="bfloat16") as worker:
        assert_same_steps(steps(worker, 2), expected)


def test_a_filter_and_a_stat_of_the_scores_are_the_same_too(folders):
    """With tied embeddings the output layer is computed twice, and the loss is asked once."""
    folder, _ = folders("qwen3-tied")
    changes = {"logprob_filter": TokenFilter(top_k=50, top_p=0.9), "logprob_temperature": 0.7, "logprob_chunk_size": 4}
    found = []
    for make in (recomputed, in_parts):
        with make(folder, **changes) as worker:
            worker.prepare_for_training()
            loss = Counted(TokenStat.ENTROPY)
            result = worker.train(make_batch(), loss)
            evaluated = worker.evaluate(make_batch(seed=1), loss)
            assert loss.num_calls == 4
            found.append((result.loss, result.metrics, result.grad_norm, evaluated.loss, evaluated.metrics))
    assert found[0] == found[1]


# -- the link ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "device"), [(1, DeferredDevice()), (2, CpuDevice()), (8, DeferredDevice())])
def test_a_part_crosses_once_in_each_direction_of_a_pass_whatever_the_number_of_micro_batches(
    eight_layers, use_device, rows, device
):
    use_device(device)
    once, never = [1] * 10, [0] * 10
    with in_parts(eight_layers[0], train_micro_batch_size=rows, logprob_batch_size=rows) as worker:
        worker.prepare_for_training()
        for seed in range(2):
            passed = crossings(worker, lambda seed=seed: worker.forward_backward(make_batch(seed=seed), NLL()))
            assert passed == [[1, *[2] * 8, 1], never, never, once]
            worker.optim_step()
        assert crossings(worker, lambda: worker.get_logprobs(make_batch())) == [once, never, never, never]
        assert crossings(worker, lambda: worker.evaluate(make_batch(), NLL())) == [once, never, never, never]


def test_a_refit_is_charged_to_entries_of_its_own_and_not_to_the_pass_before(eight_layers):
    with in_parts(eight_layers[0]) as worker:
        worker.prepare_for_lp_inference()
        once, never = [1] * 10, [0] * 10
        assert crossings(worker, lambda: worker.get_logprobs(make_batch()))[0] == once
        worker.get_logprobs(make_batch())
        worker.offload_before_refit()
        of_pass = worker.residency_reports()
        before = [sum(move.bytes_in for move in report.groups.values()) for report in of_pass]
        assert crossings(worker, lambda: list(worker.named_weights())) == [once, never, never, never]
        assert [sum(move.bytes_in for move in report.groups.values()) for report in of_pass] == before


def test_tied_embeddings_come_once_more_for_the_gradient_that_is_the_sum_of_both(folders):
    with in_parts(folders("qwen3-tied")[0]) as worker:
        worker.prepare_for_training()
        passed = crossings(worker, lambda: worker.forward_backward(make_batch(), NLL()))
        assert passed == [[3, 2, 2], [0] * 3, [0] * 3, [1] * 3]


def test_micro_batches_whose_hidden_states_do_not_fit_together_go_in_groups_of_the_same_numbers(folders, use_device):
    folder, _ = folders("qwen3-tied")
    changes = {"precision": "bfloat16", "train_micro_batch_size": 1, "logprob_batch_size": 1}
    with recomputed(folder, keep_reference=True, **changes) as worker:
        expected = steps(worker, 2)
    counts = set()
    for free_bytes in (0, 830_000):
        use_device(DeferredDevice(free_bytes))
        with in_parts(folder, keep_reference=True, **changes) as worker:
            assert_same_steps(steps(worker, 2), expected)
            params_in, _, grads_in, grads_out = crossings(
                worker, lambda worker=worker: worker.forward_backward(make_batch(), NLL())
            )
            assert params_in[1] == 2 * grads_out[1]
            assert grads_in[1] < grads_out[1]  # nothing comes for the first group
            counts.add(grads_out[1])
            worker.zero_grad()
    assert max(counts) == 8 and 1 < min(counts) < 8


def test_where_inputs_of_layers_are_offloaded_too_one_micro_batch_goes_after_the_other(folders):
    folder, _ = folders("qwen3")
    with recomputed(folder, keep_reference=True) as worker:
        expected = steps(worker, 1)
    with in_parts(folder, keep_reference=True, activation_offload=True) as worker:
        assert_same_steps(steps(worker, 1), expected)
        params_in, *_ = crossings(worker, lambda: worker.forward_backward(make_batch(), NLL()))
        assert params_in == [2, 4, 4, 2]
        params_in, *_ = crossings(worker, lambda: worker.evaluate(make_batch(), NLL()))
        assert params_in == [1, 1, 1, 1]


def test_a_model_that_drops_at_random_is_refused(folders):
    dropout = {"hf_config_overrides": {"attention_dropout": 0.2}, "dropout": True}
    with (
        pytest.raises(ConfigError, match=r"the model has dropout, .*; set policy\.dropout to false"),
        in_parts(folders("qwen3")[0], **dropout),
    ):
        pass


@pytest.mark.parametrize(
    ("learns_angles", "reason"),
    [(False, "it computes something between its layers"), (True, "its layers pass on more than hidden states")],
)
def test_a_model_that_is_more_than_its_layers_is_refused(folders, monkeypatch, learns_angles, reason):
    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **kwargs):
        embedded = hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        angles = self.rotary_emb(hidden, torch.arange(hidden.shape[1]).unsqueeze(0))
        if learns_angles:
            angles = tuple(angle * self.norm.weight.mean() for angle in angles)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=angles, **kwargs)
            hidden = hidden if learns_angles else hidden + embedded
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    monkeypatch.setattr(Qwen3Model, "forward", forward)
    with (
        pytest.raises(ConfigError, match=f"cannot run layer by layer: {reason}; set it to false"),
        in_parts(folders("qwen3")[0]),
    ):
        pass


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_loss_or_a_layer_that_raises_and_an_update_that_is_skipped_leave_nothing_behind(folders):
    folder, _ = folders("qwen3-tied")
    batch = make_batch()
    num_calls = 0

    def fail_at(call):
        def fail(*_):
            nonlocal num_calls
            num_calls += 1
            if num_calls == call:
                raise ArithmeticError("in the middle of a layer")

        return fail

    by_two = {"keep_reference": True, "train_micro_batch_size": 2, "logprob_batch_size": 3}
    with recomputed(folder, **by_two) as clean, in_parts(folder, **by_two) as hurt:
        for worker in (clean, hurt):
            worker.prepare_for_training()
            worker.train(batch, NLL())
        with pytest.raises(ArithmeticError):
            hurt.train(batch, RaisesAt(call=3))
        for call in (3, 6):  # in forward, and when it is computed again
            num_calls = 0
            hook = forward_hook_on_layer(hurt, 1, fail_at(call))
            with pytest.raises(ArithmeticError):
                hurt.train(batch, NLL())
            hook.remove()
        assert hurt.train(batch, Poisoned(factor=float("nan"))).is_skipped == [True]
        hurt.prepare_for_lp_inference()
        for get in (hurt.get_logprobs, hurt.get_reference_logprobs):
            num_calls = 0
            hook = forward_hook_on_layer(hurt, 1, fail_at(2))
            with pytest.raises(ArithmeticError):
                get(batch)
            hook.remove()
        assert all(not size for name, size in hurt.residency.device_bytes().items() if "part" in name)
        assert_same_steps(steps(hurt), steps(clean))


def test_a_pass_whose_memory_runs_out_is_run_again_over_smaller_groups_of_micro_batches(folders):
    folder, _ = folders("qwen3-tied")
    num_calls = 0

    def runs_out(*_):
        nonlocal num_calls
        num_calls += 1
        if num_calls in (6, 17):  # in backward of a group of four micro-batches, and of two
            raise torch.OutOfMemoryError("no memory\nfor it")

    by_two = {"train_micro_batch_size": 2, "logprob_batch_size": 3}
    with recomputed(folder, **by_two) as clean, in_parts(folder, **by_two) as hurt:
        for worker in (clean, hurt):
            worker.prepare_for_training()
        hook = forward_hook_on_layer(hurt, 1, runs_out)
        found = [worker.train(make_batch(), NLL()) for worker in (clean, hurt)]
        hook.remove()
        assert found[0] == found[1]
        assert_equal(full_params(hurt), full_params(clean))
        params_in, *_ = crossings(hurt, lambda: hurt.forward_backward(make_batch(), NLL()))
        assert params_in[1] > 4  # both directions of more groups than two
        hurt.zero_grad()
        num_calls = 4  # memory runs out in the second micro-batch
        hook = forward_hook_on_layer(hurt, 1, runs_out)
        assert torch.equal(hurt.get_logprobs(make_batch()), clean.get_logprobs(make_batch()))
        hook.remove()
        assert num_calls == 4 + 2 + 3


def test_memory_that_does_not_do_for_one_micro_batch_is_an_error_and_leaves_the_old_state(folders, use_device):
    folder, _ = folders("qwen3")

    def runs_out(*_):
        raise torch.OutOfMemoryError("no memory")

    use_device(DeferredDevice(free_bytes=0))
    with in_parts(folder) as worker:
        worker.prepare_for_training()
        before = full_params(worker)
        hook = forward_hook_on_layer(worker, 1, runs_out)
        with pytest.raises(UserError, match="no memory"):
            worker.train(make_batch(), NLL())
        hook.remove()
        assert_equal(full_params(worker), before)
        assert not worker.train(make_batch(), NLL()).is_skipped[0]


def test_memory_that_runs_out_before_any_layer_is_an_error_also_after_passes_over_many_micro_batches(
    folders, monkeypatch
):
    num_calls = 0

    def runs_out(*_):
        nonlocal num_calls
        num_calls += 1
        assert num_calls < 9, "the same pass is run again and again"
        raise torch.OutOfMemoryError("no memory")

    with in_parts(folders("qwen3")[0]) as worker:
        worker.prepare_for_training()
        worker.get_logprobs(make_batch())
        monkeypatch.setattr(SteppedModel, "embed", runs_out)
        with pytest.raises(UserError, match="no memory"):
            worker.get_logprobs(make_batch())
        monkeypatch.undo()
        assert not worker.train(make_batch(), NLL()).is_skipped[0]


def test_groups_get_smaller_where_later_micro_batches_take_more_than_the_first_ones_tell(folders, monkeypatch):
    """As masks do, which grow with the square of a row's length."""
    num_tries, places = 0, {}

    def others_bytes(given):
        return 1000 ** (2 + places.setdefault(float(given.hidden.sum()), len(places)))

    def runs_out(*_):
        nonlocal num_tries
        if hurt._backend._layerwise._sizes.num_together > 1:
            num_tries += 1
            assert num_tries < 99, "the same group is tried again and again"
            raise torch.OutOfMemoryError("no memory")

    folder, _ = folders("qwen3")
    monkeypatch.setattr(LayerInputs, "others_bytes", others_bytes)
    with recomputed(folder) as clean, in_parts(folder, logprob_batch_size=2) as hurt:
        for worker in (clean, hurt):
            worker.prepare_for_training()
        hook = forward_hook_on_layer(hurt, 1, runs_out)
        assert torch.equal(hurt.get_logprobs(make_batch()), clean.get_logprobs(make_batch()))
        hook.remove()
        assert num_tries


@pytest.mark.parametrize(("part", "raised"), [(4, ArithmeticError), (10, KeyboardInterrupt)])
def test_an_update_that_is_broken_off_leaves_a_worker_that_refuses_all_further_work(
    eight_layers, two_steps, tmp_path, part, raised
):
    """Nothing can use a state of which some parts are new; the last checkpoint is whole."""
    num_updates = 0

    def break_off(*_):
        nonlocal num_updates
        num_updates += 1
        if num_updates == part:
            raise raised("in the middle of an update")

    with in_parts(eight_layers[0]) as worker:
        worker.prepare_for_training()
        worker.train(make_batch(seed=0), NLL())
        worker.save_checkpoint(tmp_path / "saved")
        worker.forward_backward(make_batch(seed=1), NLL())
        hook = worker._backend._optimizer.register_step_post_hook(break_off)
        with pytest.raises(raised):
            worker.optim_step()
        hook.remove()
        uses = {
            "logprobs": worker.prepare_for_lp_inference,
            "refit": worker.offload_before_refit,
            "save": lambda: worker.save_checkpoint(tmp_path / "broken"),
            "export": lambda: worker.export_hf(tmp_path / "hf"),
        }
        for use in uses.values():
            with pytest.raises((ResidencyError, CheckpointError), match=f"broke off in part {part} of 10"):
                use()
        assert not (tmp_path / "broken").exists()
    with in_parts(eight_layers[0]) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        worker.prepare_for_training()
        assert_equal(full_params(worker), two_steps[1])
        worker.train(make_batch(seed=1), NLL())
        assert_equal(full_params(worker), two_steps[2])
