"""A reference in a file: what it takes, what is left of it, and what happens where it cannot be read."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from deferred_device import DeferredDevice
from fake_cuda import FakeRuntime, make_cuda_device
from open_files import open_files
from toy_training import Training, assert_bitwise_equal

from nemo_offload_rl.residency import (
    CpuDevice,
    DeviceOutOfMemoryError,
    HostArena,
    Phase,
    ResidencyError,
    disk_problem,
    staging_bytes,
)
from nemo_offload_rl.residency.device import pieces
from nemo_offload_rl.residency.device.device import Room
from nemo_offload_rl.residency.state import disk_copy
from nemo_offload_rl.residency.state.disk_copy import DiskCopy

STEP = (Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE)


def with_reference(folder: Path, device: CpuDevice, **changes) -> tuple[Training, dict[str, torch.Tensor]]:
    """Training that has passed through each phase once, and its first parameters."""
    training = Training(device=device, verify=True, **changes)
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference", folder)
    initial = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.step()
    for phase in STEP:
        training.manager.enter(phase)
    return training, initial


def test_the_file_has_no_name_and_its_memory_is_two_pieces_and_closing_frees_both(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_copy, "PIECE_BYTES", 512)
    training, _ = with_reference(tmp_path, CpuDevice())
    assert training.manager.host_bytes()["reference"] == 2 * 512
    assert list(tmp_path.iterdir()) == []
    (file,) = open_files(tmp_path)
    assert file.stat().st_size == 512 * (2 + 4)  # a weight of two blocks, and four small storages
    arenas = training.manager._arenas
    training.manager.close()
    assert open_files(tmp_path) == []
    assert arenas.reserved_bytes == 0


@pytest.mark.parametrize(("num_bytes", "staging"), [(1, 1024), (4096, 4096), (5000, 5120), (1 << 40, 128 << 20)])
def test_a_small_copy_takes_no_more_than_itself_in_blocks_and_a_large_one_two_pieces(num_bytes, staging):
    assert staging_bytes(num_bytes) == staging


@pytest.mark.parametrize(
    "device", [CpuDevice(), DeferredDevice(), DeferredDevice(free_bytes=0)], ids=["", "ahead", "late"]
)
@pytest.mark.parametrize("left_bytes", [0, 1200])
def test_a_file_that_ends_early_leaves_the_policy_as_it_was(tmp_path, monkeypatch, device, left_bytes):
    monkeypatch.setattr(disk_copy, "PIECE_BYTES", 512)
    training, _ = with_reference(tmp_path, device)
    training.manager.enter(Phase.TRAINING)
    own = {name: value.clone() for name, value in training.model.state_dict().items()}
    (file,) = open_files(tmp_path)
    os.truncate(file, left_bytes)
    training.manager.enter(Phase.LP_INFERENCE)
    for _ in range(2):
        with pytest.raises(ResidencyError, match=r"the file of 'reference' in .* could not be read") as raised:
            training.manager.swapped_in("reference").__enter__()
        assert "\n" not in str(raised.value)
        assert_bitwise_equal(dict(training.model.state_dict()), own)
    plain = Training()
    plain.step()
    for each in (training, plain):
        each.step()
    with training.manager.checkpoint_view():
        assert_bitwise_equal(training.contents(), plain.contents())
    training.manager.close()


def test_an_error_of_the_disk_in_the_last_piece_is_raised_where_the_reference_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_copy, "PIECE_BYTES", 512)
    training, initial = with_reference(tmp_path, DeferredDevice())
    preadv = os.preadv

    def fail_late(fd, buffers, offset):
        if offset >= 512 * 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail_late)
        training.manager.enter(Phase.TRAINING)
        own = {name: value.clone() for name, value in training.model.state_dict().items()}
        training.manager.enter(Phase.LP_INFERENCE)  # reads ahead, and fails
        training.manager.enter(Phase.TRAINING)  # has no use for it
        training.manager.enter(Phase.LP_INFERENCE)
        with pytest.raises(ResidencyError, match="could not be read: Input/output error; choose"):
            training.manager.swapped_in("reference").__enter__()
        assert_bitwise_equal(dict(training.model.state_dict()), own)
    with training.manager.swapped_in("reference"):
        assert_bitwise_equal(dict(training.model.state_dict()), initial)
    assert_bitwise_equal(dict(training.model.state_dict()), own)
    training.manager.close()


def test_entering_a_phase_does_not_wait_for_the_disk_and_closing_does(tmp_path, monkeypatch):
    training, initial = with_reference(tmp_path, DeferredDevice())
    training.manager.enter(Phase.TRAINING)
    may_read, preadv = threading.Event(), os.preadv

    def late(fd, buffers, offset):
        assert may_read.wait(300)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", late)
    training.manager.enter(Phase.LP_INFERENCE)
    training.outputs()
    may_read.set()
    with training.manager.swapped_in("reference"):
        assert_bitwise_equal(dict(training.model.state_dict()), initial)
    training.manager.close()


def test_parameters_without_a_host_copy_have_the_reference_beside_them_or_are_refused(tmp_path, monkeypatch):
    training, initial = with_reference(tmp_path, DeferredDevice(free_bytes=0), resident_groups=frozenset({"params"}))
    own = {name: value.clone() for name, value in training.model.state_dict().items()}
    with training.manager.swapped_in("reference"):
        assert_bitwise_equal(dict(training.model.state_dict()), initial)
    assert training.manager.host_bytes()["params"] == 0
    training.manager.enter(Phase.TRAINING)
    training.manager.enter(Phase.LP_INFERENCE)

    def full(wanted: list[Room]) -> None:
        raise DeviceOutOfMemoryError("somebody else took it")

    monkeypatch.setattr(training.manager._device, "allocate", full)
    with pytest.raises(DeviceOutOfMemoryError, match=r"both have to be on the device at once.*reference_dir=null"):
        training.manager.swapped_in("reference").__enter__()
    assert_bitwise_equal(dict(training.model.state_dict()), own)


@pytest.mark.parametrize("staged_below", [0, 4 << 20], ids=["alone", "staged"])
def test_copies_through_streams_from_two_threads_change_no_bit(tmp_path, monkeypatch, staged_below):
    monkeypatch.setattr(pieces, "STAGED_BELOW_BYTES", staged_below)
    monkeypatch.setattr(disk_copy, "PIECE_BYTES", 512)
    runtime = FakeRuntime()
    device = make_cuda_device(monkeypatch, runtime)
    moved, plain = Training(device=device, read_dtype=torch.bfloat16), Training()
    moved.manager.enter(Phase.LP_INFERENCE)
    moved.manager.snapshot("params", "reference", tmp_path)
    initial = moved.state_as_read(torch.bfloat16)
    for _ in range(4):
        moved.step()
        plain.step()
        for phase in STEP:
            moved.manager.enter(phase)
        assert torch.equal(moved.outputs(), plain.outputs())
        with moved.manager.swapped_in("reference"):
            assert_bitwise_equal(dict(moved.model.state_dict()), initial)
    with moved.manager.checkpoint_view():
        assert_bitwise_equal(moved.contents(), plain.contents())
    reports = moved.manager.reports.drain()
    assert all(report.transfer_s >= 0 and report.exposed_s >= 0 for report in reports)
    moved.manager.close()
    assert runtime.registered == {}


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_is_an_error_before_anything_is_copied_and_leaves_nothing(tmp_path, monkeypatch):
    training = Training()
    training.manager.enter(Phase.LP_INFERENCE)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(ResidencyError, match="could not be written: No space left on device; choose another"):
            training.manager.snapshot("params", "reference", tmp_path)
    assert open_files(tmp_path) == []
    with pytest.raises(ResidencyError, match="could not be made: No such file or directory"):
        training.manager.snapshot("params", "reference", tmp_path / "nowhere")
    training.manager.close()  # nothing is in use


def test_no_file_is_left_where_there_is_no_host_memory_for_the_pieces(tmp_path):
    arena = HostArena()
    arena.alloc = lambda *_: (_ for _ in ()).throw(MemoryError("none"))
    with pytest.raises(MemoryError):
        DiskCopy("reference", tmp_path, 4096, arena)
    assert open_files(tmp_path) == []


def test_a_folder_is_refused_that_is_none_or_full_or_in_main_memory(tmp_path):
    assert disk_problem(tmp_path, 1 << 20) is None
    assert disk_problem(tmp_path / "nowhere", 0) == f"{tmp_path}/nowhere is no folder"
    assert "GiB free of the 1048576.00 GiB that are needed" in disk_problem(tmp_path, 1 << 50)
    assert disk_problem(Path("/dev/shm"), 0) == "/dev/shm is main memory (tmpfs)"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    assert disk_problem(tmp_path, 0) == f"{tmp_path} cannot be written to"
