"""`policy.suspend_nccl_comms` in a worker's life: nothing communicates through the device while that is impossible.

Ranks on gloo, and a library that stands in for NCCL. On two GPUs: test_worker_two_gpus.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from nccl_stand_in import StandIn, are_suspended, build_stand_in
from policy_cases import NLL, make_batch, make_settings, one_rank_worker, run_ranks, shard, worker_of
from tiny_models import save_model_folder
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy import communicators
from nemo_offload_rl.policy.communicators import Communicators, make_communicators, nccl_problem
from nemo_offload_rl.protocols.backend import ProcessInfo

OF_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list")
CASES: dict[str, dict[str, Any]] = {
    "DTensor, FSDP over 2": {},
    "DTensor, TP over 2": {"tensor_parallel_size": 2},
    "Megatron, DP over 2": {"backend": "megatron"},
    "Megatron, TP over 2": {"backend": "megatron", "tensor_parallel_size": 2},
}


class DeviceCollectives(TorchDispatchMode):
    """Notes collectives of tensors: those of objects go through gloo, on a GPU machine too."""

    def __init__(self, found: Communicators) -> None:
        super().__init__()
        self._found = found
        self._is_of_object = False
        self.num_resumed = 0
        self.while_suspended: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and not self._is_of_object:
            if are_suspended(self._found):
                self.while_suspended.append(str(func))
            else:
                self.num_resumed += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        def of_objects(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_of_object = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_of_object = False

        wrapped = {name: partial(of_objects, getattr(dist, name)) for name in OF_OBJECTS}
        with patch.multiple(dist, **wrapped), self:
            yield


def collective_limits() -> set[float]:
    """Seconds that this rank waits for others, of all its process groups."""
    groups = list(dist.distributed_c10d._world.pg_map)
    assert len(groups) > 1
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def check_life(process: ProcessInfo, folder: str, library: str) -> None:
    limited = replace(process, collective_timeout_s=4321.0)
    for name, changes in CASES.items():
        stand_in = StandIn(Path(library))
        with worker_of(make_settings(folder, **changes), limited, keep_reference=True) as worker:
            assert collective_limits() == {4321.0}, name
            num_before = len(stand_in.calls())
            found = worker._communicators = Communicators(stand_in.nccl, torch.device("cpu"), lambda: (1, 2))
            seen = DeviceCollectives(found)
            with seen.watching():
                worker.offload_before_refit()
                worker.start_refit()
                while worker.next_bucket() is not None:
                    pass
                worker.offload_after_refit()
                saved = Path(folder).parent / name
                worker.save_checkpoint(saved)
                worker.load_checkpoint(saved)
                worker.export_hf(Path(folder).parent / f"{name}, exported")
                assert are_suspended(found), name
                batch = shard(make_batch(), worker)
                worker.prepare_for_lp_inference()
                worker.get_logprobs(batch)
                worker.get_reference_logprobs(batch)
                worker.prepare_for_training()
                worker.train(batch, NLL())
                worker.evaluate(batch, NLL())
                worker.offload_before_refit()
                list(worker.named_weights())
                worker.start_save(saved, in_background=True)
                worker.offload_after_refit()
                worker.save_is_done()
                worker.finish_save()
                worker.offload_before_refit()
                worker.offload_after_refit()
            assert seen.while_suspended == [], name
            assert seen.num_resumed > 0, name
        both = {"suspend": ["suspend 1", "suspend 2"], "resume": ["resume 1", "resume 2"]}
        times = (
            "suspend",
            "resume",
            "suspend",
            "resume",
            "suspend",
            "resume",
            "suspend",
            "resume",
            "suspend",
            "resume",
        )
        assert stand_in.calls()[num_before:] == [call for verb in times for call in both[verb]], name


@pytest.mark.processes
def test_no_rank_communicates_through_the_device_while_communicators_are_suspended(tmp_path: Path) -> None:
    save_model_folder(tmp_path / "model", 0)
    run_ranks(2, tmp_path, check_life, str(tmp_path / "model"), str(build_stand_in(tmp_path)))


def test_a_worker_on_a_cpu_refuses_to_suspend_what_it_does_not_have(tmp_path: Path) -> None:
    save_model_folder(tmp_path, 0)
    with (
        pytest.raises(ConfigError, match=r"true, but workers on a CPU have no NCCL communicators; set .*=false$"),
        one_rank_worker(tmp_path, suspend_nccl_comms=True),
    ):
        pass


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (
            (2, 28, 9),
            r"needs NCCL 2.29.7 or later, and NCCL 2.28.9 is loaded; install it .*nccl-cu\d+==2.29.7\), .*LD_PR",
        ),
        ((2, 29, 3), r"and NCCL 2.29.3 is loaded"),
        (None, r"this torch has no NCCL; set policy.suspend_nccl_comms=false"),
        ((2, 29, 7), None),
        ((2, 30, 3), None),
        ((3, 0, 0), None),
    ],
)
def test_a_gpu_worker_needs_a_library_with_the_calls(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...] | None, words: str | None
) -> None:
    monkeypatch.setattr(communicators, "loaded_nccl", lambda: version)
    settings, device = make_settings("a-model", suspend_nccl_comms=True), torch.device("cuda", 0)
    if words is None:
        assert nccl_problem({}) is None
        assert "unset that variable" in (nccl_problem({"NCCL_CUMEM_ENABLE": "0"}) or "")
        return
    with pytest.raises(ConfigError, match=words):
        make_communicators(settings, device)


def test_a_gpu_worker_refuses_where_no_engine_would_use_the_memory() -> None:
    settings = make_settings("a-model", suspend_nccl_comms=True, colocated=False)
    with pytest.raises(ConfigError, match=r"no engine on the same GPUs sleeps and wakes"):
        make_communicators(settings, torch.device("cuda", 0))
