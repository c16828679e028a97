from __future__ import annotations

import asyncio

import psutil
import pytest
import torch
from tiny_models import make_qwen3

from nemo_offload_rl.errors import DataError, WorkerDiedError
from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.weight_sync.refit import refit


@torch.no_grad()
def test_overlapping_requests_of_the_async_engine_use_the_refitted_weights(start_engine, start_policy) -> None:
    engine, policy = start_engine(async_engine=True), start_policy()
    sampling = SamplingSettings(max_new_tokens=8, temperature=0.0)
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (4, 9, 150)]

    async def ask_all() -> list[list[int]]:
        answers = await asyncio.gather(*(engine.generate_async(prompt, sampling) for prompt in prompts))
        return [completion.token_ids for (completion,) in answers]

    for seed in (1, 2):
        policy.set_weights(seed)
        refit(policy, engine)
        answers = asyncio.run(ask_all())
        assert answers == [samples[0].token_ids for samples in engine.generate(prompts, sampling)]
        model = make_qwen3(seed)
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            assert answer == logits.argmax(-1).tolist()
    with pytest.raises(DataError, match="is empty"):
        asyncio.run(engine.generate_async([], sampling))

    (core,) = [child for child in psutil.Process(engine.group.pids()[0]).children() if "EngineCore" in child.name()]
    core.kill()
    with pytest.raises(WorkerDiedError, match="a process of vLLM's engine core has ended") as died:
        engine.generate(prompts, sampling)
    assert died.value is engine.group.failure  # what a restart of the engine asks for
    with pytest.raises(WorkerDiedError, match="a process of vLLM's engine core has ended"):
        asyncio.run(ask_all())
    engine.restart()
    refit(policy, engine)
    assert asyncio.run(ask_all()) == answers
