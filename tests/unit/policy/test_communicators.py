"""When communicators are suspended and resumed, by a library that stands in for NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nccl_stand_in import BROKEN, StandIn, are_suspended, build_stand_in
from toy_training import Training

from nemo_offload_rl.policy import communicators
from nemo_offload_rl.policy.communicators import Communicators, Nccl
from nemo_offload_rl.residency import Phase, ResidencyError, totals

CPU = torch.device("cpu")


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(build_stand_in(tmp_path))


def of_numbers(stand_in: StandIn, *numbers: int) -> Communicators:
    return Communicators(stand_in.nccl, CPU, lambda: numbers)


def test_they_are_suspended_once_and_resumed_once_in_the_same_order(stand_in: StandIn) -> None:
    found = of_numbers(stand_in, 3, 1, 2)
    found.resume()
    assert stand_in.calls() == []
    assert (found.suspend(), found.suspend()) == (6000, 0)
    found.resume()
    found.resume()
    assert stand_in.calls() == ["suspend 3", "suspend 1", "suspend 2", "resume 3", "resume 1", "resume 2"]
    assert found.suspend() == 6000


def test_those_that_appear_later_are_suspended_the_next_time(stand_in: StandIn) -> None:
    numbers = [1]
    found = Communicators(stand_in.nccl, CPU, lambda: numbers)
    found.suspend()
    numbers.append(2)
    found.resume()
    found.suspend()
    assert stand_in.calls() == ["suspend 1", "resume 1", "suspend 1", "suspend 2"]


def test_the_body_of_resumed_has_them_whatever_they_were_before(stand_in: StandIn) -> None:
    found = of_numbers(stand_in, 1)
    with found.resumed():
        assert stand_in.calls() == []
    assert not are_suspended(found)
    found.suspend()
    with found.resumed():
        assert stand_in.calls() == ["suspend 1", "resume 1"]
    assert stand_in.calls() == ["suspend 1", "resume 1", "suspend 1"]
    with pytest.raises(RuntimeError, match="cannot be written"), found.resumed():
        raise RuntimeError("the export cannot be written")
    assert are_suspended(found)


def test_only_generation_has_them_suspended_and_its_report_has_their_bytes(stand_in: StandIn) -> None:
    training, found = Training(), of_numbers(stand_in, 1, 2)
    training.step()
    for phase in (
        Phase.REFIT,
        Phase.GENERATION,
        Phase.GENERATION,
        Phase.LP_INFERENCE,
        Phase.TRAINING,
        Phase.GENERATION,
    ):
        report = found.enter(training.manager, phase)
        assert are_suspended(found) == (phase is Phase.GENERATION)
    assert stand_in.calls() == ["suspend 1", "suspend 2", "resume 1", "resume 2", "suspend 1", "suspend 2"]
    assert report.group("communicators").bytes_freed == 3000
    assert totals([report])["bytes_freed"] == report.bytes_freed >= 3000


def test_without_a_library_nothing_is_looked_for_and_no_report_has_them() -> None:
    training = Training()
    found = Communicators(None, CPU, lambda: pytest.fail("looked for communicators"))
    report = found.enter(training.manager, Phase.GENERATION)
    assert "communicators" not in report.groups
    assert found.suspend() == 0
    found.resume()


def test_a_call_that_fails_ends_in_one_line_with_the_reason_of_nccl(stand_in: StandIn) -> None:
    found = of_numbers(stand_in, 1, BROKEN)
    found.suspend()
    with pytest.raises(ResidencyError, match=r"ncclCommResume failed with 1 \(Cuda failure 2 'out of memory'\); set "):
        found.resume()
    twice = of_numbers(stand_in, 2, 2)
    with pytest.raises(
        ResidencyError, match=r"with 5 \(MemManager: Already suspended; NCCL does not .* since a split\)"
    ):
        twice.suspend()


def test_a_library_that_nothing_has_loaded_is_not_loaded() -> None:
    with pytest.raises(ResidencyError, match=r"torch has not loaded libnccl-of-nobody.so; set policy.suspend_nccl"):
        Nccl("libnccl-of-nobody.so")


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL")
def test_the_version_is_that_of_the_library_that_torch_calls() -> None:
    version = communicators.loaded_nccl()
    assert version is not None and version >= (2, 0, 0)
    calls = Nccl()._library
    has_calls = all(hasattr(calls, name) for name in ("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats"))
    assert has_calls == (version >= communicators.SUSPENDING_NCCL)
    assert hasattr(calls, "ncclGetLastError")


def test_groups_of_gloo_have_no_communicators(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.new_group([0])
        assert communicators.process_communicators() == []
    finally:
        dist.destroy_process_group()
