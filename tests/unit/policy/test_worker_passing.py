"""Parameters, gradients and optimizer that pass through the device part by part, against training that stays there."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
from deferred_device import DeferredDevice
from passing_cases import (
    FailingDevice,
    WatchedCpu,
    WatchedLate,
    assert_same_steps,
    in_parts,
    results,
    steps,
)
from policy_cases import (
    NLL,
    assert_equal,
    cycle,
    full_optimizer,
    full_params,
    make_batch,
    one_rank_worker,
)
from resume_cases import goes_on_bitwise, train_steps
from safetensors.torch import load_file
from simulated_device import SimulatedDevice
from torch import Tensor

from nemo_offload_rl.backends.factory import build_backend, expected_bytes
from nemo_offload_rl.errors import CheckpointError, UserError
from nemo_offload_rl.policy import worker as worker_module
from nemo_offload_rl.residency import CpuDevice, Placement, ResidencyError
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryReceiver


@pytest.mark.parametrize(
    ("family", "changes", "device"),
    [
        ("qwen3", {"precision": "bfloat16", "residency_verify": True}, DeferredDevice()),
        ("qwen3-tied", {"precision": "bfloat16"}, DeferredDevice(free_bytes=0)),
        ("qwen3-tied", {"logprob_chunk_size": 3, "max_grad_norm": 0.1}, CpuDevice()),
    ],
    ids=["verified", "tied, overlapped if there is room", "tied, clipped"],
)
def test_steps_in_parts_equal_bit_by_bit_those_of_a_model_that_stays_on_the_device(
    folders, family, changes, device, use_device
):
    folder, _ = folders(family)
    with one_rank_worker(folder, keep_reference=True, **changes) as worker:
        expected = steps(worker, 2)
    use_device(device)
    with in_parts(folder, keep_reference=True, **changes) as worker:
        assert_same_steps(steps(worker, 2), expected)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [WatchedCpu(), WatchedLate(free_bytes=0)], ids=["", "overlapped"])
def test_of_ten_parts_one_passes_through_the_device_at_a_time_and_two_in_the_update(eight_layers, use_device, device):
    """A part has 4 bytes a parameter, as many of gradients, and twice as many of optimizer states."""
    path, part_bytes, all_bytes = eight_layers
    assert all_bytes > 8 * part_bytes
    use_device(device)
    with in_parts(path, keep_reference=True) as worker:
        device.worker = worker
        results(worker, 2)
    most = {}
    for phase, params, grads, states in device.seen:
        before = most.get(phase, (0, 0, 0, 0))
        most[phase] = tuple(map(max, before, (params, grads, states, params + grads + states)))
    most = {phase: [size / part_bytes for size in sizes] for phase, sizes in most.items() if phase is not None}
    if not device.asynchronous:
        assert most["lp_inference"] == [1, 0, 0, 1]
        assert most["training"] == [1, 1, 0, 1]
        assert most["optim_step"] == [1, 1, 2, 4]
    else:  # in training the last two of the update may still be leaving
        assert most["lp_inference"] == [1, 0, 0, 1]
        assert most["training"][1] == 3 and most["training"][3] <= 8
        assert most["optim_step"] == [2, 2, 4, 8]
    assert most["generation"][3] == 0 and most["refit"][3] <= 8


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_a_device_for_one_whole_part_and_what_is_in_none_is_enough_and_a_byte_less_is_not(
    eight_layers, use_device, missing_bytes
):
    path, part_bytes, all_bytes = eight_layers
    norm_bytes = 64 * 4
    with in_parts(path) as worker:
        rest_bytes = worker.residency.device_bytes()["params"] + 3 * norm_bytes  # gradient and states of the last norm
    device = SimulatedDevice(rest_bytes + 4 * part_bytes - missing_bytes)
    assert device.capacity_bytes < all_bytes / 2
    use_device(device)
    with in_parts(path, keep_reference=True) as worker:
        results(worker, 1)  # states are made in the first update, by the optimizer
        worker.prepare_for_training()
        with pytest.raises(UserError, match="out of memory on the device") if missing_bytes else nullcontext():
            worker.train(make_batch(), NLL())
        if not missing_bytes:
            worker.offload_before_refit()
            assert len(list(worker.named_weights())) == len(worker._backend.weight_specs())
            assert device.peak_bytes == device.capacity_bytes


def test_host_memory_is_sixteen_bytes_a_parameter_and_known_before_anything_is_loaded(eight_layers, monkeypatch):
    path, _, all_bytes = eight_layers
    taken = []

    def build(settings, process):
        taken.append(expected_bytes(settings, process))
        return build_backend(settings, process)

    monkeypatch.setattr(worker_module, "build_backend", build)
    with in_parts(path) as worker:
        expected = worker._backend.expected_bytes()
        assert expected == taken[0].state
        assert all_bytes <= expected["grads/part"] <= expected["params/part"] <= 1.01 * all_bytes
        for seed in range(2):
            cycle(worker, make_batch(seed=seed))
            worker.train(make_batch(seed=seed), NLL())
            cycle(worker, make_batch(seed=seed))
        assert worker.residency._arena.reserved_bytes == sum(expected.values()) <= 4.03 * all_bytes


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("countdown", [2, 10, 37])
def test_a_copy_that_fails_in_a_pass_leaves_the_old_state_and_later_steps_are_the_same(
    eight_layers, two_steps, use_device, countdown
):
    device = FailingDevice()
    use_device(device)
    with in_parts(eight_layers[0]) as worker:
        worker.prepare_for_training()
        worker.train(make_batch(seed=0), NLL())
        device.countdown = countdown
        with pytest.raises(OSError, match="link is gone"):
            worker.forward_backward(make_batch(seed=1), NLL())
        assert_equal(full_params(worker), two_steps[1])
        worker.train(make_batch(seed=1), NLL())
        assert_equal(full_params(worker), two_steps[2])


@pytest.mark.parametrize("countdown", [1, 3, 4, 44])
def test_a_copy_that_fails_in_an_update_leaves_the_old_state_or_a_worker_that_refuses(
    eight_layers, two_steps, use_device, tmp_path, countdown
):
    device = FailingDevice()
    use_device(device)
    with in_parts(eight_layers[0]) as worker:
        worker.prepare_for_training()
        worker.train(make_batch(seed=0), NLL())
        worker.forward_backward(make_batch(seed=1), NLL())
        device.countdown = countdown
        with pytest.raises(OSError, match="link is gone"):
            worker.optim_step()
        if countdown <= 3:  # states, parameters and gradients of the first part come first
            assert_equal(full_params(worker), two_steps[1])
            worker.zero_grad()
            worker.train(make_batch(seed=1), NLL())
            assert_equal(full_params(worker), two_steps[2])
            return
        for use in (worker.prepare_for_lp_inference, lambda: worker.save_checkpoint(tmp_path / "saved")):
            with pytest.raises((ResidencyError, CheckpointError), match="broke off in part"):
                use()


# -- what leaves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_in_parts_goes_on_from_its_checkpoint_bit_by_bit(folders, tmp_path, in_background):
    folder, _ = folders("qwen3")
    with one_rank_worker(folder) as worker:
        uninterrupted = train_steps(worker, 1, 4)
    goes_on_bitwise(partial(in_parts, folder), tmp_path, uninterrupted, in_background=in_background)


def test_checkpoints_are_the_same_with_and_without_parts(folders, tmp_path):
    folder, _ = folders("qwen3-tied")
    makers = {"parts": partial(in_parts, folder), "whole": partial(one_rank_worker, folder)}
    states = {}
    for name, make in makers.items():
        with make() as worker:
            train_steps(worker, 1, 2)
            worker.save_checkpoint(tmp_path / name)
    for name, make in makers.items():
        (other,) = makers.keys() - {name}
        with make() as worker:
            worker.load_checkpoint(tmp_path / other)
            train_steps(worker, 3, 3)
            states[name] = (full_params(worker), full_optimizer(worker))
    for mine, other in zip(*states.values(), strict=True):
        assert_equal(mine, other)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_refit_sends_part_by_part_what_a_whole_model_sends(eight_layers, use_device, precision, tmp_path):
    path, part_bytes, _ = eight_layers
    with one_rank_worker(path, precision=precision) as worker:
        train_steps(worker, 1, 1)
        worker.offload_before_refit()
        expected = {name: tensor.clone() for name, tensor in worker.named_weights()}
    device = WatchedCpu()
    use_device(device)
    with in_parts(path, precision=precision) as worker:
        train_steps(worker, 1, 1)
        device.worker = worker
        worker.offload_before_refit()
        dtypes = {spec.name: spec.dtype for spec in worker._backend.weight_specs()}
        assert_equal({name: tensor.to(dtypes[name], copy=True) for name, tensor in worker.named_weights()}, expected)
        assert max(params for _, params, _, _ in device.seen) == part_bytes
        given_up = worker.named_weights()
        next(given_up)
        del given_up
        worker.start_refit()
        receiver, received = SharedMemoryReceiver(), dict[str, Tensor]()
        while (bucket := worker.next_bucket()) is not None:
            received |= {name: tensor.clone() for name, tensor in receiver.tensors(bucket)}
        receiver.close()
        assert_equal(received, expected)
        worker.offload_after_refit()
        assert sum(worker.residency.device_bytes().values()) == 0
        worker.export_hf(tmp_path / "hf")
        assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), expected)
        assert worker.residency.location("params/part.0") is Placement.HOST
