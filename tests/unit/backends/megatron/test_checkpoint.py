"""Megatron's checkpoints: stopping and going on, with the same ranks and with another number of data-parallel ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from policy_cases import (
    NLL,
    ONE_RANK,
    assert_equal,
    full_params,
    make_batch,
    make_settings,
    run_ranks,
    save_family,
    shard,
    worker_of,
)
from resume_cases import goes_on_bitwise, train_steps

from nemo_offload_rl.backends.saving.contents import FlatRange
from nemo_offload_rl.backends.saving.dcp import state_tensors
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo

NUM_STEPS = 4
BFLOAT16 = {"precision": "bfloat16", "bf16": True, "pipeline_dtype": "bfloat16"}
FLOAT16 = {"precision": "float16", "fp16": True, "pipeline_dtype": "float16"}
COMMON = {"clip_grad": 0.5, "lr_warmup_iters": 3}
SETTINGS = {
    "everything moves": {},
    "states stream in parts": {"offload_optimizer_states": True, "offload_optimizer_states_chunk_mib": 0.25},
    "not colocated": {"colocated": False},
}
WHOLE = {"use_distributed_optimizer": False}
# The precision, and what one rank and two ranks change.
RESIZED = {
    "fp32": ({}, {}, {}),
    "bf16": (BFLOAT16, {}, {}),
    "bf16, one rank does not shard": (BFLOAT16, WHOLE, {}),
    "bf16, two ranks do not shard": (BFLOAT16, {}, WHOLE),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3-tied")
    save_family(path, "qwen3-tied")
    return path


def make_worker(folder, process=ONE_RANK, **changes):
    return worker_of(make_settings(folder, backend="megatron", **COMMON | changes), process)


@pytest.fixture(scope="module")
def uninterrupted(folder):
    with make_worker(folder, colocated=False, residency_overlap=False, **BFLOAT16) as worker:
        return train_steps(worker, 1, NUM_STEPS)


@pytest.mark.parametrize("name", SETTINGS)
def test_two_steps_a_resume_and_two_more_are_four_steps_bit_by_bit(folder, tmp_path, uninterrupted, name):
    changes = {**BFLOAT16, **SETTINGS[name]}
    goes_on_bitwise(lambda: make_worker(folder, **changes), tmp_path, uninterrupted, in_background=True)


def test_a_checkpoint_from_before_the_first_step_has_masters_only_and_is_gone_on_from(folder, tmp_path):
    with make_worker(folder, **BFLOAT16) as worker:
        worker.save_checkpoint(tmp_path / "saved")
        expected = steps(worker, 0, 1)
    with make_worker(folder, **BFLOAT16) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        assert steps(worker, 0, 1) == expected
    # In float16, which alone has a loss scale, and back.
    with make_worker(folder, **FLOAT16) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        assert steps(worker, 0, 1) == pytest.approx(expected, rel=1e-2)
        worker.save_checkpoint(tmp_path / "float16")
    with make_worker(folder, **BFLOAT16) as worker:
        worker.load_checkpoint(tmp_path / "float16")
        assert steps(worker, 0, 1) == pytest.approx(expected, rel=1e-2)


# -- scales of 8-bit layers ------------------------------------------------------------------------------------------


class ScaledLayer(torch.nn.Module):
    """What a layer of Transformer Engine has of delayed scaling; the real ones are in test_megatron_gpu.py."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self._fp8_workspaces: dict[str, torch.Tensor] = {}

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        size = 3 * self.fp8_meta["num_gemms"]
        self.fp8_meta |= {key: [torch.ones(size), torch.zeros(8, size)] for key in ("scaling_fwd", "scaling_bwd")}

    def get_fp8_meta_tensors(self) -> dict[str, list[torch.Tensor]] | None:
        keys = ("scaling_fwd", "scaling_bwd")
        return {key: self.fp8_meta[key] for key in keys} if keys[0] in self.fp8_meta else None

    def reset_fp8_meta_tensors(self, tensors: dict[str, list[torch.Tensor]]) -> None:
        for key, values in tensors.items():
            for mine, value in zip(self.fp8_meta[key], values, strict=True):
                mine.copy_(value)


@contextmanager
def scaled_worker(folder: Path, monkeypatch: pytest.MonkeyPatch, recipe: str = "delayed") -> Iterator[Any]:
    """A worker whose first layer has scales, and that layer."""
    base = SimpleNamespace(TransformerEngineBaseModule=ScaledLayer, _dummy_wgrads={})
    with make_worker(folder, **BFLOAT16) as worker, monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)
        backend = worker._backend
        layer = ScaledLayer()
        backend._chunks[0].module.module.decoder.layers[0].add_module("scaled", layer)
        backend._cfg = replace(backend._cfg, fp8_cfg=replace(backend._cfg.fp8_cfg, enabled=True, fp8_recipe=recipe))
        yield worker, layer


def test_scales_of_delayed_scaling_are_saved_read_back_and_in_no_export(folder, tmp_path, monkeypatch):
    with scaled_worker(folder, monkeypatch) as (worker, layer):
        worker.save_checkpoint(tmp_path / "before the first pass")
        layer.fp8_meta["num_gemms"] = 1
        layer.init_fp8_meta_tensors(None)
        expected = {
            key: [torch.rand_like(tensor) for tensor in layer.fp8_meta[key]]
            for key in layer.fp8_meta
            if key != "num_gemms"
        }
        layer.reset_fp8_meta_tensors(expected)
        worker.save_checkpoint(tmp_path / "saved")
        worker.offload_before_refit()
        assert not [name for name, _ in worker.named_weights() if "scale" in name]
    with scaled_worker(folder, monkeypatch) as (worker, layer):
        worker.load_checkpoint(tmp_path / "before the first pass")
        assert layer.get_fp8_meta_tensors() is None
        worker.load_checkpoint(tmp_path / "saved")
        found = layer.get_fp8_meta_tensors()
        for key, tensors in expected.items():
            assert all(torch.equal(*pair) for pair in zip(found[key], tensors, strict=True))
    with scaled_worker(folder, monkeypatch, recipe="blockwise") as (worker, layer):
        worker.load_checkpoint(tmp_path / "saved")
        assert layer.get_fp8_meta_tensors() is None


