from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_offload_rl.data.batch import (
    MOST_BYTES,
    PIECE_BYTES,
    SampledSequence,
    collate_examples,
    collate_pairs,
    collate_samples,
    copy_in_pieces,
    on_device,
)
from nemo_offload_rl.data.records import Example, ExamplePair
from nemo_offload_rl.errors import DataError


def example(token_ids, num_given) -> Example:
    return Example(token_ids=np.array(token_ids, dtype=np.int32), token_mask=np.arange(len(token_ids)) >= num_given)


def test_examples_are_padded_and_keep_what_the_loss_counts():
    batch = collate_examples([example([1, 2, 3, 4], 2), example([5, 6], 1)], pad_id=9, multiple=3)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 9, 9], [5, 6, 9, 9, 9, 9]]
    assert batch.input_lengths.tolist() == [4, 2]
    assert batch.token_mask.tolist() == [[0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert batch.sample_mask.tolist() == [1, 1]
    assert batch.input_ids.dtype == torch.int64


def test_pairs_are_neighbouring_rows_with_the_better_one_first():
    pairs = [
        ExamplePair(chosen=example([1, 2], 1), rejected=example([1, 3, 4], 1)),
        ExamplePair(chosen=example([5, 6], 1), rejected=example([5, 7], 1)),
    ]
    batch = collate_pairs(pairs, pad_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 0], [1, 3, 4], [5, 6, 0], [5, 7, 0]]
    assert batch.reference_sums.tolist() == [0, 0, 0, 0]
    assert batch.select([2, 3]).rows_per_group == 2


@pytest.mark.parametrize("sequences", [[], [[1], []]])
def test_no_sequences_or_an_empty_one_are_an_error(sequences):
    with pytest.raises(DataError, match="at least one"):
        collate_examples([example(token_ids, 0) for token_ids in sequences], pad_id=0)


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


DTYPES = (torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SIZES_BYTES = (0, 8, PIECE_BYTES - 8, PIECE_BYTES, PIECE_BYTES + 8, 3 * PIECE_BYTES, MOST_BYTES, MOST_BYTES + 8)


def values(num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_bytes)
    end = 2 if dtype is torch.bool else 100
    return torch.randint(0, end, (num_bytes // dtype.itemsize,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_bytes", SIZES_BYTES)
def test_pieces_are_the_whole(num_bytes: int, dtype: torch.dtype) -> None:
    source = values(num_bytes, dtype)
    target = torch.zeros_like(source)
    copy_in_pieces(source, target)
    assert torch.equal(source, target)


def test_what_is_on_the_device_is_shared() -> None:
    tensor = values(2 * PIECE_BYTES, torch.int64)
    assert on_device(tensor, "cpu") is tensor


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_bytes", SIZES_BYTES)
def test_inputs_arrive_on_a_gpu_and_their_memory_may_be_used_again(num_bytes: int, dtype: torch.dtype) -> None:
    source = values(num_bytes, dtype)
    wanted = source.clone()
    moved = on_device(source, "cuda")
    source.zero_()
    assert moved.dtype == dtype
    assert torch.equal(moved.cpu(), wanted)
    columns = wanted[: len(wanted) // 2 * 2].view(-1, 2).t()
    assert torch.equal(on_device(columns, "cuda").cpu(), columns)


@pytest.mark.gpu
@on_gpu
def test_an_input_waits_for_no_copies_of_state() -> None:
    state = torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)
    room = torch.empty_like(state, device="cuda")
    source = values(8 * PIECE_BYTES, torch.int64)
    on_device(source, "cuda")  # loads what the first copy loads
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        room.copy_(state, non_blocking=True)
    moved = on_device(source, "cuda")
    torch.cuda.current_stream().synchronize()
    assert not side.query()
    assert torch.equal(moved.cpu(), source)
