"""The asynchronous engine, whose core is another process: over two devices in Ray, and started again without it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import openai
import psutil
import pytest
import torch
from echo_workers import cpu_cluster
from engine_process import TOKEN, endpoint_settings, engine_process, engine_settings, send_weights
from model_families import checkpoint_tensors, make_family, save_family_folder
from ray_workers import RefitPolicy

from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster, cluster_session
from nemo_offload_rl.errors import ConfigError, DataError, WorkerDiedError
from nemo_offload_rl.generation.interfaces import Completion, SamplingSettings
from nemo_offload_rl.weight_sync.refit import refit

GREEDY = SamplingSettings(max_new_tokens=8, temperature=0.0)
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (4, 9, 150)]
CORE_DIED = "a process of vLLM's engine core has ended"


@pytest.fixture(scope="module")
def cluster(ray_here: Callable[[], None]) -> Iterator[VirtualCluster]:
    """Two slots."""
    ray_here()
    with cluster_session(cpu_cluster(2)) as session:
        yield session


def core_of(pid: int) -> psutil.Process:
    (core,) = [child for child in psutil.Process(pid).children() if "EngineCore" in child.name()]
    return core


@torch.no_grad()
def test_overlapping_requests_of_an_engine_over_two_devices_use_the_refitted_weights(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    save_family_folder(tmp_path, "qwen3")
    settings = engine_settings(
        tmp_path, async_engine=True, tensor_parallel_size=2, endpoint=endpoint_settings(tmp_path)
    )
    engine = RayGenerationEngine(cluster, settings)
    policy = RefitPolicy("qwen3")

    async def ask_all() -> list[list[int]]:
        answers = await asyncio.gather(*(engine.generate_async(prompt, GREEDY) for prompt in PROMPTS))
        return [completion.token_ids for (completion,) in answers]

    for seed in (1, 2):
        policy.set_weights(seed)
        refit(policy, engine)
        answers = asyncio.run(ask_all())
        assert answers == token_ids(engine.generate(PROMPTS, GREEDY))
        model = make_family("qwen3", seed)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            assert answer == logits.argmax(-1).tolist()
    # What agents are answered is what the same engine answers otherwise.
    urls = engine.open_rollouts([GREEDY, GREEDY])
    for word, url in zip("ab", urls, strict=True):
        with openai.OpenAI(base_url=url, api_key=TOKEN) as agent:
            agent.chat.completions.create(model="", messages=[{"role": "user", "content": word}])
    for (call,) in engine.take_rollouts(urls):
        assert call.weight_version == 2
        assert engine.generate([call.prompt_token_ids], GREEDY) == [[call.completion]]
    with pytest.raises(DataError, match="is empty"):
        asyncio.run(engine.generate_async([], GREEDY))

    (pid,) = engine.group.pids()
    core = core_of(pid)
    assert len([child for child in core.children() if "Worker_TP" in child.name()]) == 2
    core.kill()
    with pytest.raises(WorkerDiedError, match=CORE_DIED) as died:
        engine.generate(PROMPTS, GREEDY)
    assert died.value is engine.group.failure  # what a restart of the engine asks for
    with pytest.raises(WorkerDiedError, match=CORE_DIED):
        asyncio.run(ask_all())

    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"^vllm worker 0 died during generate: .*unexpected"):
        engine.generate(PROMPTS, GREEDY)
    with pytest.raises(WorkerDiedError, match="vllm worker 0 died during prepare_for_generation"):
        refit(policy, engine)
    policy.shutdown()
    engine.shutdown()


def token_ids(answers: list[list[Completion]]) -> list[list[int]]:
    return [samples[0].token_ids for samples in answers]


def test_an_engine_whose_core_has_died_answers_as_before_when_it_is_started_again(tmp_path: Path) -> None:
    weights = checkpoint_tensors(save_family_folder(tmp_path, "qwen3"))
    settings = engine_settings(tmp_path, async_engine=True)
    with engine_process() as engine:
        engine.start(settings)
        send_weights(engine, weights, 2**20)
        answers = token_ids(engine.generate(PROMPTS, GREEDY))
        core_of(engine.pid).kill()
        with pytest.raises(WorkerDiedError, match=CORE_DIED):
            engine.generate(PROMPTS, GREEDY)
        engine.start(settings)
        send_weights(engine, weights, 2**20)
        # Which requests share a batch depends on when they arrive, and so do the last digits of logprobs.
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == answers
        # A response ends at max_model_len (400), whatever it might have had.
        ((cut,),) = engine.generate([[7] * 395], replace(GREEDY, max_new_tokens=50))
        assert (len(cut.token_ids), cut.finish_reason) == (5, "length")


def test_an_engine_over_more_devices_than_a_host_has_is_refused_by_the_key(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 does not divide a host's 2 devices"):
        RayGenerationEngine(cluster, engine_settings(tmp_path, tensor_parallel_size=3))
