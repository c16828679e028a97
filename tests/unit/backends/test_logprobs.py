import pytest
import torch
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_offload_rl.backends.scoring.logprobs import chunked_scores, token_scores
from nemo_offload_rl.protocols.loss import TokenStat
from nemo_offload_rl.protocols.vocab import VocabShard

WHOLE = VocabShard(0, None)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_logprobs_and_their_gradient_equal_a_whole_log_softmax(temperature, scale):
    torch.manual_seed(0)
    logits = (scale * torch.randn(2, 5, 31)).requires_grad_()
    targets = torch.randint(0, 31, (2, 5))
    upstream = torch.randn(2, 5)

    expected = (logits / temperature).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream)
    found = token_scores(logits, targets, temperature, WHOLE).logprobs
    (found_grad,) = torch.autograd.grad(found, logits, upstream)

    assert_close(found, expected)
    assert_close(found_grad, expected_grad)


def test_logprobs_of_bfloat16_logits_are_computed_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(1, 4, 1000).bfloat16()
    targets = torch.randint(0, 1000, (1, 4))
    expected = logits.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    found = token_scores(logits, targets, 1.0, WHOLE).logprobs
    assert found.dtype == torch.float32
    assert_close(found, expected)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_chunks_give_the_same_logprobs_and_gradients_and_bound_the_positions_scored_at_once(chunk_size):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 50)
    hidden, targets = torch.randn(7, 8, requires_grad=True), torch.randint(0, 50, (7,))
    widths = []

    def output_layer(chunk):
        widths.append(len(chunk))
        return layer(chunk)

    def run(size):
        scores = chunked_scores(output_layer, hidden, targets, temperature=1.0, chunk_size=size, shard=WHOLE)
        logprobs = scores.logprobs
        return logprobs, torch.autograd.grad(logprobs.sum(), [hidden, layer.weight])

    whole, whole_grads = run(None)
    widths.clear()
    chunked, chunked_grads = run(chunk_size)

    assert max(widths) <= chunk_size
    assert_close(chunked, whole)
    assert_close(chunked_grads, whole_grads)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("stat", [None, *TokenStat])
def test_no_position_at_all_has_gradients_of_zero(chunk_size, stat):
    layer = torch.nn.Linear(4, 9)
    hidden, targets = torch.randn(0, 4, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    found, measured, _ = chunked_scores(
        layer, hidden, targets, temperature=1.0, chunk_size=chunk_size, shard=WHOLE, stat=stat
    )
    found.sum().backward()
    assert measured is None if stat is None else measured.shape == (0,)
    assert found.shape == (0,) and hidden.grad.shape == (0, 4)
    assert torch.equal(layer.weight.grad, torch.zeros(9, 4))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 5),
    vocabulary=st.integers(1, 40),
    scale=st.sampled_from([0.0, 0.5, 8.0, 300.0]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    chunk_size=st.sampled_from([None, 1, 2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_stats_are_those_of_the_whole_softmax_and_change_no_bit_of_logprobs_and_gradients(
    seed, rows, vocabulary, scale, temperature, chunk_size, dtype
):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(rows, vocabulary, generator=generator) + 5).to(dtype)
    targets = torch.where(
        torch.rand(rows, generator=generator) < 0.5,
        logits.argmax(-1),
        torch.randint(0, vocabulary, (rows,), generator=generator),
    )

    def run(stat):
        leaf = logits.clone().requires_grad_()
        found = chunked_scores(
            lambda chunk: chunk * 1,
            leaf,
            targets,
            temperature=temperature,
            chunk_size=chunk_size,
            shard=WHOLE,
            stat=stat,
        )
        found.logprobs.sum().backward()
        assert found.stat is None or not found.stat.requires_grad
        return found.logprobs.detach(), leaf.grad, found.stat

    exact = torch.distributions.Categorical(logits=logits.double() / temperature)
    is_highest = logits.gather(1, targets[:, None])[:, 0] == logits.amax(dim=1)
    *plain, nothing = run(None)
    assert nothing is None
    for stat, expected in ((TokenStat.ACCURACY, is_highest.float()), (TokenStat.ENTROPY, exact.entropy().float())):
        *other, measured = run(stat)
        torch.testing.assert_close(measured, expected, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
