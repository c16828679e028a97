"""What is read of last hidden states where logits have a soft-cap; `unit/models/test_matrix.py` has whole models."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_close

from nemo_offload_rl.backends.scoring.readers import ReadDivergences
from nemo_offload_rl.data.batch import HiddenStatesBatch
from nemo_offload_rl.protocols.loss import Divergence
from nemo_offload_rl.protocols.scoring import Head, Positions, TeacherHead, capped
from nemo_offload_rl.protocols.vocab import VocabShard

ROWS, COLUMNS, HIDDEN, VOCABULARY = 2, 5, 8, 40


def test_a_soft_cap_is_c_tanh_of_logits_over_c_with_its_gradient() -> None:
    logits = (20 * torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    upstream = torch.randn(6, VOCABULARY)
    expected = 5 * torch.tanh(exact / 5)
    found = capped(logits, 5.0)
    assert_close(found, expected.float())
    (grad,) = torch.autograd.grad(found, logits, upstream)
    (expected_grad,) = torch.autograd.grad(expected, exact, upstream.double())
    assert_close(grad, expected_grad.float())
    assert capped(logits, None) is logits


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_teachers_logits_have_its_own_soft_cap(chunk_size: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    student_weight, teacher_weight = (3 * torch.randn(VOCABULARY, HIDDEN, generator=generator) for _ in range(2))
    hidden, teacher_hidden = (torch.randn(ROWS, COLUMNS, HIDDEN, generator=generator) for _ in range(2))
    ids = torch.randint(0, VOCABULARY, (ROWS, COLUMNS), generator=generator)
    batch = HiddenStatesBatch(
        input_ids=ids,
        input_lengths=torch.full((ROWS,), COLUMNS),
        token_mask=torch.ones(ROWS, COLUMNS),
        sample_mask=torch.ones(ROWS),
        generation_logprobs=torch.zeros(ROWS, COLUMNS),
        teacher_hidden=teacher_hidden,
    )
    places = torch.arange(ROWS * COLUMNS)
    reader = ReadDivergences(Divergence(1.0, False), batch, TeacherHead(teacher_weight, 0.5, softcap=4.0))
    head = Head(temperature=1.0, chunk_size=chunk_size, shard=VocabShard(0, None))
    positions = Positions(hidden.flatten(0, 1), ids.flatten(), places)
    found = reader(lambda states: states @ student_weight.T, positions, head)
    teacher = (4 * torch.tanh(teacher_hidden.flatten(0, 1) @ teacher_weight.T / 4) / 0.5).log_softmax(-1)
    student = (hidden.flatten(0, 1) @ student_weight.T).log_softmax(-1)
    assert_close(found.divergence, (teacher.exp() * (teacher - student)).sum(-1))
