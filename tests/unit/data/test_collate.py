import pytest
import torch

from nemo_offload_rl.data.collate import SampledSequence, collate_demonstrations, collate_samples, collate_tokens
from nemo_offload_rl.data.records import Demonstration
from nemo_offload_rl.errors import DataError


def test_tokens_are_padded_on_the_right_to_a_multiple():
    batch = collate_tokens([[5, 6, 7], [8]], pad_id=9, multiple=4)
    assert batch.input_ids.tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch.input_lengths.tolist() == [3, 1]
    assert batch.input_ids.dtype == torch.int64


def test_the_loss_of_demonstrations_counts_responses_and_nothing_else():
    rows = [
        Demonstration(prompt_ids=(1, 2), response_ids=(3, 4)),
        Demonstration(prompt_ids=(5,), response_ids=(6,)),
    ]
    batch = collate_demonstrations(rows, pad_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch.token_mask.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert batch.sample_mask.tolist() == [1, 1]


def test_the_first_token_is_never_counted_because_it_has_no_logprob():
    batch = collate_demonstrations([Demonstration(prompt_ids=(), response_ids=(3, 4))], pad_id=0)
    assert batch.token_mask.tolist() == [[0, 1]]


def test_a_demonstration_that_is_too_long_is_an_error():
    row = Demonstration(prompt_ids=(1, 2), response_ids=(3, 4))
    with pytest.raises(DataError, match=r"4 tokens, more than policy\.max_total_sequence_length=3"):
        collate_demonstrations([row], pad_id=0, max_length=3)


@pytest.mark.parametrize("sequences", [[], [[1], []]])
def test_no_sequences_or_an_empty_one_are_an_error(sequences):
    with pytest.raises(DataError, match="at least one"):
        collate_tokens(sequences, pad_id=0)


def make_samples():
    return collate_samples(
        [
            SampledSequence(
                token_ids=[1, 2, 3], token_mask=[0, 1, 1], generation_logprobs=[0.0, -1.0, -2.0], sample_mask=1.0
            ),
            SampledSequence(token_ids=[4, 5], token_mask=[0, 1], generation_logprobs=[0.0, -3.0], sample_mask=0.0),
        ],
        pad_id=0,
        multiple=2,
    )


def test_sampled_sequences_keep_masks_and_the_samplers_logprobs_at_their_tokens():
    batch = make_samples()
    assert batch.token_mask.tolist() == [[0, 1, 1, 0], [0, 1, 0, 0]]
    assert batch.generation_logprobs.tolist() == [[0, -1, -2, 0], [0, -3, 0, 0]]
    assert batch.sample_mask.tolist() == [1, 0]


def test_advantages_of_samples_are_spread_over_their_tokens_and_a_missing_reference_is_zero():
    samples = make_samples()
    prev = torch.full((2, 4), -0.5)
    batch = samples.with_policy_gradient_inputs(
        advantages=torch.tensor([0.5, -1.0]), prev_logprobs=prev, reference_logprobs=None
    )
    assert batch.advantages.tolist() == [[0.5] * 4, [-1.0] * 4]
    assert torch.equal(batch.reference_logprobs, torch.zeros(2, 4))
    assert torch.equal(batch.generation_logprobs, samples.generation_logprobs)
    assert batch.select([1]).advantages.tolist() == [[-1.0] * 4]
