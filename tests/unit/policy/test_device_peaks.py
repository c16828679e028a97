"""No save, load or export has more of the state on the device at a time than training has.

The state groups' bytes on the device are counted at each fourth operation of torch that may have allocated; activations
are not. In training they are counted at each 16th: what is missed there makes the bound tighter.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from policy_cases import NLL, assert_equal, full_optimizer, full_params, make_batch
from torch.utils._python_dispatch import TorchDispatchMode

# Changes of settings, and the phases in which a new worker loads.
FORMS = {
    "resident": ({"colocated": False}, ("start",)),
    "offloaded": ({}, ("generation",)),
    "streamed": ({"offload_optimizer_states": True}, ("training",)),
    "streamed in parts": (
        {"offload_optimizer_states": True, "offload_optimizer_states_chunk_mib": 0.1},
        ("start", "generation", "training"),
    ),
}
WITH_MASTERS = {"precision": "bfloat16", "bf16": True, "pipeline_dtype": "bfloat16"}


class _Census(TorchDispatchMode):
    """Remembers the most bytes that state groups had on the device at an operation, looking at each `every`-th."""

    def __init__(self, worker, every: int) -> None:
        super().__init__()
        self.worker = worker
        self.every = every
        self.peak_bytes = 0
        self.num_operations = 0

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(self.worker.residency.device_bytes().values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.num_operations += 1
            if self.num_operations % self.every == 0:
                self.look()
        return result


@contextmanager
def peak_of(worker, every: int = 4) -> Iterator[_Census]:
    with _Census(worker, every) as census:
        census.look()
        yield census
        census.look()


def peaks_of_everything_but_loading(worker, folder) -> dict[str, int]:
    with peak_of(worker, every=16) as training:
        for seed in range(2):
            worker.prepare_for_training()
            worker.train(make_batch(seed=seed), NLL())
            worker.offload_before_refit()
            worker.offload_after_refit()
            worker.prepare_for_lp_inference()
    with peak_of(worker) as others:
        worker.export_hf(folder / "from_logprobs.hf")
        worker.prepare_for_training()
        worker.export_hf(folder / "from_training.hf")
        worker.save_checkpoint(folder / "from_training")
        worker.offload_after_refit()
        worker.save_checkpoint(folder / "saved")
        worker.export_hf(folder / "from_generation.hf")
    return {"training": training.peak_bytes, "saving and exporting": others.peak_bytes}


@pytest.mark.parametrize("form", FORMS)
def test_saving_loading_and_exporting_take_no_more_of_the_device_than_training(
    make_worker, backend, folders, tmp_path, form
):
    folder, _ = folders("qwen3-tied")
    changes, phases = FORMS[form]
    changes = {**changes, **(WITH_MASTERS if backend == "megatron" else {})}
    with make_worker(folder, **changes) as worker:
        params_bytes = worker.residency.device_bytes()["params"]
        peaks = peaks_of_everything_but_loading(worker, tmp_path)
        saved = full_params(worker), full_optimizer(worker)
        worker.prepare_for_training()
        expected = worker.train(make_batch(seed=2), NLL())
        # What is loaded over states that are there already.
        with peak_of(worker) as loading:
            worker.load_checkpoint(tmp_path / "saved")
        peaks["loading again"] = loading.peak_bytes
        worker.prepare_for_training()
        assert worker.train(make_batch(seed=2), NLL()) == expected
    for phase in phases:
        with make_worker(folder, **changes) as worker:
            if phase != "start":
                worker.offload_after_refit()
            if phase == "training":
                worker.prepare_for_training()
            before = sum(worker.residency.device_bytes().values())
            with peak_of(worker) as loading:
                worker.load_checkpoint(tmp_path / "saved")
            # A model that was only just built has all of its masters on the device.
            peaks[f"loading in {phase}"] = loading.peak_bytes if loading.peak_bytes > before else 0
            assert_equal(full_params(worker), saved[0])
            assert_equal(full_optimizer(worker), saved[1])
            worker.prepare_for_training()
            assert worker.train(make_batch(seed=2), NLL()) == expected
    if form == "streamed in parts" and backend == "dtensor":
        assert peaks["training"] < 2.8 * params_bytes  # parameters, gradients, and two parts
    assert {name for name, peak in peaks.items() if peak > peaks["training"]} == set(), peaks
