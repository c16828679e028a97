"""The invariants of the residency manager (docs/design/residency.md lists them by the same numbers)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import SimulatedDevice
from torch.multiprocessing.reductions import StorageWeakRef
from toy_training import Training, assert_bitwise_equal
from toy_training import settings as plan_settings

from nemo_offload_rl.residency import (
    CpuDevice,
    DeviceOutOfMemoryError,
    OpenStepError,
    Phase,
    Placement,
    ResidencyError,
    ResidencyManager,
    StateGroup,
    resolve_plan,
)

PHASES = st.lists(st.sampled_from(list(Phase)), min_size=1, max_size=12)
FLAGS = st.fixed_dictionaries(
    {
        "colocated": st.booleans(),
        "use_pinned_optimizer_offload": st.booleans(),
        "offload_optimizer_states_for_logprob": st.booleans(),
        "offload_optimizer_states": st.booleans(),
    }
)


@settings(max_examples=60)
@given(phases=PHASES, flags=FLAGS, steps=st.lists(st.booleans(), min_size=12, max_size=12))
def test_any_phase_sequence_with_steps_in_between_leaves_the_same_bits_as_plain_training(phases, flags, steps):
    """Invariant 1."""
    moved, plain = Training(**flags), Training()
    for phase, with_step in zip(phases, steps, strict=False):
        moved.manager.enter(phase)
        if with_step:
            moved.step()
            plain.step()
    moved.manager.enter(Phase.TRAINING)
    with moved.manager.checkpoint_view():
        assert_bitwise_equal(moved.contents(), plain.contents())


@settings(max_examples=60)
@given(phases=PHASES, flags=FLAGS)
def test_the_observed_peak_is_the_estimators_and_stays_under_a_capacity_of_exactly_that(phases, flags):
    """Invariant 2."""
    reference = Training(**flags)
    reference.step()
    reference.manager.enter(Phase.OPTIM_STEP)
    sizes = reference.manager.device_bytes()
    probe = Training(**flags)
    probe.step()
    probe.manager.enter(Phase.OPTIM_STEP)
    plan = probe.manager.plan
    expected = plan.device_bytes(sizes, Phase.OPTIM_STEP)
    device = SimulatedDevice(capacity_bytes=expected)
    training = Training(device=device, **flags)
    training.step()
    training.manager.enter(Phase.OPTIM_STEP)
    for phase in phases:
        training.manager.enter(phase)
        if training.manager.location("grads") is Placement.DEVICE:
            training.backward()
            training.manager.step_closed()
        assert sum(training.manager.device_bytes().values()) <= plan.device_bytes(sizes, phase)
    assert device.peak_bytes == expected


def test_entering_the_same_phase_moves_no_byte():
    """Invariant 3, first half."""
    training = Training()
    training.step()
    for phase in Phase:
        training.manager.enter(phase)
        again = training.manager.enter(phase)
        assert again.bytes_moved == 0
        assert again.bytes_freed == 0


def test_a_clean_group_leaves_without_a_copy_and_a_written_one_is_copied_again():
    """Invariant 3, second half."""
    training = Training()
    training.step()
    training.manager.enter(Phase.REFIT)
    first = training.manager.enter(Phase.GENERATION)
    assert first.groups["params"].bytes_out > 0
    training.manager.enter(Phase.LP_INFERENCE)
    clean = training.manager.enter(Phase.GENERATION)
    assert clean.bytes_out == 0
    assert clean.groups["params"].bytes_clean == first.groups["params"].bytes_out
    training.step()
    training.manager.enter(Phase.REFIT)
    assert training.manager.enter(Phase.GENERATION).groups["params"].bytes_out == first.groups["params"].bytes_out


@pytest.mark.parametrize("num_good", range(6))
def test_running_out_of_device_memory_in_the_middle_puts_everything_back(num_good):
    """Invariant 4: the transition is undone, the error is raised, and a later try succeeds."""
    device = SimulatedDevice(capacity_bytes=1 << 20)
    training, plain = Training(device=device), Training()
    training.step()
    plain.step()
    training.manager.enter(Phase.REFIT)
    training.manager.enter(Phase.GENERATION)
    device.fail_after_allocations = num_good
    with pytest.raises(DeviceOutOfMemoryError):
        training.manager.enter(Phase.TRAINING)
    assert training.manager.phase is Phase.GENERATION
    assert training.manager.device_bytes()["params"] == 0
    assert device.used_bytes() == 0
    device.fail_after_allocations = None
    training.step()
    plain.step()
    assert_bitwise_equal(training.contents(), plain.contents())


def test_a_failure_that_cannot_be_undone_makes_the_manager_refuse(monkeypatch):
    """Invariant 4, the other way out."""
    device = SimulatedDevice(capacity_bytes=1 << 20)
    training = Training(device=device, offload_optimizer_states=True)
    training.step()
    training.manager.enter(Phase.REFIT)
    training.manager.enter(Phase.GENERATION)
    device.fail_after_allocations = 1

    def broken(storage: torch.UntypedStorage) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(device, "release", broken)
    with pytest.raises(DeviceOutOfMemoryError):
        training.manager.enter(Phase.TRAINING)
    with pytest.raises(ResidencyError, match=r"set to fail.*could not be undone.*the device is gone"):
        training.manager.enter(Phase.LP_INFERENCE)
    with pytest.raises(ResidencyError, match="a checkpoint's state"), training.manager.checkpoint_view():
        pytest.fail("lost state was shown to a checkpoint")


@pytest.mark.parametrize("phase", [Phase.LP_INFERENCE, Phase.REFIT, Phase.GENERATION])
def test_dropping_gradients_of_an_open_step_is_refused_with_step_group_and_mend(phase):
    """Invariant 5."""
    training = Training()
    training.step()
    training.manager.enter(Phase.TRAINING)
    training.backward()
    before = [parameter.grad.clone() for parameter in training.model.parameters()]
    with pytest.raises(OpenStepError, match=r"'grads'.* step 2: .*optim_step first"):
        training.manager.enter(phase)
    for parameter, grad in zip(training.model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, grad)
    training.optim_step()
    training.manager.enter(phase)


def test_parameters_and_optimizer_keys_keep_their_identity_and_views_stay_views():
    """Invariant 6."""
    training = Training()
    training.step()
    parameters = list(training.model.parameters())
    view = training.model.first.weight.detach()[2:5]
    moments = [state["exp_avg"] for state in training.optimizer.state.values()]
    for phase in (Phase.REFIT, Phase.GENERATION, Phase.TRAINING, Phase.OPTIM_STEP):
        training.manager.enter(phase)
    assert all(a is b for a, b in zip(parameters, training.model.parameters(), strict=True))
    assert list(training.optimizer.state) == parameters
    assert all(a is s["exp_avg"] for a, s in zip(moments, training.optimizer.state.values(), strict=True))
    with torch.no_grad():
        training.model.first.weight[3, 0] = 42.0
    assert view[1, 0] == 42.0


def test_tied_tensors_and_tensors_of_two_groups_move_once():
    """Invariant 7."""
    training = Training()
    state = training.model.state_dict()
    unique_bytes = sum(t.nbytes for name, t in state.items() if name != "second.weight")
    training.manager.enter(Phase.REFIT)
    report = training.manager.enter(Phase.GENERATION)
    assert report.groups["params"].bytes_out == unique_bytes
    assert training.model.second.weight is training.model.first.weight

    shared = Training()
    shared.manager._states["optimizer"].group = StateGroup("optimizer", lambda: shared.model.named_parameters())
    shared.manager.enter(Phase.REFIT)
    assert shared.manager.enter(Phase.GENERATION).bytes_out == unique_bytes


def test_a_checkpoint_taken_while_offloaded_equals_one_taken_resident_and_moves_nothing_for_good():
    """Invariant 8."""
    offloaded, resident = Training(), Training()
    for training in (offloaded, resident):
        training.step()
    offloaded.manager.enter(Phase.REFIT)
    offloaded.manager.enter(Phase.GENERATION)
    with offloaded.manager.checkpoint_view():
        assert_bitwise_equal(offloaded.contents(), resident.contents())
    assert offloaded.manager.device_bytes() == {"params": 0, "grads": 0, "optimizer": 0}
    with pytest.raises(OSError, match="disk full"), offloaded.manager.checkpoint_view():
        raise OSError("disk full")
    assert offloaded.manager.device_bytes() == {"params": 0, "grads": 0, "optimizer": 0}
    assert offloaded.manager.phase is Phase.GENERATION


def test_a_swapped_in_snapshot_shows_its_bytes_inside_and_the_policys_own_after_an_exception():
    training, plain = Training(), Training()
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference")
    initial = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.step()
    plain.step()
    training.manager.enter(Phase.LP_INFERENCE)
    with pytest.raises(ValueError, match="reference forward"), training.manager.swapped_in("reference"):
        assert_bitwise_equal(dict(training.model.state_dict()), initial)
        raise ValueError("reference forward")
    assert_bitwise_equal(training.contents(), plain.contents())
    training.step()
    plain.step()
    assert_bitwise_equal(training.contents(), plain.contents())


def test_the_reference_costs_no_copy_out_when_the_policys_host_copy_is_right():
    training = Training()
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference")
    training.step()
    for phase in (Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE):
        training.manager.enter(phase)
    training.manager.reports.drain()
    with training.manager.swapped_in("reference"):
        pass
    (report,) = training.manager.reports.drain()
    assert report.bytes_out == 0
    assert report.bytes_in == 2 * training.manager.device_bytes()["params"]


def test_swapping_while_parameters_are_on_the_host_is_refused():
    training = Training()
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference")
    training.manager.enter(Phase.GENERATION)
    with pytest.raises(ResidencyError, match="'params' is host"), training.manager.swapped_in("reference"):
        pass


def test_optimizer_state_that_appears_or_is_replaced_later_moves_too_and_leaves_no_host_copy_behind():
    training = Training()
    training.manager.enter(Phase.REFIT)
    training.manager.enter(Phase.GENERATION)
    assert training.manager.host_bytes()["optimizer"] == 0
    training.step()
    training.manager.enter(Phase.REFIT)
    size = training.manager.host_bytes()["optimizer"]
    assert size == 2 * sum(p.nbytes for p in training.model.parameters())
    with training.manager.checkpoint_view():
        saved = training.optimizer.state_dict()
        training.optimizer.load_state_dict(saved)
        training.manager.mark_written("optimizer")
    del saved
    training.manager.enter(Phase.TRAINING)
    training.manager.enter(Phase.REFIT)
    assert training.manager.host_bytes()["optimizer"] == size


def test_nothing_leaves_the_device_for_refit_or_generation_when_generation_has_its_own():
    training = Training(colocated=False)
    training.step()
    before = training.manager.device_bytes()
    for phase in (Phase.REFIT, Phase.GENERATION):
        report = training.manager.enter(phase)
        assert report.bytes_moved == report.bytes_freed == 0
    assert training.manager.device_bytes() == before


def test_all_host_memory_is_given_back_at_close():
    training = Training()
    training.step()
    training.manager.enter(Phase.GENERATION)
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference")
    arena = training.manager._arena
    assert arena.reserved_bytes > 0
    training.manager.close()
    assert arena.reserved_bytes == 0
    with pytest.raises(ResidencyError, match="closed"):
        training.manager.enter(Phase.TRAINING)


def test_a_group_that_left_keeps_no_storage_alive_that_its_owner_drops():
    tensors = {"first": torch.ones(1000)}
    group = StateGroup("optimizer", lambda: tensors.items())
    manager = ResidencyManager(plan=resolve_plan(plan_settings()), groups=[group], device=CpuDevice())
    taken_bytes = []
    for _ in range(3):
        manager.enter(Phase.TRAINING)
        manager.enter(Phase.GENERATION)
        taken_bytes.append(manager.host_bytes()["optimizer"])
        held = StorageWeakRef(tensors["first"].untyped_storage())
        manager.enter(Phase.TRAINING)
        tensors["first"] = torch.ones(1000)
        assert held.expired()
    assert taken_bytes == [4000] * 3
