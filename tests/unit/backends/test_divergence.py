"""Divergences from a teacher against whole distributions in float64, by plain torch and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_close
from policy_cases import run_ranks
from torch import Tensor

from nemo_offload_rl.backends.scoring.divergence import (
    TopK,
    full_divergence,
    topk_divergence,
    topk_logprobs,
)
from nemo_offload_rl.protocols.loss import Divergence
from nemo_offload_rl.protocols.vocab import VocabShard

WHOLE = VocabShard(0, None)
VOCABULARY, POSITIONS = 40, 6
WEIGHTS = {"forward": 1.0, "reverse": 0.0, "mixed": 0.3}


def made(seed: int = 0, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits of a student and of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (scale * torch.randn(POSITIONS, VOCABULARY, generator=generator) for _ in range(2))
    return student.to(dtype).requires_grad_(), teacher.to(dtype)


def kl(left: Tensor, right: Tensor) -> Tensor:
    """KL(left || right) of logprobs."""
    return (left.exp() * (left - right)).sum(-1)


def mixed(student: Tensor, teacher: Tensor, weight: float) -> Tensor:
    return weight * kl(teacher, student) + (1 - weight) * kl(student, teacher)


def of_nemo_rl(student: Tensor, teacher_logits: Tensor, k: int, weight: float, *, zero_outside: bool) -> Tensor:
    """`DistillationLossFn` of NeMo-RL at 7ea279a, term by term: top-k logprobs, the entropy and mass of the rest."""
    values, ids = teacher_logits.topk(k)
    teacher = values.log_softmax(-1)
    if not zero_outside:
        picked = student.gather(-1, ids).log_softmax(-1)
        return weight * (teacher.exp() * (teacher - picked)).sum(-1) + (1 - weight) * (
            picked.exp() * (picked - teacher)
        ).sum(-1)
    whole = student.log_softmax(-1)
    picked = whole.gather(-1, ids)
    rest_entropy = (whole.exp() * whole).sum(-1) - (picked.exp() * picked).sum(-1)
    rest_mass = 1 - picked.exp().sum(-1)
    correction = (1 - weight) * (rest_entropy + 100 * rest_mass)
    forward = (teacher.exp() * (teacher - picked)).sum(-1)
    reverse = (picked.exp() * (picked - teacher)).sum(-1)
    return weight * forward + (1 - weight) * reverse + (correction if weight < 1 else 0.0)


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """TRL's `GKDTrainer.generalized_jsd_loss` at its ends, where it is one KL; `kl_div` takes the second first."""
    arguments = (student, teacher) if beta == 0 else (teacher, student)
    return F.kl_div(*arguments, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_whole_distributions_have_the_value_and_gradient_of_the_kl(weight: float, temperature: float) -> None:
    student, teacher = made()
    upstream = torch.randn(POSITIONS)
    exact = student.detach().double().requires_grad_()
    logprobs = [(logits.double() / temperature).log_softmax(-1) for logits in (exact, teacher)]
    expected = mixed(logprobs[0], logprobs[1], weight)
    (expected_grad,) = torch.autograd.grad(expected, exact, upstream.double())
    divergence = Divergence(weight, zero_outside_topk=False)
    found = full_divergence(student, teacher, divergence, temperature, WHOLE, teacher_temperature=temperature)
    (found_grad,) = torch.autograd.grad(found, student, upstream)
    assert_close(found, expected.float())
    assert_close(found_grad, expected_grad.float())
    if weight in (0.0, 1.0):
        assert_close(found, generalized_jsd(logprobs[0], logprobs[1], beta=1.0 - weight).float())


@pytest.mark.parametrize("zero_outside", [False, True])
@pytest.mark.parametrize("k", [1, 5, VOCABULARY])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_a_top_k_has_the_value_and_gradient_of_nemo_rls_formula(weight: float, k: int, zero_outside: bool) -> None:
    student, teacher = made(1)
    upstream = torch.randn(POSITIONS)
    exact = student.detach().double().requires_grad_()
    expected = of_nemo_rl(exact, teacher.double(), k, weight, zero_outside=zero_outside)
    (expected_grad,) = torch.autograd.grad(expected, exact, upstream.double())
    known = topk_logprobs(teacher, k, 1.0, WHOLE)
    found = topk_divergence(student, known, Divergence(weight, zero_outside), 1.0, WHOLE)
    (found_grad,) = torch.autograd.grad(found, student, upstream)
    if k == 1 and not zero_outside:  # one token renormalized has probability 1 with both
        assert torch.equal(found, torch.zeros(POSITIONS))
        assert torch.equal(found_grad, torch.zeros_like(student))
        return
    assert_close(found, expected.float())
    assert_close(found_grad, expected_grad.float())
    if k == VOCABULARY:
        whole = Divergence(weight, zero_outside_topk=False)
        assert_close(found, full_divergence(student, teacher, whole, 1.0, WHOLE, teacher_temperature=1.0))


def test_top_k_logprobs_are_those_of_the_whole_vocabulary_sorted() -> None:
    _, teacher = made(2)
    known = topk_logprobs(teacher, 7, 0.5, WHOLE)
    expected = (teacher / 0.5).log_softmax(-1).sort(dim=-1, descending=True)
    assert torch.equal(known.ids.long(), expected.indices[:, :7])
    assert_close(known.logprobs, expected.values[:, :7])
    assert known.ids.dtype == torch.int32


def test_equal_distributions_have_no_divergence_and_no_gradient() -> None:
    student, _ = made(3)
    for weight in WEIGHTS.values():
        divergence = Divergence(weight, zero_outside_topk=False)
        found = full_divergence(student, student.detach(), divergence, 1.0, WHOLE, teacher_temperature=1.0)
        (grad,) = torch.autograd.grad(found.sum(), student)
        assert found.abs().max() < 1e-6
        assert grad.abs().max() < 1e-6


def test_bfloat16_logits_are_compared_in_float32() -> None:
    student, teacher = made(4, dtype=torch.bfloat16)
    divergence = Divergence(0.5, zero_outside_topk=False)
    found = full_divergence(student, teacher, divergence, 1.0, WHOLE, teacher_temperature=1.0)
    assert found.dtype == torch.float32
    assert_close(found, mixed(student.float().log_softmax(-1), teacher.float().log_softmax(-1), 0.5))
    (grad,) = torch.autograd.grad(found.sum(), student)
    assert grad.dtype == torch.bfloat16


def test_no_positions_give_nothing() -> None:
    student = torch.zeros(0, VOCABULARY, requires_grad=True)
    known = topk_logprobs(torch.zeros(0, VOCABULARY), 3, 1.0, WHOLE)
    for zero_outside in (False, True):
        found = topk_divergence(student, known, Divergence(0.5, zero_outside), 1.0, WHOLE)
        found.sum().backward()
        assert found.shape == (0,)


def compare(kind: str, logits: Tensor, teacher: Tensor, known: TopK, weight: float, shard: VocabShard) -> Tensor:
    divergence = Divergence(weight, zero_outside_topk=kind == "zero outside")
    if kind == "whole":
        return full_divergence(logits, teacher, divergence, 0.8, shard, teacher_temperature=0.8)
    return topk_divergence(logits, known, divergence, 0.8, shard)


def same_over_two_ranks(process: Any) -> None:
    shard = VocabShard(process.rank * VOCABULARY // 2, torch.distributed.group.WORLD)
    columns, upstream = slice(shard.start, shard.start + VOCABULARY // 2), torch.arange(1.0, POSITIONS + 1)
    for seed, k in enumerate((1, 4, VOCABULARY // 2 + 3, VOCABULARY)):
        student, teacher = made(seed)
        mine, its = student.detach()[:, columns].clone().requires_grad_(), teacher[:, columns]
        known, expected = topk_logprobs(its, k, 0.8, shard), topk_logprobs(teacher, k, 0.8, WHOLE)
        assert torch.equal(known.ids, expected.ids)
        assert_close(known.logprobs, expected.logprobs)
        for weight in WEIGHTS.values():
            for kind in ("renormalized", "zero outside", "whole"):
                if k == 1 and kind == "renormalized":
                    continue  # 0 for both
                whole = compare(kind, student, teacher, expected, weight, WHOLE)
                parts = compare(kind, mine, its, expected, weight, shard)
                (whole_grad,) = torch.autograd.grad(whole, student, upstream)
                (parts_grad,) = torch.autograd.grad(parts, mine, upstream)
                assert_close(parts, whole, name=f"{kind} {k} ")
                # Terms around 100 cancel where the teacher has nothing outside of its top-k.
                assert_close(parts_grad, whole_grad[:, columns], num_terms=2**18, name=f"{kind} {k} gradient ")


@pytest.mark.processes
def test_a_vocabulary_over_two_ranks_gives_the_same_top_k_divergence_and_gradient(tmp_path: Any) -> None:
    run_ranks(2, tmp_path, same_over_two_ranks)
