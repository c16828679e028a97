"""The scheduler with short steps of decoding, next to vLLM's, both without a model: tokens are drawn by their place."""

from __future__ import annotations

import random
from collections import Counter, deque
from copy import copy, deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from engine_process import engine_process, engine_settings
from model_families import save_family_folder
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from nemo_offload_rl.generation.vllm.decode_steps import AsyncDecodeScheduler, DecodeScheduler
from nemo_offload_rl.keys.generation import SamplingSettings

BLOCK, NUM_BLOCKS, VOCAB, EOS = 4, 40, 150, 7
COMPARED = (
    *("status", "num_computed_tokens", "num_output_placeholders", "async_tokens_to_discard", "spec_token_ids"),
    *("_all_token_ids", "_output_token_ids", "block_hashes", "is_prefill_chunk", "num_preemptions", "stop_reason"),
)
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = KVCacheGroupSpec(["0"], FullAttentionSpec(**SHAPE))
WINDOW = KVCacheGroupSpec(["1"], SlidingWindowSpec(**SHAPE, sliding_window=8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model."""
    folder = tmp_path_factory.mktemp("model")
    save_family_folder(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> VllmConfig:
    """Of a tiny engine, with prompts of more than 24 tokens read in parts."""
    arguments = EngineArgs(
        str(folder), max_model_len=64, max_num_seqs=6, max_num_batched_tokens=24, enable_chunked_prefill=True,
        block_size=BLOCK, skip_tokenizer_init=True,
    )  # fmt: skip
    return arguments.create_engine_config()


class Side:
    """One scheduler, and what its callers were told.

    Attributes:
        told: Tokens of each response.
        ended: Reasons for which each response ended.
        cached: Tokens of each prompt that were known.
        num_outputs: Number of times that a caller was told something.
        num_short: Number of steps that were scheduled the short way.
    """

    def __init__(self, kind: type[Scheduler], config: VllmConfig, new_runner: bool, *groups: KVCacheGroupSpec) -> None:
        blocks = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=list(groups))
        self.scheduler = kind(config, blocks, StructuredOutputManager(config), BLOCK)
        self.scheduler.use_v2_model_runner = new_runner
        self.depth = 2 if isinstance(self.scheduler, AsyncScheduler) else 1
        self.under_way: deque[tuple[SchedulerOutput, dict[str, int]]] = deque()
        self.told: dict[str, list[int]] = {}
        self.ended: dict[str, tuple[Any, Any]] = {}
        self.cached: dict[str, int] = {}
        self.num_outputs = self.num_short = 0
        if isinstance(self.scheduler, DecodeScheduler):
            self.decoding, self.scheduler._decoding = self.scheduler._decoding, self.counted

    def counted(self) -> list[Request]:
        chosen = self.decoding()
        self.num_short += bool(chosen)
        return chosen

    def add(self, name: str, prompt: list[int], params: SamplingParams, caches: bool) -> None:
        hasher = get_request_block_hasher(BLOCK, sha256) if caches else None
        self.told[name] = []
        self.scheduler.add_request(Request(name, list(prompt), params.clone(), None, block_hasher=hasher))

    def step(self) -> dict[str, Any]:
        """Schedule a step, and end the oldest one if as many are under way as an engine has."""
        step, requests = self.scheduler.schedule(), self.scheduler.requests
        whole = [name for name in step.num_scheduled_tokens if not requests[name].is_prefill_chunk]
        content = content_of(step)
        self.under_way.append((step, {name: requests[name].num_computed_tokens for name in whole}))
        if len(self.under_way) == self.depth:
            self.end_step()
        return content

    def end_step(self) -> None:
        """Sample the tokens of the oldest step, and tell callers."""
        step, lengths = self.under_way.popleft()
        names = sorted(step.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        sampled = [[token_at(name, lengths[name])] if name in lengths else [] for name in names]
        of_clients = self.scheduler.update_from_output(step, ModelRunnerOutput(names, places, sampled))
        for output in of_clients[0].outputs if 0 in of_clients else []:
            self.num_outputs += 1
            self.told[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = (output.finish_reason, output.stop_reason)
            if output.prefill_stats is not None:
                self.cached[output.request_id] = output.prefill_stats.num_cached_tokens

    def pause(self) -> None:
        """Pause, as an engine that keeps its requests does."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self.scheduler.has_requests() or self.under_way:
            if self.scheduler.has_requests():
                self.step()
            if self.under_way:
                self.end_step()

    def state(self) -> object:
        """All that later steps depend on."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        pool = manager.block_pool
        return (
            [
                (name, manager.get_block_ids(name) if it.num_computed_tokens else None, attributes_of(it))
                for name, it in scheduler.requests.items()
            ],
            [it.request_id for it in scheduler.running],
            [it.request_id for it in scheduler.waiting],
            [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            [(block.block_hash, block.ref_cnt) for block in pool.blocks],
        )


def attributes_of(request: Request) -> list[object]:
    """Copies of what changes in a request."""
    return [copy(getattr(request, name)) for name in COMPARED]


def content_of(step: SchedulerOutput) -> dict[str, Any]:
    """What a step asks of the workers, but for tokens that they know unless they forgot them in a pause."""
    new = [
        (it.req_id, copy(it.prompt_token_ids), copy(it.prefill_token_ids), it.block_ids, it.num_computed_tokens)
        for it in step.scheduled_new_reqs
    ]
    kept = deepcopy(replace(step.scheduled_cached_reqs, all_token_ids={}))
    others = {it.name: copy(getattr(step, it.name)) for it in fields(step)}
    tokens = list(step.num_scheduled_tokens.items())
    return {**others, "num_scheduled_tokens": tokens, "scheduled_new_reqs": new, "scheduled_cached_reqs": kept}


def token_at(name: str, place: int) -> int:
    """Token of a response at a place of its sequence, whenever it is sampled."""
    return crc32(f"{name} {place}".encode()) % VOCAB


def params_of(draw: random.Random) -> SamplingParams:
    """Of a caller that reads whole responses, or of one that wants to know more."""
    kinds: list[dict[str, Any]] = [{}] * 5 + [{"min_tokens": 1}, {"stop_token_ids": list(range(20, 40))}]
    if draw.random() < 0.1:
        kinds = [{"stop": ["x"]}, {"logprobs": 0}, {"output_kind": RequestOutputKind.CUMULATIVE}]
    changes = {
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "max_tokens": draw.choice([1, 10, 30, 60]),
        **draw.choice(kinds),
    }
    params = SamplingParams(detokenize="stop" in changes, **changes)
    params.update_from_generation_config({}, EOS)
    return params


@pytest.mark.parametrize(
    ("is_async", "caches", "groups"),
    [(False, True, (FULL,)), (True, True, (FULL,)), (True, False, (FULL,)), (True, True, (FULL, WINDOW))],
)
def test_steps_blocks_and_responses_are_those_of_vllm_whatever_happens(
    config: VllmConfig, is_async: bool, caches: bool, groups: tuple[KVCacheGroupSpec, ...]
) -> None:
    init_none_hash(sha256)
    config.cache_config.num_gpu_blocks, config.cache_config.enable_prefix_caching = NUM_BLOCKS, caches
    kinds = (AsyncDecodeScheduler, AsyncScheduler) if is_async else (DecodeScheduler, Scheduler)
    mine, theirs = sides = [Side(kind, config, is_async, *groups) for kind in kinds]
    draw, happened = random.Random(3), Counter[str]()
    for number in range(1000):
        chance, requests = draw.random(), mine.scheduler.requests
        if chance < 0.15 and len(requests) < 9:
            start = [draw.randrange(VOCAB)] * draw.randrange(1, 9)  # prompts of the same start share blocks
            prompt = [*start, *(draw.randrange(VOCAB) for _ in range(draw.choice([0, 2, 40])))]
            params = params_of(draw)
            for side in sides:
                side.add(f"{number}", prompt, params, caches)
        elif chance < 0.16 and requests:
            happened["abort"] += 1
            name = draw.choice(list(requests))
            for side in sides:
                side.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        elif chance < 0.18:
            happened["pause"] += 1
            for side in sides:
                side.pause()
            check_told(mine, theirs)
            assert mine.state() == theirs.state()
            for side in sides:
                side.scheduler.set_pause_state(PauseState.UNPAUSED)
        elif chance < 0.19:
            happened["reset"] += 1
            for side in sides:
                side.scheduler.reset_prefix_cache(reset_running_requests=True)
        if mine.scheduler.has_requests():
            happened["step"] += 1
            one, other = (side.step() for side in sides)
            assert one == other
            happened["preemption"] += chance >= 0.19 and len(one["preempted_req_ids"])
        assert mine.state() == theirs.state()
    for side in sides:
        side.pause()
    check_told(mine, theirs)
    assert (mine.ended, mine.cached) == (theirs.ended, theirs.cached)
    assert {reason for reason, _ in mine.ended.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert {type(reason) for _, reason in mine.ended.values()} == {int, type(None)}
    assert min(happened[what] for what in ("abort", "pause", "reset", "preemption")) > 5
    assert mine.num_outputs < theirs.num_outputs / 3
    assert (mine.num_short > happened["step"] / 4) == (groups == (FULL,))


def check_told(mine: Side, theirs: Side) -> None:
    """Callers know the same tokens, but for those that aborted their requests."""
    known = [name for name in theirs.told if name in theirs.ended or name in theirs.scheduler.requests]
    assert [mine.told[name] for name in known] == [theirs.told[name] for name in known]


def test_an_engine_answers_bit_for_bit_what_it_does_with_the_scheduler_of_vllm(folder: Path) -> None:
    prompts = [[draw % 250 for draw in range(start, start + length)] for start, length in ((3, 5), (9, 40), (70, 2))]
    sampling = SamplingSettings(max_new_tokens=70, temperature=1.0, seed=5, stop_token_ids=(2, 3, 4))
    answers = []
    with engine_process() as engine:
        for changes in ({}, {"scheduler_cls": None}):
            kwargs = {"load_format": "auto", "block_size": 32, "max_num_seqs": 16, **changes}
            engine.start(engine_settings(folder, per_request_seeds=False, vllm_kwargs=kwargs))
            answers.append([engine.generate(prompts, sampling, 8) for _ in range(2)])
    assert answers[0] == answers[1]
    reasons = Counter(one.finish_reason for groups in answers[0] for group in groups for one in group)
    assert min(reasons["stop"], reasons["length"]) > 3
    assert all(len(one.logprobs) == len(one.token_ids) for groups in answers[0] for group in groups for one in group)