def test_a_checkpoint_without_scales_is_read_with_a_warning(folder, tmp_path, monkeypatch, caplog):
    with scaled_worker(folder, monkeypatch, recipe="blockwise") as (worker, _):
        worker.save_checkpoint(tmp_path / "saved")
    with scaled_worker(folder, monkeypatch) as (worker, layer):
        worker.load_checkpoint(tmp_path / "saved")
        assert layer.get_fp8_meta_tensors() is None
        assert "has no scales of 8-bit layers" in caplog.text


# -- another number of ranks -------------------------------------------------------------------------------------------


def optimizer_ranges(worker: PolicyWorker) -> dict[str, tuple[int, torch.Tensor]]:
    """Where this rank's range of each flattened tensor of the optimizer begins, and its contents."""
    with worker.residency.checkpoint_view():
        found = state_tensors(worker._backend._training_state())
        ranges = {name: tensor for name, tensor in found.items() if name.startswith("optimizer/")}
        return {
            name: (tensor.offset, tensor.part.clone()) if isinstance(tensor, FlatRange) else (0, tensor.clone())
            for name, tensor in ranges.items()
        }


def steps(worker: PolicyWorker, *seeds: int) -> list[float]:
    worker.prepare_for_training()
    return [worker.train(shard(make_batch(seed=seed), worker), NLL()).loss[0] for seed in seeds]


def state_of(worker: PolicyWorker) -> dict:
    return {"params": full_params(worker), "optimizer": optimizer_ranges(worker)}


def assert_holds_ranges_of(ranges: dict, whole: dict) -> None:
    assert ranges.keys() <= whole.keys()
    for name, (offset, part) in ranges.items():
        start, expected = whole[name]
        assert start == 0
        if part.dim():
            expected = expected[offset : offset + part.numel()]
        assert torch.equal(part, expected), name


def mean_distance(left: dict, right: dict) -> float:
    """Of masters, where there are some, or else of parameters."""

    def found_in(state: dict) -> dict[str, torch.Tensor]:
        masters = {name: part for name, (_, part) in state["optimizer"].items() if name.endswith("/master")}
        return masters or state["params"]

    pairs = [(tensor, found_in(right)[name]) for name, tensor in found_in(left).items()]
    return float(torch.cat([(one - other).abs().flatten() for one, other in pairs]).mean())


def two_ranks_go_on(process: ProcessInfo, folder: str, root: str) -> None:
    """Load what one rank saved, train a step, save for one rank."""
    for name, (precision, _, changes) in RESIZED.items():
        mine = Path(root) / name
        one = torch.load(mine / "one.pt")
        with make_worker(folder, process, **precision, **changes) as worker:
            worker.load_checkpoint(mine / "one")
            state = state_of(worker)
            assert_equal(state["params"], one["params"])
            assert_holds_ranges_of(state["optimizer"], one["optimizer"])
            (loss,) = steps(worker, 3)
            worker.start_save(mine / "two", in_background=True)
            worker.offload_after_refit()
            worker.finish_save()
            torch.save({**state_of(worker), "loss": loss}, mine / f"two-{process.rank}.pt")


@pytest.fixture(scope="module")
def resized(folder, tmp_path_factory):
    """For each of `RESIZED` what one rank saved after two steps, and what two ranks saved after a third."""
    root = tmp_path_factory.mktemp("resized")
    for name, (precision, changes, _) in RESIZED.items():
        (root / name).mkdir()
        with make_worker(folder, **precision, **changes) as worker:
            steps(worker, 1, 2)
            worker.save_checkpoint(root / name / "one")
            torch.save(state_of(worker), root / name / "one.pt")
            losses = steps(worker, 3, 4)
            torch.save({**state_of(worker), "losses": losses}, root / name / "uninterrupted.pt")
    run_ranks(2, root, two_ranks_go_on, str(folder), str(root))
    return root


@pytest.mark.processes
@pytest.mark.parametrize("name", RESIZED)
def test_a_run_goes_on_with_another_number_of_data_parallel_ranks(folder, resized, name):
    precision, changes, of_two = RESIZED[name]
    one, expected, *two = (
        torch.load(resized / name / file) for file in ("one.pt", "uninterrupted.pt", "two-0.pt", "two-1.pt")
    )
    assert (two[0]["optimizer"].keys() == two[1]["optimizer"].keys()) == (of_two == WHOLE)
    with make_worker(folder, **precision, **changes) as worker:
        worker.load_checkpoint(resized / name / "two")
        state = state_of(worker)
        for rank in two:
            assert_equal(state["params"], rank["params"])
            assert_holds_ranges_of(rank["optimizer"], state["optimizer"])
        losses = [two[0]["loss"], *steps(worker, 4)]
        # Two ranks sum gradients in another order.
        assert losses == pytest.approx(expected["losses"], rel=1e-2 if precision else 1e-5)
        assert mean_distance(state_of(worker), expected) < 0.05 * mean_distance(one, expected)
