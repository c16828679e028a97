from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
import torch
from model_families import make_family

from nemo_offload_rl.errors import ConfigError, DataError, WorkerDiedError
from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.weight_sync.refit import refit


@torch.no_grad()
def test_overlapping_requests_of_the_async_engine_use_the_refitted_weights(start_engine, start_policy) -> None:
    engine, policy = start_engine("qwen3", async_engine=True), start_policy("qwen3")
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
        model = make_family("qwen3", seed)
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

    os.kill(engine.group.pids()[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"^vllm worker 0 died during generate: .*unexpected"):
        engine.generate(prompts, sampling)
    with pytest.raises(WorkerDiedError, match="vllm worker 0 died during prepare_for_generation"):
        refit(policy, engine)


def test_an_engine_over_more_devices_than_a_host_has_is_refused_by_the_key(start_engine) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 does not divide a host's 1 devices"):
        start_engine("qwen3", tensor_parallel_size=2)
