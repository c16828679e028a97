"""The short way to slots of decoding, next to vLLM's own manager of blocks."""

from __future__ import annotations

import random

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from nemo_offload_rl.generation.vllm.schedulers import slots_of_decoding

BLOCK = 4
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = KVCacheGroupSpec(["0"], FullAttentionSpec(**SHAPE))
WINDOW = KVCacheGroupSpec(["1"], SlidingWindowSpec(**SHAPE, sliding_window=8))


def manager_of(*groups: KVCacheGroupSpec, caches: bool) -> KVCacheManager:
    config = KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=list(groups))
    return KVCacheManager(config, 256, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=caches)


def state_of(manager: KVCacheManager, requests: list[Request]) -> object:
    """Blocks of each request, free blocks in the order in which they are given, and what of contents is known."""
    pool = manager.block_pool
    blocks = [manager.get_block_ids(request.request_id) for request in requests]
    return (
        blocks,
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        [block.block_hash for block in pool.blocks],
    )


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("lag", [0, 1])  # of asynchronous scheduling: tokens that are computed, but not known yet
def test_blocks_are_those_of_vllm_for_requests_that_come_decode_and_end_in_any_order(caches: bool, lag: int) -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256) if caches else None
    draw, sides = random.Random(lag), []
    for _ in range(2):
        sides.append(manager_of(FULL, caches=caches))
    asked: list[int] = []
    usual = sides[1].allocate_slots

    def counted(request, *arguments, **more):
        asked.append(1)
        return usual(request, *arguments, **more)

    sides[1].allocate_slots = counted
    allocators = [sides[0].allocate_slots, slots_of_decoding(sides[1])]
    running: list[list[Request]] = [[], []]
    num_asked = num_refused = 0
    for step in range(400):
        if draw.random() < 0.2 and len(running[0]) < 8:
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]  # some prompts begin alike
            for side, manager in enumerate(sides):
                params = SamplingParams(max_tokens=200)
                request = Request(f"{step}", list(prompt), params, None, block_hasher=hasher)
                found, num_found = manager.get_computed_blocks(request)
                num_new = len(prompt) - num_found
                got = allocators[side](request, num_new, num_found, found)
                if got is not None:
                    request.status = RequestStatus.RUNNING
                    request.num_computed_tokens = len(prompt)
                    running[side].append(request)
        assert [it.request_id for it in running[0]] == [it.request_id for it in running[1]]
        token, ends = draw.randrange(3), draw.random() < 0.05
        for place in range(len(running[0])):
            answers = []
            for side, requests in enumerate(running):
                request = requests[place]
                if request.num_computed_tokens - request.num_tokens >= lag:
                    request.append_output_token_ids(token)
                blocks = allocators[side](request, 1)
                num_asked += side
                answers.append(None if blocks is None else blocks.get_block_ids())
                if blocks is not None:
                    request.num_computed_tokens += 1
            num_refused += answers[0] is None
            assert answers[0] == answers[1]
        if (ends or num_refused) and running[0]:
            place, num_refused = draw.randrange(len(running[0])), 0
            for manager, requests in zip(sides, running, strict=True):
                manager.free(requests.pop(place))
        assert state_of(sides[0], running[0]) == state_of(sides[1], running[1])
    assert len(asked) < 0.7 * num_asked


def test_models_whose_layers_give_blocks_back_have_no_short_way() -> None:
    for groups in ((WINDOW,), (FULL, WINDOW)):
        manager = manager_of(*groups, caches=True)
        assert slots_of_decoding(manager) == manager.allocate_slots
