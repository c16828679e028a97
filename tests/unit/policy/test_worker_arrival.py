"""Workers whose copies come as late as they may: what is read without having been waited for is poisoned."""

from __future__ import annotations

import pytest
import torch
from deferred_device import DeferredDevice
from lora_cases import lora_worker
from policy_cases import (
    NLL,
    assert_equal,
    cycle,
    forward_hook_on_layer,
    full_optimizer,
    full_params,
    is_megatron,
    make_batch,
    make_settings,
    run_ranks,
    shard,
    worker_of,
)

from nemo_offload_rl.policy import worker as worker_module
from nemo_offload_rl.residency import local_tensor


@pytest.fixture
def late_copies(monkeypatch):
    """From here on, workers have a device that copies what is waited for, when it is waited for."""

    def begin() -> None:
        monkeypatch.setattr(worker_module, "make_device", lambda device: DeferredDevice())
        monkeypatch.setattr(DeferredDevice, "held_bytes", 0)  # an engine could have its share at any time

    return begin


def named_parameters(worker):
    """All of this rank's, by names that have the layer's number."""
    if is_megatron(worker):
        return [it for chunk in worker._backend._chunks for it in chunk.module.named_parameters()]
    return worker._backend._built.module.hf_parameters()


def away(worker):
    """Names of the parameters that are poisoned."""
    return [name for name, value in named_parameters(worker) if local_tensor(value.detach()).isnan().all()]


def steps(worker, num_steps=3):
    """Every phase between steps; what all of its passes gave, and the state at the end."""
    worker.prepare_for_training()
    seen = []
    for seed in range(num_steps):
        batch = shard(make_batch(seed=seed), worker)
        cycle(worker, batch)
        worker.offload_after_refit()
        worker.prepare_for_lp_inference()
        seen.append(worker.get_logprobs(batch))
        seen.append(worker.get_reference_logprobs(batch))
        worker.offload_before_refit()
        worker.offload_after_refit(wait_for_all=False)
        if seed == 1:
            worker.finish_leaving()
        worker.prepare_for_training()
        seen.append(torch.tensor(worker.train(batch, NLL()).loss))
    return seen, full_params(worker), full_optimizer(worker)


def assert_same_steps(left, right):
    assert all(torch.equal(mine, other) for mine, other in zip(left[0], right[0], strict=True))
    assert_equal(left[1], right[1])
    assert_equal(left[2], right[2])


@pytest.mark.parametrize(
    "changes",
    [{}, {"activation_checkpointing": True}, {"offload_optimizer_states": True}, {"residency_verify": False}],
    ids=str,
)
def test_late_copies_change_no_bit_of_what_passes_give_and_what_steps_leave(make_worker, folders, late_copies, changes):
    folder, _ = folders("qwen3-tied")
    with make_worker(folder, keep_reference=True, **changes) as worker:
        expected = steps(worker)
    late_copies()
    with make_worker(folder, keep_reference=True, **changes) as worker:
        assert_same_steps(steps(worker), expected)


def test_generation_begins_while_the_policy_still_leaves(make_worker, folders, late_copies):
    folder, _ = folders("qwen3-tied")
    late_copies()
    with make_worker(folder, residency_verify=False) as worker:
        worker.prepare_for_training()
        cycle(worker, make_batch())
        worker.prepare_for_training()
        worker.train(make_batch(), NLL())
        worker.offload_before_refit()
        worker.offload_after_refit(wait_for_all=False)
        held_bytes = worker.residency.device_bytes()
        assert held_bytes["params"] > 0 and held_bytes["optimizer"] > 0
        worker.finish_leaving()
        assert sum(worker.residency.device_bytes().values()) == 0


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
def test_a_layer_runs_while_the_next_is_on_its_way(backend, folders, late_copies, lora):
    folder, _ = folders("qwen3-tied")
    late_copies()
    with lora_worker(folder, backend, lora={"enabled": lora}) as worker:
        names = [name for name, _ in named_parameters(worker)]
        by_layer = [{name for name in names if f"layers.{index}." in name} for index in range(2)]
        seen = []
        for index in range(2):
            forward_hook_on_layer(worker, index, lambda *_: seen.append(away(worker)))
        for enter in (worker.prepare_for_training, worker.prepare_for_lp_inference):
            worker.offload_after_refit()
            enter()
            assert set(away(worker)) == by_layer[0] | by_layer[1]
            seen.clear()
            worker.get_logprobs(make_batch())
            assert set(seen[0]) == by_layer[1] and seen[1:] and not any(seen[1:])


def test_weights_that_are_sent_before_any_pass_are_all_there(backend, folders, late_copies):
    folder, _ = folders("qwen3-tied")
    late_copies()
    with lora_worker(folder, backend) as worker:
        expected = {name: tensor.clone() for name, tensor in worker.named_weights()}
        for enter in (worker.prepare_for_training, worker.prepare_for_lp_inference, worker.offload_before_refit):
            worker.offload_after_refit()
            enter()
            assert_equal(dict(worker.named_weights()), expected)
            worker.offload_after_refit()
            enter()
            worker.start_refit()
            assert away(worker) == []


# -- ranks -------------------------------------------------------------------------------------------------------------


def check_two_ranks(process, folder, moe_folder):
    gathers_first = {"backend": "megatron", "overlap_param_gather": True}  # in its first pass, before any update
    for changes in (
        {},
        {"tensor_parallel_size": 2},
        gathers_first,
        {"backend": "megatron", "pipeline_model_parallel_size": 2},
        {"backend": "megatron", "expert_model_parallel_size": 2, "overlap_param_gather": False},
    ):
        place = moe_folder if "expert_model_parallel_size" in changes else folder
        settings = make_settings(place, **changes)
        with worker_of(settings, process, keep_reference=True) as worker:
            expected = steps(worker, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_module, "make_device", lambda device: DeferredDevice())
            with worker_of(settings, process, keep_reference=True) as worker:
                assert_same_steps(steps(worker, 2), expected)
                worker.offload_after_refit()
                worker.prepare_for_lp_inference()
                assert any("layers." in name for name in away(worker)) == (changes is not gathers_first)


@pytest.mark.processes
def test_late_copies_change_no_bit_on_two_ranks_which_begin_before_all_is_there(folders, tmp_path):
    folder, _ = folders("qwen3-tied")
    moe_folder, _ = folders("qwen3-moe")
    run_ranks(2, tmp_path, check_two_ranks, str(folder), str(moe_folder))
