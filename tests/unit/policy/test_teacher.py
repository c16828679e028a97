"""A teacher beside the policy in its worker: against Hugging Face, on both backends, alone and on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from policy_cases import (
    assert_equal,
    full_grads,
    full_optimizer,
    full_params,
    grad_norm,
    make_settings,
    make_sparse_batch,
    one_rank_worker,
    run_ranks,
    shard,
    worker_of,
)
from tiny_models import qwen3_config, save_model_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_offload_rl.algorithms.distillation import DistillationLoss
from nemo_offload_rl.data.batch import HiddenStatesBatch, TopKBatch, TrainBatch
from nemo_offload_rl.keys.grpo import DistillationLossConfig
from nemo_offload_rl.keys.policy import BatchingConfig
from nemo_offload_rl.keys.worker import TeacherSettings
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.residency import TEACHER, TEACHER_HEAD, Placement

ONE_RANK = ProcessInfo(rank=0, world_size=1, init_method="", device="cpu")
LOSS = DistillationLoss(DistillationLossConfig(kl_type="mixed", mixed_kl_weight=0.3, zero_outside_topk=False))
TEMPERATURE = 0.8
BATCH = make_sparse_batch()
PACKED = {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 48, "sequence_length_round": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A student, and a teacher that is larger in every way; the student's embeddings are tied."""
    root = tmp_path_factory.mktemp("models")
    save_model_folder(root / "student", 1, qwen3_config(tied=True))
    save_model_folder(root / "teacher", 2, qwen3_config(num_layers=3, hidden_size=96))
    yield root / "student", root / "teacher"


def worker_with_teacher(
    process: ProcessInfo,
    folders: tuple[Path, Path],
    topk: int | None,
    *,
    teacher_tp: int | None = None,
    streams: bool = False,
    **changes: Any,
) -> Any:
    settings = make_settings(folders[0], logprob_temperature=TEMPERATURE, **changes)
    model = replace(settings, model_name=str(folders[1]), optimizer=None, logprob_batch_size=2)
    if teacher_tp is not None:
        model = replace(model, dtensor_cfg=replace(model.dtensor_cfg, tensor_parallel_size=teacher_tp))
    return worker_of(settings, process, teacher=TeacherSettings(model=model, topk=topk, streams_layers=streams))


def with_teacher(batch: TrainBatch, known: tuple[Tensor, ...]) -> TrainBatch:
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors["generation_logprobs"] = torch.zeros_like(batch.token_mask)
    if len(known) == 2:
        return TopKBatch(**tensors, teacher_logprobs=known[0], teacher_ids=known[1])
    return HiddenStatesBatch(**tensors, teacher_hidden=known[0])


def hf_logprobs_BSV(model: Any, batch: TrainBatch) -> Tensor:
    """[B, S, V] float32: before each token, at the temperature; column 0 is of no token."""
    logits_BSV = model(batch.input_ids).logits / TEMPERATURE
    return torch.nn.functional.pad(logits_BSV[:, :-1].log_softmax(-1), (0, 0, 1, 0))


