"""Passes layer by layer on a device that says what was allocated: sizes of groups, and parts kept for the update."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from deferred_device import DeferredDevice
from passing_cases import assert_same_steps, in_parts, steps
from policy_cases import NLL, Poisoned, assert_equal, forward_hook_on_layer, full_params, make_batch, one_rank_worker

from nemo_offload_rl.residency import CpuDevice, Phase, Placement, needs
from nemo_offload_rl.residency.needs import RESERVE_BYTES

recomputed = partial(one_rank_worker, activation_checkpointing=True)


class Measured(DeferredDevice):
    """A device with a peak, always the same."""

    def __init__(self, free_bytes: int = 1 << 40, peak_bytes: int = 1) -> None:
        super().__init__(free_bytes)
        self._peak_bytes = peak_bytes

    def drain_peak_bytes(self) -> int:
        return self._peak_bytes


class RaisesOnce:
    """A hook that raises when it is called first."""

    def __init__(self, error):
        self._errors = [error]

    def __call__(self, *_):
        if self._errors:
            raise self._errors.pop()


def num_groups(worker):
    """Of a training pass over `make_batch`: so often the gradients of the first layer leave."""
    worker.residency.settle()
    worker.residency_reports()
    worker.forward_backward(make_batch(), NLL())
    worker.zero_grad()
    moved = [report.groups["grads/part.1"].bytes_out for report in worker.residency_reports() if report.groups]
    return sum(moved) / sum(p.nbytes for _, p in worker._backend._built.parts[1].parameters)


def kept(worker):
    """Parts of which all three groups are on the device."""
    rows, count = ("params/part", "grads/part", "optimizer/part"), len(worker._backend._built.parts)
    locations = [{worker.residency.location(f"{row}.{i}") for row in rows} for i in range(count)]
    return [i for i, found in enumerate(locations) if found == {Placement.DEVICE}]


def test_groups_grow_into_what_the_first_one_left_at_its_peak_and_no_further(folders, use_device, monkeypatch):
    monkeypatch.setattr(needs, "RESERVE_BYTES", 0)
    folder, _ = folders("qwen3-tied")
    changes = {"precision": "bfloat16", "train_micro_batch_size": 1, "logprob_batch_size": 1}
    with recomputed(folder, keep_reference=True, **changes) as worker:
        expected = steps(worker, 2)
    free_bytes = 830_000
    for peak_bytes in (1, free_bytes):
        use_device(Measured(free_bytes, peak_bytes))
        with in_parts(folder, keep_reference=True, **changes) as worker:
            worker.prepare_for_training()
            counts = [num_groups(worker) for _ in range(3)]
            assert 1 < counts[0] < 8
            assert counts[1] == counts[2]
            assert counts[1] < counts[0] if peak_bytes == 1 else counts[1] >= counts[0]
        with in_parts(folder, keep_reference=True, **changes) as worker:
            assert_same_steps(steps(worker, 2), expected)


@pytest.mark.parametrize("family", ["gemma2-tied", "qwen3-moe"])
def test_steps_whose_update_finds_its_parts_on_the_device_are_the_same_bit_by_bit(folders, use_device, family):
    folder, _ = folders(family)
    changes = {"precision": "bfloat16", "max_grad_norm": 0.1}
    with recomputed(folder, keep_reference=True, **changes) as worker:
        expected = steps(worker, 2)
    use_device(Measured())
    with in_parts(folder, keep_reference=True, **changes) as worker:
        assert_same_steps(steps(worker, 2), expected)
        worker.forward_backward(make_batch(), NLL())
        assert kept(worker) == list(range(len(worker._backend._built.parts)))
        worker.residency_reports()
        worker.optim_step()
        assert not sum(report.bytes_in for report in worker.residency_reports())


@pytest.mark.parametrize("num_kept", [0, 4])
def test_the_parts_that_are_updated_first_are_kept_as_far_as_there_is_room(eight_layers, use_device, num_kept):
    device = Measured()
    use_device(device)
    with recomputed(eight_layers[0]) as plain, in_parts(eight_layers[0]) as worker:
        for it in (plain, worker):
            it.prepare_for_training()
            for seed in (0, 3):  # two passes tell what they need
                it.train(make_batch(seed=seed), NLL())
        sizes = [4 * sum(p.nbytes for _, p in part.parameters) for part in worker._backend._built.parts]
        device._free_bytes = RESERVE_BYTES + max(sizes) + sum(sizes[:num_kept]) + sizes[num_kept] // 2
        for seed in (1, 2):
            plain.forward_backward(make_batch(seed=seed), NLL())
            worker.residency.settle()  # what leaves counts as free, and this device's free memory is always the same
            worker.forward_backward(make_batch(seed=seed), NLL())
            assert kept(worker) == list(range(num_kept))
            assert plain.optim_step() == worker.optim_step()
            assert not kept(worker)
        assert_equal(full_params(worker), full_params(plain))


def test_what_was_kept_for_an_update_that_does_not_come_leaves(folders, use_device):
    folder, _ = folders("qwen3")
    batch = make_batch()
    with in_parts(folder, keep_reference=True) as clean, ExitStack() as stack:
        use_device(Measured())
        hurt = stack.enter_context(in_parts(folder, keep_reference=True))
        for worker in (clean, hurt):
            worker.prepare_for_training()
            for _ in range(2):
                worker.train(batch, NLL())
            worker.forward_backward(batch, NLL())
        assert kept(hurt)
        # Other passes before the update, a second one that adds to the gradients too.
        assert clean.evaluate(batch, NLL()).loss == hurt.evaluate(batch, NLL()).loss
        assert not kept(hurt)
        for worker in (clean, hurt):
            worker.forward_backward(make_batch(seed=3), NLL())
        assert kept(hurt)
        assert torch.equal(clean.get_reference_logprobs(batch), hurt.get_reference_logprobs(batch))
        assert not kept(hurt)
        assert clean.optim_step() == hurt.optim_step()
        assert hurt.train(batch, Poisoned(factor=float("nan"))).is_skipped == [True]
        assert hurt.residency.phase is Phase.TRAINING and not kept(hurt)
        hurt.forward_backward(batch, NLL())
        hurt.zero_grad()
        hurt.prepare_for_lp_inference()
        assert all(not size for name, size in hurt.residency.device_bytes().items() if "part" in name)
        assert_same_steps(steps(hurt), steps(clean))


def test_nothing_is_kept_before_the_first_update_whose_states_need_the_room(folders, use_device):
    use_device(Measured())
    folder, _ = folders("qwen3")
    with in_parts(folder) as worker:
        worker.prepare_for_training()
        assert worker.train(make_batch(), Poisoned(factor=float("nan"))).is_skipped == [True]
        worker.forward_backward(make_batch(), NLL())
        assert not kept(worker)
        worker.optim_step()
        worker.forward_backward(make_batch(), NLL())
        assert kept(worker)


def test_a_pass_that_runs_out_of_memory_beside_kept_parts_is_run_again_without_them(folders, use_device):
    use_device(Measured())
    folder, _ = folders("qwen3")
    num_calls = 0

    def runs_out(*_):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:  # in backward of the first layer, after the second one's
            raise torch.OutOfMemoryError("no memory")

    with recomputed(folder) as clean, in_parts(folder) as hurt:
        for worker in (clean, hurt):
            worker.prepare_for_training()
            for _ in range(2):
                worker.train(make_batch(), NLL())
        hook = forward_hook_on_layer(hurt, 0, runs_out)
        found = [worker.train(make_batch(seed=1), NLL()) for worker in (clean, hurt)]
        hook.remove()
        assert num_calls == 3 + 4
        assert found[0] == found[1]
        assert_equal(full_params(hurt), full_params(clean))
        kept_after = []
        for _ in range(2):
            hurt.forward_backward(make_batch(), NLL())
            kept_after.append(bool(kept(hurt)))
            hurt.zero_grad()
        assert kept_after == [False, True]


@pytest.mark.parametrize(
    ("precision", "kept_bytes", "measured"),
    [("float32", 4, False), ("bfloat16", 2, True)],
    ids=["float32", "bfloat16-overlapped"],
)
def test_a_reference_crosses_as_wide_as_passes_read_it(eight_layers, use_device, precision, kept_bytes, measured):
    use_device(Measured() if measured else CpuDevice())
    with in_parts(eight_layers[0], keep_reference=True, precision=precision) as worker:
        num_parameters = sum(p.numel() for part in worker._backend._built.parts for _, p in part.parameters)
        expected = kept_bytes * num_parameters
        assert expected <= worker.residency.host_bytes()["reference"] < 1.1 * expected
        worker.prepare_for_lp_inference()
        own = worker.get_logprobs(make_batch())
        worker.residency_reports()
        assert torch.equal(worker.get_reference_logprobs(make_batch()), own)
        moved = [report.groups.items() for report in worker.residency_reports()]
        assert sum(move.bytes_in for group in moved for name, move in group if "params/part" in name) == expected


def test_a_narrow_reference_survives_failed_copies_and_passes_beside_kept_parts(eight_layers, use_device, monkeypatch):
    changes = {"keep_reference": True, "precision": "bfloat16", "train_micro_batch_size": 1, "logprob_batch_size": 1}
    batch = make_batch()
    with recomputed(eight_layers[0], **changes) as clean, ExitStack() as stack:
        use_device(device := Measured())
        hurt = stack.enter_context(in_parts(eight_layers[0], **changes))
        for worker in (clean, hurt):
            worker.prepare_for_training()
            for _ in range(2):
                worker.train(batch, NLL())
        copy_in, num_left = device.copy_in, 0

        def fails_once(copies):
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                raise OSError("the link is gone")
            return copy_in(copies)

        monkeypatch.setattr(device, "copy_in", fails_once)
        for failing in (2, 7):
            for worker in (clean, hurt):
                worker.forward_backward(batch, NLL())
            assert kept(hurt)
            num_left = failing
            with pytest.raises(OSError, match="the link is gone"):
                hurt.get_reference_logprobs(batch)
            assert torch.equal(clean.get_logprobs(batch), hurt.get_logprobs(batch))
            hook = forward_hook_on_layer(hurt, 5, RaisesOnce(torch.OutOfMemoryError("no memory")))
            assert torch.equal(clean.get_reference_logprobs(batch), hurt.get_reference_logprobs(batch))
            hook.remove()
            assert torch.equal(clean.get_logprobs(batch), hurt.get_logprobs(batch))
            assert clean.optim_step() == hurt.optim_step()
        assert_equal(full_params(hurt), full_params(clean))
