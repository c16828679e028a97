"""Logprobs over the tokens that top-k and top-p leave, against a loop over a sorted row."""

from typing import Any

import pytest
import torch
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import run_ranks
from torch import Tensor

from nemo_offload_rl.backends.scoring.logprobs import TokenScores, chunked_scores, drawn_scores
from nemo_offload_rl.keys.worker import TokenFilter
from nemo_offload_rl.protocols import vocab
from nemo_offload_rl.protocols.loss import TokenStat
from nemo_offload_rl.protocols.vocab import VocabShard, is_drawn

WHOLE = VocabShard(0, None)
FILTERS = [TokenFilter(5, 1.0), TokenFilter(None, 0.7), TokenFilter(7, 0.8), TokenFilter(1, 1.0), TokenFilter(100, 0.3)]


def drawn_of(logits_V: Tensor, kept: TokenFilter, temperature: float) -> list[int]:
    """The tokens that stay, one row at a time: the likeliest first, until they have `top_p` between them."""
    likeliest = logits_V.argsort(descending=True, stable=True).tolist()[: kept.top_k]
    shares = (logits_V[likeliest] / temperature).softmax(-1).tolist()
    num_kept, before = 0, 0.0
    while num_kept < len(likeliest) and (before < kept.top_p or num_kept == 0):
        before += shares[num_kept]
        num_kept += 1
    least = logits_V[likeliest[num_kept - 1]]
    return (logits_V >= least).nonzero().flatten().tolist()


def plain(logits_NV: Tensor, targets_N: Tensor, kept: TokenFilter, temperature: float) -> tuple[Tensor, Tensor]:
    """[N] logprobs with gradient, -inf outside of the set, and entropies."""
    logprobs, entropies = [], []
    for logits_V, target in zip(logits_NV, targets_N.tolist(), strict=True):
        tokens = drawn_of(logits_V.detach(), kept, temperature)
        distribution = (logits_V[tokens] / temperature).log_softmax(-1)
        found = distribution[tokens.index(target)] if target in tokens else torch.tensor(-torch.inf)
        logprobs.append(found)
        entropies.append(-(distribution.exp() * distribution).sum())
    return torch.stack(logprobs), torch.stack(entropies).detach()


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kept", FILTERS, ids=lambda kept: f"k={kept.top_k} p={kept.top_p}")
def test_value_gradient_and_entropy_are_those_of_the_tokens_that_the_filter_leaves(
    kept: TokenFilter, temperature: float, chunk_size: int | None
) -> None:
    torch.manual_seed(0)
    logits, upstream = (3 * torch.randn(20, 31)).requires_grad_(), torch.randn(20)
    # One of three is what would be drawn, the others are anything.
    targets = torch.randint(0, 31, (20,))
    targets[::3] = logits[::3].argmax(-1)
    expected, entropy = plain(logits, targets, kept, temperature)
    is_inside = expected.isfinite()
    assert is_inside.any() and not is_inside.all()

    def run(with_whole: bool) -> TokenScores:
        return chunked_scores(
            lambda chunk: chunk * 1,
            logits,
            targets,
            temperature=temperature,
            chunk_size=chunk_size,
            shard=WHOLE,
            stat=TokenStat.ENTROPY,
            kept=kept,
            with_whole=with_whole,
        )

    found = run(with_whole=False)
    assert found.whole is None and found.stat is not None
    assert torch.equal(found.logprobs.isneginf(), ~is_inside)
    assert_close(found.logprobs[is_inside], expected[is_inside])
    assert_close(found.stat, entropy, num_terms=1000)
    (grad,) = torch.autograd.grad(found.logprobs, logits, upstream)
    assert_close(grad, torch.autograd.grad(expected, logits, upstream)[0])

    # Both at once, each with a gradient of its own.
    both = run(with_whole=True)
    assert both.whole is not None
    whole = (logits / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert torch.equal(both.logprobs, found.logprobs)
    assert_close(both.whole, whole)
    (both_grad,) = torch.autograd.grad((both.logprobs, both.whole), logits, (upstream, upstream.flip(0)))
    assert_close(both_grad, grad + torch.autograd.grad(whole, logits, upstream.flip(0))[0])


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**16),
    vocabulary=st.integers(1, 40),
    top_k=st.sampled_from([None, 1, 2, 7, 50]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 0.01]),
    levels=st.sampled_from([2, 5, 1000]),
    temperature=st.sampled_from([1.0, 0.5, 2.0]),
    sorted_at_once=st.sampled_from([1, 50, 2**24]),
)
def test_tokens_that_are_as_likely_as_the_last_one_stay_too(
    seed: int,
    vocabulary: int,
    top_k: int | None,
    top_p: float,
    levels: int,
    temperature: float,
    sorted_at_once: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few levels: many tokens with the same logit, as bfloat16 has them.
    logits = torch.randint(0, levels, (2, 3, vocabulary), generator=generator).bfloat16() / 8
    kept, before = TokenFilter(top_k, top_p), vocab._SORTED_AT_ONCE
    vocab._SORTED_AT_ONCE = sorted_at_once
    try:
        found = is_drawn(logits, kept, temperature, WHOLE)
    finally:
        vocab._SORTED_AT_ONCE = before
    for row, drawn in zip(logits.flatten(0, 1).float(), found.flatten(0, 1), strict=True):
        likeliest = row.sort(descending=True).values[:top_k]
        shares = (likeliest / temperature).softmax(-1).double()
        above = [float(shares[likeliest > value].sum()) for value in row]
        # Every token that stays has less than top_p above it, and no other has, up to the last digit of a sum.
        for value, stays, mass in zip(row.tolist(), drawn.tolist(), above, strict=True):
            is_candidate = value >= likeliest[-1]
            if abs(mass - top_p) > 1e-5:
                assert stays == (is_candidate and mass < top_p)
        assert drawn[row.argmax()]


def over_two_ranks(process: Any) -> None:
    shard = VocabShard(process.rank * 12, torch.distributed.group.WORLD)
    columns = slice(shard.start, shard.start + 12)
    for seed, kept in enumerate([*FILTERS, TokenFilter(15, 1.0), TokenFilter(15, 0.9)]):
        torch.manual_seed(seed)
        logits, upstream = 3 * torch.randn(4, 5, 24), torch.randn(4, 5)
        targets = torch.randint(0, 24, (4, 5))
        targets[0] = logits[0].argmax(-1)
        whole, mine = logits.clone().requires_grad_(), logits[..., columns].clone().requires_grad_()
        expected = drawn_scores(whole, targets, 0.7, WHOLE, kept=kept, stat=TokenStat.ENTROPY, with_whole=True)
        found = drawn_scores(mine, targets, 0.7, shard, kept=kept, stat=TokenStat.ENTROPY, with_whole=True)
        for name, value in found._asdict().items():
            wanted = getattr(expected, name)
            assert torch.equal(value.isneginf(), wanted.isneginf())
            is_inside = wanted.isfinite()
            assert_close(value[is_inside], wanted[is_inside], num_terms=1000, name=f"{kept} {name} ")
        for name in ("logprobs", "whole"):
            (grad,) = torch.autograd.grad(getattr(expected, name), whole, upstream, retain_graph=True)
            (part,) = torch.autograd.grad(getattr(found, name), mine, upstream, retain_graph=True)
            assert_close(part, grad[..., columns], name=f"{kept} gradient of {name} ")


@pytest.mark.processes
def test_a_vocabulary_over_two_ranks_gives_the_same(tmp_path: Any) -> None:
    run_ranks(2, tmp_path, over_two_ranks)