@cache
def hugging_faces(folders: tuple[Path, Path], k: int | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The teacher's logprobs [B, S, V] of `BATCH`, and the student's loss and gradients."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    mine, whole = hf_logprobs_BSV(student, BATCH), hf_logprobs_BSV(teacher, BATCH).detach()
    its = whole
    if k is not None:
        its, ids = its.topk(k, dim=-1)
        mine, its = mine.gather(-1, ids).log_softmax(-1), its.log_softmax(-1)
    forward, reverse = (its.exp() * (its - mine)).sum(-1), (mine.exp() * (mine - its)).sum(-1)
    loss = ((0.3 * forward + 0.7 * reverse) * BATCH.loss_mask).sum() / BATCH.loss_mask.sum()
    loss.backward()
    return whole, loss.detach(), {name: parameter.grad for name, parameter in student.named_parameters()}


def equals_hugging_face(process: ProcessInfo, folders: tuple[Path, Path], k: int | None, **changes: Any) -> None:
    batch = BATCH
    whole, expected_loss, expected_grads = hugging_faces(folders, k)
    with worker_with_teacher(process, folders, k, **changes) as worker:
        teacher_info = worker._teacher.model.rank_info
        rows = len(batch) // teacher_info.dp_size
        its = range(teacher_info.dp_rank * rows, (teacher_info.dp_rank + 1) * rows)
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.prepare_for_teacher()
        assert worker.residency.location(TEACHER) is Placement.DEVICE
        assert worker.residency.location("params") is Placement.HOST
        known = worker.read_teacher(batch.select(its))
        counted_BS = batch.select(its).loss_mask != 0
        if k is not None:
            values, ids = whole[list(its)].topk(k, dim=-1)
            assert torch.equal(known[1][counted_BS].long(), ids[counted_BS])
            assert_close(known[0][counted_BS], values[counted_BS])
        assert all(not value[~counted_BS].any() for value in known)
        if teacher_info.dp_size != worker._backend.rank_info.dp_size:  # all rows, as the driver would gather them
            gathered = [[torch.empty_like(value) for _ in range(process.world_size)] for value in known]
            for pieces, value in zip(gathered, known, strict=True):
                torch.distributed.all_gather(pieces, value)
            mine = shard(with_teacher(batch, tuple(torch.cat(pieces) for pieces in gathered)), worker)
        else:
            mine = with_teacher(batch.select(its), known)
        worker.prepare_for_training()
        assert worker.residency.location(TEACHER) is Placement.HOST
        loss, metrics = worker.forward_backward(mine, LOSS)
        assert_close(loss, expected_loss.item())
        assert 0 < metrics["teacher_topk_mass"] <= 1 + 1e-5
        if changes.get("backend") != "megatron":
            assert_close(full_grads(worker), expected_grads)
        expected_norm = torch.nn.utils.get_total_norm(expected_grads.values())
        assert_close(grad_norm(worker), float(expected_norm))
        assert_close(worker.evaluate(mine, LOSS).loss[0], loss)
        worker.zero_grad()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"logprob_chunk_size": 3},
    "packed": {"sequence_packing": PACKED},
    "streamed": {"streams": True},
    "megatron": {"backend": "megatron"},
    "megatron in chunks": {"backend": "megatron", "logprob_chunk_size": 5},
}


def _changes(case: dict[str, Any]) -> dict[str, Any]:
    return {name: BatchingConfig(**value) if name == "sequence_packing" else value for name, value in case.items()}


