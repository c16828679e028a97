"""What adapters of either backend promise: what is shared, moved, kept as the reference, and saved. CPU."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_close
from lora_cases import BFLOAT16, MARKERS, adapters_of, lora_worker
from policy_cases import ONE_RANK, assert_equal, make_batch, run_ranks, save_family
from rank_cases import planned_groups
from resume_cases import goes_on_bitwise, train_steps
from torch.distributed.checkpoint.filesystem import FileSystemReader

from nemo_offload_rl.protocols.backend import ProcessInfo

BOTH = pytest.mark.parametrize("backend", ["dtensor", "megatron"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3-tied")
    save_family(path, "qwen3-tied")
    return path


@BOTH
def test_the_frozen_base_crosses_to_the_host_once_and_comes_back_for_each_use(folder, backend):
    with lora_worker(folder, backend) as worker:
        base_bytes = worker.residency.device_bytes()["base"]
        assert base_bytes > 5 * worker.residency.device_bytes()["params"]
        held = worker.residency.device_bytes()
        train_steps(worker, 1, 1)
        held |= {"optimizer": worker.residency.host_bytes()["optimizer"]}
        planned = planned_groups(worker._settings, ONE_RANK)
        assert all(0.9 * held[name] < planned[name] <= held[name] for name in ("base", "params", "optimizer"))
        out = [report.group("base").bytes_out for report in worker.residency_reports()]
        assert sum(out) == base_bytes
        train_steps(worker, 2, 3)
        reports = worker.residency_reports()
        assert sum(report.group("base").bytes_out for report in reports) == 0
        assert sum(report.group("base").bytes_clean for report in reports) >= 2 * base_bytes
        assert sum(worker.residency.device_bytes().values()) == 0


@BOTH
def test_the_reference_is_the_model_without_adapters_and_keeps_only_them(folder, backend):
    batch = make_batch()
    with lora_worker(folder, backend, lora={"enabled": False}) as plain:
        plain.prepare_for_lp_inference()
        expected = plain.get_logprobs(batch)
    with lora_worker(folder, backend, keep_reference=True) as worker:
        assert worker.residency.host_bytes()["reference"] < worker.residency.device_bytes()["base"] / 5
        train_steps(worker, 1, 2)
        worker.prepare_for_lp_inference()
        assert torch.equal(worker.get_reference_logprobs(batch), expected)
        assert not torch.equal(worker.get_logprobs(batch), expected)


@pytest.mark.parametrize(
    ("backend", "changes"),
    [("dtensor", {}), ("megatron", {}), ("megatron", BFLOAT16)],
    ids=["dtensor", "megatron", "megatron-bf16"],
)
def test_a_checkpoint_has_adapters_and_their_optimizer_only_and_a_run_goes_on_from_it_bitwise(
    folder, tmp_path, backend, changes
):
    def make():
        if backend == "megatron":
            torch.manual_seed(0)  # it seeds the GPU, which dropout's random numbers come from there
        return lora_worker(folder, backend, lora={"dropout": 0.2}, **changes)

    with make() as worker:
        uninterrupted = train_steps(worker, 1, 4)
        num_adapters = len(adapters_of(worker))
    goes_on_bitwise(make, tmp_path, uninterrupted, in_background=True)
    metadata = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    saved = [name for name in metadata if name.startswith("model/")]
    assert len(saved) == num_adapters > 0
    assert all(MARKERS[backend] in name for name in saved)


def two_ranks(process: ProcessInfo, backend: str, folder: str, root: str) -> None:
    expected = torch.load(f"{root}/one.pt")
    with lora_worker(folder, backend, process=process) as worker:
        assert_equal(adapters_of(worker), expected["first"])
        assert_close(train_steps(worker, 1, 2).weights, expected["trained"])


@pytest.mark.processes
@BOTH
def test_two_data_parallel_ranks_begin_with_the_same_adapters_and_train_as_one(folder, tmp_path, backend):
    with lora_worker(folder, backend) as worker:
        torch.save({"first": adapters_of(worker), "trained": train_steps(worker, 1, 2).weights}, tmp_path / "one.pt")
    run_ranks(2, tmp_path, two_ranks, backend, str(folder), str(tmp_path))
