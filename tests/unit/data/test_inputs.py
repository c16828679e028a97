from __future__ import annotations

import pytest
import torch

from nemo_offload_rl.data.inputs import MOST_BYTES, PIECE_BYTES, copy_in_pieces, on_device

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
