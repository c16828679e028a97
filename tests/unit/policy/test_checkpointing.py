"""Saves of a real worker: what is in them, what they keep, and how they fail."""

from __future__ import annotations

import gc
import pickle
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from closeness import assert_close
from policy_cases import (
    NLL,
    ONE_RANK,
    assert_equal,
    full_optimizer,
    full_params,
    make_batch,
    make_settings,
    run_ranks,
    save_family,
    shard,
    torch_optimizer,
)
from resume_cases import goes_on_bitwise, train_steps, weights_of
from tiny_models import qwen3_config, save_model_folder
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.backends.dtensor import parallel
from nemo_offload_rl.backends.dtensor.checkpoint import DTensorState
from nemo_offload_rl.backends.saving import dcp
from nemo_offload_rl.backends.saving.dcp import state_tensors
from nemo_offload_rl.errors import CheckpointError
from nemo_offload_rl.keys.policy import SchedulerPhaseConfig
from nemo_offload_rl.policy import checkpointing
from nemo_offload_rl.policy import worker as worker_module
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.protocols.saving import HostCopies
from nemo_offload_rl.residency import CpuDevice, local_tensor, storage_key
from nemo_offload_rl.utils.checksums import file_checksums, files_below

NUM_STEPS = 4
WARM_UP = SchedulerPhaseConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.1, "total_iters": 3})
ADAMW = torch_optimizer("AdamW", lr=1e-3, weight_decay=0.1, decay_norm_and_bias=False)
COMMON = {
    "scheduler": (WARM_UP,),
    "hf_config_overrides": {"attention_dropout": 0.2},
    "dropout": True,
    "max_grad_norm": 0.5,
    "optimizer": ADAMW,
}

