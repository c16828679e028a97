import pytest
import torch
from closeness import assert_close

from nemo_offload_rl.policy.backends.logprobs import VocabShard, chunked_logprobs, token_logprobs

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
    found = token_logprobs(logits, targets, temperature, WHOLE)
    (found_grad,) = torch.autograd.grad(found, logits, upstream)

    assert_close(found, expected)
    assert_close(found_grad, expected_grad)


def test_logprobs_of_bfloat16_logits_are_computed_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(1, 4, 1000).bfloat16()
    targets = torch.randint(0, 1000, (1, 4))
    expected = logits.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    found = token_logprobs(logits, targets, 1.0, WHOLE)
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
        logprobs = chunked_logprobs(output_layer, hidden, targets, temperature=1.0, chunk_size=size, shard=WHOLE)
        return logprobs, torch.autograd.grad(logprobs.sum(), [hidden, layer.weight])

    whole, whole_grads = run(None)
    widths.clear()
    chunked, chunked_grads = run(chunk_size)

    assert max(widths) <= chunk_size
    assert_close(chunked, whole)
    assert_close(chunked_grads, whole_grads)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_no_position_at_all_has_gradients_of_zero(chunk_size):
    layer = torch.nn.Linear(4, 9)
    hidden, targets = torch.randn(0, 4, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    found = chunked_logprobs(layer, hidden, targets, temperature=1.0, chunk_size=chunk_size, shard=WHOLE)
    found.sum().backward()
    assert found.shape == (0,) and hidden.grad.shape == (0, 4)
    assert torch.equal(layer.weight.grad, torch.zeros(9, 4))