@pytest.mark.parametrize("k", [5, None], ids=["top-k", "whole"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_teacher_loss_and_gradients_equal_hugging_face(
    folders: tuple[Path, Path], case: dict[str, Any], k: int | None
) -> None:
    equals_hugging_face(ONE_RANK, folders, k, **_changes(case))


def equals_hugging_face_in_all_layouts(process: ProcessInfo, student: str, teacher: str) -> None:
    folders = (Path(student), Path(teacher))
    equals_hugging_face(process, folders, 5)  # two data-parallel ranks
    equals_hugging_face(process, folders, None, streams=True)
    for k in (5, None):  # the top of all shards, and whole rows of shards
        equals_hugging_face(process, folders, k, tensor_parallel_size=2)
    equals_hugging_face(process, folders, 5, teacher_tp=2)
    equals_hugging_face(process, folders, None, context_parallel_size=2)
    equals_hugging_face(process, folders, None, backend="megatron", tensor_parallel_size=2)


@pytest.mark.processes
def test_two_ranks_have_the_same_teacher_loss_and_gradients(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run_ranks(2, tmp_path, equals_hugging_face_in_all_layouts, *map(str, folders))


def _steps(worker: PolicyWorker, k: int | None, *, with_phases: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    seen: list[Tensor] = []
    for seed in range(2):
        batch = make_sparse_batch(seed=seed)
        if with_phases:
            worker.offload_before_refit()
            worker.offload_after_refit()
            assert not any(size for name, size in worker.residency.device_bytes().items() if name != "grads")
        worker.prepare_for_teacher()
        known = worker.read_teacher(batch)
        worker.prepare_for_training()
        result = worker.train(with_teacher(batch, known), LOSS)
        seen += [*known, torch.tensor(result.loss)]
    state = {**full_params(worker), **{f"optimizer/{n}": t for n, t in full_optimizer(worker).items()}}
    return seen, state


@pytest.mark.parametrize("k", [5, None], ids=["top-k", "whole"])
@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_offloading_changes_no_bit(folders: tuple[Path, Path], backend: str, k: int | None) -> None:
    with worker_with_teacher(ONE_RANK, folders, k, backend=backend) as worker:
        found, state = _steps(worker, k, with_phases=True)
        plan = worker.residency_plan()
    assert "TEACHER_INFERENCE" in plan and ("teacher_head" in plan) == (k is None)
    kept = {"residency_overrides": {"params": "device", "optimizer": "device"}, "colocated": False}
    with worker_with_teacher(ONE_RANK, folders, k, backend=backend, **kept) as worker:
        expected, expected_state = _steps(worker, k, with_phases=False)
        assert (TEACHER_HEAD in worker.residency.plan.table) == (k is None)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
    assert_equal(state, expected_state)
    if backend == "dtensor":
        with worker_with_teacher(
            ONE_RANK, folders, k, cpu_offload=True, activation_checkpointing=True, streams=True
        ) as worker:
            found, state = _steps(worker, k, with_phases=True)
        assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
        assert_equal(state, expected_state)


def test_streamed_layers_change_no_bit_and_two_at_most_are_on_the_device(folders: tuple[Path, Path]) -> None:
    found, most = {}, 0
    for streams in (False, True):
        with worker_with_teacher(ONE_RANK, folders, 5, streams=streams) as worker:

            def look(*_: Any, worker: PolicyWorker = worker) -> None:
                nonlocal most
                sizes = worker.residency.device_bytes()
                most = max(most, sum(name.startswith("teacher/layer") and size > 0 for name, size in sizes.items()))

            worker._teacher.model._built.layers[1].register_forward_hook(look)
            found[streams] = _steps(worker, 5, with_phases=True)
            if streams:
                with pytest.raises(ArithmeticError):
                    _fail_in_the_second_layer(worker)
                again = worker.read_teacher(make_sparse_batch(seed=1))
                assert torch.equal(again[0], found[True][0][3])
    assert 1 <= most <= 2
    assert all(torch.equal(left, right) for left, right in zip(found[False][0], found[True][0], strict=True))
    assert_equal(found[False][1], found[True][1])


def _fail_in_the_second_layer(worker: PolicyWorker) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("in the second layer")

    handle = worker._teacher.model._built.layers[1].register_forward_hook(fail)
    try:
        worker.prepare_for_teacher()
        worker.read_teacher(make_sparse_batch())
    finally:
        handle.remove()


def test_a_teacher_takes_half_the_memory_in_half_precision_and_answers_as_if_cast(folders: tuple[Path, Path]) -> None:
    settings = make_settings(folders[0], precision="float32")
    batch = make_sparse_batch()
    found = {}
    for precision in ("float32", "bfloat16"):
        model = replace(settings, model_name=str(folders[1]), optimizer=None, precision=precision)
        with worker_of(settings, ONE_RANK, teacher=TeacherSettings(model=model, topk=None)) as worker:
            worker.prepare_for_teacher()
            (hidden,) = worker.read_teacher(batch)
            found[precision] = hidden, worker.residency.device_bytes()[TEACHER]
    assert found["bfloat16"][0].dtype == torch.bfloat16
    assert found["bfloat16"][1] < 0.51 * found["float32"][1]
    exact = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.bfloat16).model(batch.input_ids)
    before = torch.nn.functional.pad(exact.last_hidden_state[:, :-1], (0, 0, 1, 0))
    counted = batch.loss_mask != 0
    assert_close(found["bfloat16"][0][counted].float(), before[counted].float(), num_terms=2**34)


def test_without_a_teacher_there_is_no_phase_for_it(folders: tuple[Path, Path]) -> None:
    with one_rank_worker(folders[0]) as worker:
        assert "TEACHER" not in worker.residency_plan()