SETTINGS = {
    "everything moves": {},
    "pageable": {"use_pinned_optimizer_offload": False},
    "optimizer away for logprobs": {"offload_optimizer_states_for_logprob": True},
    "optimizer on the device in its step only": {"offload_optimizer_states": True},
    "optimizer stays": {"residency_overrides": {"optimizer": "device"}},
    "parameters stay": {"residency_overrides": {"params": "device"}},
    "not colocated": {"colocated": False},
    "copies waited for": {"residency_overlap": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3-tied")
    save_family(path, "qwen3-tied")
    return path


@contextmanager
def make_worker(folder, process=ONE_RANK, **changes):
    worker = PolicyWorker(make_settings(folder, **COMMON | changes), process, keep_reference=False)
    try:
        yield worker
    finally:
        worker.shutdown()


@pytest.fixture(scope="module")
def uninterrupted(folder):
    with make_worker(folder, colocated=False, residency_overlap=False) as worker:
        return train_steps(worker, 1, NUM_STEPS)


@pytest.mark.parametrize("name", SETTINGS)
def test_two_steps_a_resume_and_two_more_are_four_steps_bit_by_bit(folder, tmp_path, uninterrupted, name):
    goes_on_bitwise(lambda: make_worker(folder, **SETTINGS[name]), tmp_path, uninterrupted, in_background=True)


@pytest.mark.parametrize("in_background", [False, True], ids=["waited for", "in the background"])
def test_the_same_with_everything_on_the_device(folder, tmp_path, uninterrupted, in_background):
    goes_on_bitwise(
        lambda: make_worker(folder), tmp_path, uninterrupted, in_background=in_background, from_training=True
    )


def test_the_same_with_a_save_that_is_waited_for(folder, tmp_path, uninterrupted):
    goes_on_bitwise(lambda: make_worker(folder), tmp_path, uninterrupted, in_background=False)


def test_an_optimizer_that_makes_its_states_by_changing_parameters_does_so_before_they_are_read(
    folder, tmp_path, monkeypatch
):
    with make_worker(folder) as worker:
        train_steps(worker, 1, 2)
        worker.save_checkpoint(tmp_path / "saved")
        expected = weights_of(worker)
    make = DTensorState.make_optimizer_state

    @torch.no_grad()
    def disturb(state, group, saved):  # as Megatron's hybrid optimizer, which runs on a GPU only
        make(state, group, saved)
        for _, parameter in state.parameters:
            parameter.add_(1.0)

    monkeypatch.setattr(DTensorState, "make_optimizer_state", disturb)
    with make_worker(folder) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        assert_equal(weights_of(worker), expected)


class GatedSave:
    """A save that writes when the test lets it."""

    def __init__(self, staged, error=None):
        self.gate = threading.Event()
        self.staged = staged
        self.error = error

    def write(self):
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.staged.write()

    def finish(self):
        self.staged.finish()

    @property
    def checksums(self):
        return self.staged.checksums


def start_gated(worker, path, error=None):
    """A save in the background that waits for its gate."""
    made = []

    def stage(folder, reader):
        made.append(GatedSave(worker._backend.stage_save(folder, reader), error))
        return made[0]

    worker._saver.start(path, stage, True)
    return made[0].gate


def test_a_save_in_the_background_holds_no_state_and_sees_no_later_step(folder, tmp_path):
    with make_worker(folder) as worker:
        train_steps(worker, 1, 2)
        saved = weights_of(worker)
        worker.prepare_for_training()
        optimizer = full_optimizer(worker)
        gate = start_gated(worker, tmp_path / "saved")
        assert not worker.save_is_done()
        later = train_steps(worker, 3, 4)
        assert not torch.equal(later.weights["model.norm.weight"], saved["model.norm.weight"])
        # Everything left for the engine while the save was still to be written.
        assert sum(worker.residency.device_bytes().values()) == 0

        states = [state for each in worker._backend._optimizer.state.values() for state in each.values()]
        refs = [StorageWeakRef(local_tensor(state).untyped_storage()) for state in states if state.dim()]
        worker._backend._optimizer.state.clear()
        del states
        worker.residency_reports()  # a transition that nobody asked about still lists its storages
        gc.collect()
        assert all(ref.expired() for ref in refs)
        gate.set()
        checksums = worker.finish_save()
    assert checksums == file_checksums(tmp_path / "saved", files_below(tmp_path / "saved"))  # of what was written
    with make_worker(folder) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        assert_equal(weights_of(worker), saved)
        assert_equal(full_optimizer(worker), optimizer)


@pytest.mark.parametrize("phase", ["training", "generation"])
def test_what_is_on_the_host_is_written_from_there_and_the_next_step_waits_for_it(folder, tmp_path, phase):
    with make_worker(folder, offload_optimizer_states=True, offload_optimizer_states_chunk_mib=0.25) as worker:
        train_steps(worker, 1, 2)
        saved, optimizer = weights_of(worker), full_optimizer(worker)
        if phase == "training":
            worker.prepare_for_training()
        params_bytes = worker.residency.device_bytes()["params"]
        gate = start_gated(worker, tmp_path / "saved")
        # Beside parameters Adam's counts and random states are copied.
        assert params_bytes <= worker._saver._copies.num_bytes < params_bytes + (1 << 15)
        assert (params_bytes > 0) == (phase == "training")
        step, was_open = worker._backend.optim_step, []

        def noticing(streamed):
            was_open.append(gate.is_set())
            return step(streamed)

        worker._backend.optim_step = noticing
        threading.Timer(0.5, gate.set).start()
        train_steps(worker, 3, 4)
        assert was_open == [True, True]
        worker.finish_save()
    with make_worker(folder) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        assert_equal(weights_of(worker), saved)
        assert_equal(full_optimizer(worker), optimizer)


def test_a_save_in_the_background_asks_for_all_that_it_copies_and_once_for_what_it_keeps(folder, tmp_path, monkeypatch):
    """States of an optimizer on the host too: residency neither moves them nor has a copy."""

    class WithoutOptimizer(CpuDevice):
        others = frozenset()

        def owns(self, storage):
            return storage_key(storage) not in self.others

    device = WithoutOptimizer()
    monkeypatch.setattr(worker_module, "make_device", lambda _: device)
    with make_worker(folder) as worker:
        train_steps(worker, 1, 1)
        worker.prepare_for_training()
        states = [state for each in worker._backend._optimizer.state.values() for state in each.values()]
        device.others = frozenset(storage_key(local_tensor(state).untyped_storage()) for state in states)
        reserve, reserved = checkpointing.reserve_host_memory, []

        def noticing(parts, limits):
            reserved.append(sum(parts.values()))
            return reserve(parts, limits)

        monkeypatch.setattr(checkpointing, "reserve_host_memory", noticing)
        for number in range(2):
            worker.start_save(tmp_path / f"saved{number}", in_background=True)
            worker.finish_save()
        held_bytes = worker._saver._copies.num_bytes
        assert reserved == [held_bytes, 0]
        assert held_bytes > sum(worker.residency.device_bytes().values())


def test_a_worker_that_ends_waits_for_a_save_of_its_host_memory(folder, tmp_path):
    with make_worker(folder) as worker:
        train_steps(worker, 1, 1)
        gate = start_gated(worker, tmp_path / "saved")
        threading.Timer(0.3, gate.set).start()
    assert worker.save_is_done()
    assert worker._saver._job.error is None


def test_a_second_save_waits_for_the_first(folder, tmp_path):
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        gate = start_gated(worker, tmp_path / "first")
        threading.Timer(0.2, gate.set).start()
        worker.start_save(tmp_path / "second", in_background=True)
        assert (tmp_path / "first").is_dir() and not (tmp_path / "second").exists()
        worker.finish_save()
        assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}
        worker.finish_save()


def test_a_writer_that_fails_is_told_with_its_cause_and_leaves_nothing(folder, tmp_path):
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        for error, kind, text in (
            (OSError(122, "Disk quota exceeded"), CheckpointError, r"saved cannot be written \(Disk quota exceeded\)"),
            (ZeroDivisionError("a bug"), ZeroDivisionError, "a bug"),
        ):
            start_gated(worker, tmp_path / "saved", error).set()
            with pytest.raises(kind, match=text):
                worker.finish_save()
            assert list(tmp_path.iterdir()) == []
        worker.save_checkpoint(tmp_path / "saved")


def test_without_host_memory_for_a_copy_a_save_is_waited_for(folder, tmp_path, caplog, monkeypatch):
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        monkeypatch.setattr(HostCopies, "missing_bytes", lambda *_: 1 << 60)
        worker.start_save(tmp_path / "saved", in_background=True)
        assert worker.save_is_done()
        worker.finish_save()
        assert "the step waits for this save" in caplog.text
        assert (tmp_path / "saved" / ".metadata").is_file()


@pytest.mark.parametrize(("name", "reason"), [(".metadata", "damaged or foreign"), ("__0_0.distcp", "damaged")])
def test_a_truncated_or_foreign_file_is_refused_with_its_path(folder, tmp_path, name, reason):
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        worker.save_checkpoint(tmp_path / "saved")
        path = tmp_path / "saved" / name
        data = path.read_bytes()
        for content in (data[: len(data) // 2], b"", b"another format altogether"):
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match=reason) as caught:
                worker.load_checkpoint(tmp_path / "saved")
            assert str(tmp_path / "saved") in str(caught.value)
            assert "\n" not in str(caught.value)


class Code:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_that_names_code_is_refused_and_the_code_not_run(folder, tmp_path, monkeypatch):
    saved, ran = tmp_path / "saved", tmp_path / "ran"
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        worker.save_checkpoint(saved)
        metadata = dcp._read_metadata(saved)
        elsewhere = replace(next(iter(metadata.storage_data.values())), relative_path="../other/__0_0.distcp")
        for content, refused in (
            (Code(ran), r"it names pathlib\.Path\.touch|it names builtins\.getattr"),
            (replace(metadata, planner_data=Code(ran)), r"\.metadata cannot be read"),
            (getattr, r"it names builtins\.getattr, which no checkpoint needs"),
            ({}, r"it holds dict"),
            (
                replace(metadata, storage_data={"a": elsewhere}),
                r"names \.\./other/__0_0\.distcp, which is outside of its folder",
            ),
        ):
            (saved / ".metadata").write_bytes(pickle.dumps(content))
            with pytest.raises(CheckpointError, match=refused) as caught:
                worker.load_checkpoint(saved)
            assert "\n" not in str(caught.value)

        values = DTensorState.values
        monkeypatch.setattr(DTensorState, "values", lambda state: {**values(state), "num_steps": Code(ran)})
        worker.save_checkpoint(tmp_path / "with code")
        monkeypatch.undo()
        with pytest.raises(CheckpointError, match=r"num_steps is damaged, or names code"):
            worker.load_checkpoint(tmp_path / "with code")
    assert not ran.exists()


def test_a_checkpoint_with_other_shapes_is_refused_by_the_first(folder, tmp_path):
    save_model_folder(tmp_path / "wide", 0, qwen3_config(tied=True, hidden_size=96))
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        worker.save_checkpoint(tmp_path / "saved")
    config = {"hf_config_overrides": {}}
    with make_worker(tmp_path / "wide", **config) as worker, pytest.raises(CheckpointError, match="instead of"):
        worker.load_checkpoint(tmp_path / "saved")


@contextmanager
def make_worker_with_a_frozen_norm(folder, monkeypatch):
    """What a model's own code may do as it is built."""
    apply_fsdp = parallel.apply_fsdp

    def freeze_and_apply(model, *args, **kwargs):
        model.causal_lm.model.norm.weight.requires_grad_(False)
        return apply_fsdp(model, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(parallel, "apply_fsdp", freeze_and_apply)
        with make_worker(folder) as worker:
            yield worker


def test_a_frozen_parameter_and_one_that_got_no_gradient_have_no_states_before_and_after_a_resume(
    folder, tmp_path, monkeypatch
):
    def hide_a_gradient(worker):
        parameters = dict(worker._backend._parameters)
        parameters["model.layers.0.input_layernorm.weight"].requires_grad_(False)

    with make_worker_with_a_frozen_norm(folder, monkeypatch) as worker:
        hide_a_gradient(worker)
        train_steps(worker, 1, 2)
        state = state_tensors(worker._backend._training_state())
        worker.save_checkpoint(tmp_path / "saved")
        expected = train_steps(worker, 3, 4)
    without = ("optimizer/model.norm.weight/", "optimizer/model.layers.0.input_layernorm.weight/")
    assert not [name for name in state if name.startswith(without)]
    with make_worker_with_a_frozen_norm(folder, monkeypatch) as worker:
        hide_a_gradient(worker)
        worker.load_checkpoint(tmp_path / "saved")
        assert state_tensors(worker._backend._training_state()).keys() == state.keys()
        after = train_steps(worker, 3, 4)
    assert after.results == expected.results
    assert_equal(after.weights, expected.weights)


def test_a_parameter_that_only_the_checkpoint_has_is_refused(folder, tmp_path):
    config = {"hf_config_overrides": {}}
    with make_worker(folder, **config) as worker:
        worker.prepare_for_training()
        worker._backend._parameters.append(("model.norm.bias", torch.nn.Parameter(torch.zeros(3))))
        worker.save_checkpoint(tmp_path / "saved")
    with make_worker(folder, **config) as worker:
        before = full_params(worker)
        with pytest.raises(CheckpointError, match=r"has model/model.norm.bias, which this run lacks"):
            worker.load_checkpoint(tmp_path / "saved")
        assert_equal(full_params(worker), before)


# -- ranks -------------------------------------------------------------------------------------------------------------


def raise_unreadable(*_: object) -> None:
    raise CheckpointError("rank 1 cannot read it")


def two_ranks_go_on(process: ProcessInfo, folder: str, root: str) -> None:
    """Load what one rank saved, train, save for one rank; and a rank that cannot write."""
    paths = Path(root)
    expected = torch.load(paths / "one.pt")
    with make_worker(folder, process) as worker:
        worker.load_checkpoint(paths / "one")
        assert_equal(full_params(worker), expected["params"])
        assert_equal(full_optimizer(worker), expected["optimizer"])
        worker.prepare_for_training()
        result = worker.train(shard(make_batch(seed=2), worker), NLL())
        assert_close(result.loss[0], expected["loss"])
        worker.start_save(paths / "two", in_background=True)
        worker.offload_after_refit()
        checksums = worker.finish_save()
        mine = {f"__{process.rank}_0.distcp"} | ({".metadata"} if process.rank == 0 else set())
        assert checksums == file_checksums(paths / "two", mine)
        state = {"params": full_params(worker), "optimizer": full_optimizer(worker)}
        if process.rank == 0:
            torch.save(state, paths / "two.pt")

        with pytest.MonkeyPatch.context() as patched:
            if process.rank == 1:
                patched.setattr(dcp._Reader, "read", raise_unreadable)
            with pytest.raises(CheckpointError, match=r"^rank 1 cannot read it$"):
                worker.load_checkpoint(paths / "two")

        error = OSError(28, "No space left on device") if process.rank == 1 else None
        start_gated(worker, paths / "full", error).set()
        with pytest.raises(CheckpointError, match=r"by rank 1 \(No space left on device\)"):
            worker.finish_save()
        assert {path.name for path in paths.iterdir()} >= {"one", "two"}
        torch.distributed.barrier()  # rank 0 removes the folder
        assert not list(paths.glob("full*"))


@pytest.mark.processes
def test_a_run_goes_on_with_another_number_of_data_parallel_ranks(folder, tmp_path):
    # Dropout draws differ with the number of ranks.
    no_dropout = {"hf_config_overrides": {}}
    with make_worker(folder, **no_dropout) as worker:
        train_steps(worker, 1, 1)
        worker.save_checkpoint(tmp_path / "one")
        state = {"params": full_params(worker), "optimizer": full_optimizer(worker)}
        worker.prepare_for_training()
        state["loss"] = worker.train(make_batch(seed=2), NLL()).loss[0]
        after = full_params(worker)
    torch.save(state, tmp_path / "one.pt")
    run_ranks(2, tmp_path, two_ranks_go_on_without_dropout, str(folder), str(tmp_path))
    two = torch.load(tmp_path / "two.pt")
    assert_close(two["params"], after)
    with make_worker(folder, **no_dropout) as worker:
        worker.load_checkpoint(tmp_path / "two")
        assert_equal(full_params(worker), two["params"])
        assert_equal(full_optimizer(worker), two["optimizer"])


def two_ranks_go_on_without_dropout(process: ProcessInfo, folder: str, root: str) -> None:
    COMMON["hf_config_overrides"] = {}
    two_ranks_go_on(process, folder, root)
