"""The asynchronous engine, whose core is another process: over two devices in Ray, and started again without it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import spoiled_kv
import torch
from closeness import assert_close, relative_difference
from echo_workers import cpu_cluster
from engine_process import TOKEN, EngineProcess, endpoint_settings, engine_process, engine_settings, send_weights
from forked import Script
from lora_cases import SERVED, merged, random_adapters
from model_families import checkpoint_tensors, make_family, save_family_folder
from ray_workers import RefitPolicy

from nemo_offload_rl.distributed import watch
from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster, cluster_session
from nemo_offload_rl.distributed.watch import CallTimes
from nemo_offload_rl.errors import ConfigError, DataError, WorkerDiedError, WorkerHungError
from nemo_offload_rl.generation.vllm.engine_args import vllm_env
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion
from nemo_offload_rl.weight_sync.refit import refit

GREEDY = SamplingSettings(max_new_tokens=8, temperature=0.0)
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (4, 9, 150)]
BLOCK_TOKENS = 128  # of vLLM's cache on a CPU
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
    cluster: VirtualCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_stack_log", watch._StackLog())  # one of another test was shown a moment ago, perhaps
    save_family_folder(tmp_path, "qwen3")
    settings = engine_settings(
        tmp_path, async_engine=True, tensor_parallel_size=2, endpoint=endpoint_settings(tmp_path)
    )
    engine = RayGenerationEngine(cluster, settings)
    policy = RefitPolicy("qwen3")

    def ask_all() -> list[list[int]]:
        with ThreadPoolExecutor() as threads:
            answers = list(threads.map(lambda prompt: engine.generate([prompt], GREEDY), PROMPTS))
        return [completion.token_ids for ((completion,),) in answers]

    for seed in (1, 2):
        policy.set_weights(seed)
        refit(policy, engine)
        answers = ask_all()
        assert answers == token_ids(engine.generate(PROMPTS, GREEDY))
        chunks = engine.generate_as_finished(PROMPTS, [[GREEDY]] * 3)
        found = {(place, number): one.token_ids for chunk in chunks for place, number, one in chunk}
        assert found == {(place, 0): answer for place, answer in enumerate(answers)}
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
    with pytest.raises(RuntimeError, match="2 rollouts are not open"):  # as after a restart
        engine.take_rollouts(urls)
    with pytest.raises(DataError, match="is empty"):
        engine.generate([[]], GREEDY)

    (pid,) = engine.group.pids()
    core = core_of(pid)
    workers = [child for child in core.children() if "Worker_TP" in child.name()]
    assert len(workers) == 2
    core.suspend()
    times = engine.group._times
    engine.group._times = CallTimes(warning_s=0.5, timeout_s=2.0, longest_s={})
    with pytest.raises(
        WorkerHungError, match=rf"^vllm worker 0 has not answered: generate .*: process {core.pid} "
    ) as hung:
        engine.generate(PROMPTS, GREEDY)
    assert engine.group.has_raised(hung.value)
    # Agents would only find that it takes long.
    with pytest.raises(WorkerHungError, match=r"^vllm worker 0 has not answered: take_rollouts"):
        engine.take_rollouts([])
    engine.group._times = times
    stacks = caplog.text.partition("the Python stacks of all workers:")[2]
    assert "in _wait" in stacks and "worker_busy_loop" in stacks and f"process {core.pid} " in stacks
    core.kill()
    engine.group.settle(120.0)
    assert not engine.group._unfinished  # what the core had not answered has failed
    with pytest.raises(WorkerDiedError, match=CORE_DIED) as died:
        engine.generate(PROMPTS, GREEDY)
    assert engine.group.has_raised(died.value)  # what a restart of the engine asks for
    with pytest.raises(WorkerDiedError, match=CORE_DIED):
        ask_all()
    with pytest.raises(WorkerDiedError, match=CORE_DIED):
        list(engine.generate_as_finished(PROMPTS, [[GREEDY]] * 3))

    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"^vllm worker 0 died during generate: .*unexpected"):
        engine.generate(PROMPTS, GREEDY)
    with pytest.raises(WorkerDiedError, match="vllm worker 0 died during wait_for_room"):
        refit(policy, engine)
    policy.shutdown()
    engine.shutdown()
    for worker in workers:  # one may compute for ever with the other, which has ended
        with suppress(psutil.NoSuchProcess):
            worker.kill()


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
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3 does not divide the 2 devices of a host"):
        RayGenerationEngine(cluster, engine_settings(tmp_path, tensor_parallel_size=3))


@torch.no_grad()
def test_a_response_under_way_goes_on_with_new_weights_and_what_is_asked_meanwhile_has_them_from_its_start(
    tmp_path: Path,
) -> None:
    save_family_folder(tmp_path, "qwen3")
    with engine_process() as engine:
        engine.start(engine_settings(tmp_path, async_engine=True))
        for recomputes in (True, False):
            check_weights_in_flight(engine, recomputes)
        check_aborted(engine)
        engine.end()
        engine.start(keeping_settings(tmp_path, 2**30))
        check_weights_in_flight(engine, recomputes=False, sleeps=True)
        check_same_as_without_sleep(engine)
        engine.end()
        engine.start(keeping_settings(tmp_path, block_bytes()))
        check_kept_within_limit(engine)


@torch.no_grad()
def test_adapters_change_in_the_middle_of_a_response_and_agents_are_answered_with_them(tmp_path: Path) -> None:
    model = save_family_folder(tmp_path, "qwen3")
    endpoint = endpoint_settings(tmp_path)
    with engine_process() as engine:
        engine.start(engine_settings(tmp_path, async_engine=True, adapters=SERVED, endpoint=endpoint))
        for recomputes in (True, False):
            check_weights_in_flight(engine, recomputes, adapted=model)
        with openai.OpenAI(base_url=f"{engine.call('endpoint_url')}/v1", api_key=TOKEN) as client:
            answer = client.chat.completions.create(
                model=client.models.list().data[0].id,
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=8,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
        (choice,) = answer.choices
        prompt, response = list(answer.prompt_token_ids), list(choice.token_ids)
        logits = merged(model, random_adapters(model, 2))(torch.tensor([prompt + response])).logits
        assert response == logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


def check_weights_in_flight(
    engine: EngineProcess, recomputes: bool, *, sleeps: bool = False, adapted: Any | None = None
) -> None:
    """With the KV cache that the old weights computed, or with one that the new ones compute again.

    If the engine sleeps meanwhile, the old one is put away on the host. With a model that is `adapted`, only its
    adapters change.
    """
    if adapted is None:
        models = [make_family("qwen3", seed) for seed in (1, 2)]
        weights = [checkpoint_tensors(model) for model in models]
    else:
        weights = [random_adapters(adapted, seed) for seed in (1, 2)]
        models = [merged(adapted, adapters) for adapters in weights]
    old, new = models
    prompt, num_tokens = [5, 6, 7, 8], 300
    shared = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(0)).tolist()  # more than a block
    pause_s, num_old = 0.05, 0
    while not 2 <= num_old < num_tokens:  # until the pause is in the middle of the response
        send_weights(engine, weights[0], 2**20, version=4)
        engine.generate([[*shared, 1]], GREEDY)  # the prefix is cached
        engine.begin("generate", [prompt], replace(GREEDY, max_new_tokens=num_tokens))
        time.sleep(pause_s)
        if sleeps:
            engine.finish_generation(discard_weights=True)
            engine.prepare_for_generation(["weights"])
        else:
            engine.call("pause_generation", recomputes)
        num_in_progress = engine.call("num_in_progress")
        engine.begin("generate", [[*shared, 2]], GREEDY)
        send_weights(engine, weights[1], 2**20, version=6)
        if sleeps:
            engine.prepare_for_generation()
        else:
            engine.call("resume_generation")
        ((response,),), ((late,),) = engine.ended(), engine.ended()
        token_ids, logprobs = prompt + response.token_ids, torch.tensor(response.logprobs)
        by_old = logprobs_of(old(torch.tensor([token_ids])).logits[0, len(prompt) - 1 : -1], response.token_ids)
        is_old = (logprobs - by_old).abs() < 1e-4
        num_old = num_tokens if is_old.all() else int(is_old.long().argmin())
        pause_s *= 2 if num_old < 2 else 0.7
    assert num_in_progress == 1 and engine.call("num_in_progress") == 0
    assert response.versions == ((4, num_old), (6, len(response.token_ids) - num_old))
    assert late.versions == ((6, len(late.token_ids)),)
    # The last token that the old weights sampled is the first that the new ones read.
    first = len(prompt) + num_old - 1
    past = None if recomputes else old(torch.tensor([token_ids[:first]])).past_key_values
    read = token_ids if recomputes else token_ids[first:]
    logits = new(torch.tensor([read]), past_key_values=past).logits[0, first if recomputes else 0 : -1]
    assert_close(logprobs[num_old:], logprobs_of(logits, response.token_ids[num_old:]))
    ((later,),) = engine.generate([[*shared, 3]], GREEDY)
    for last, begun_later in ((2, late), (3, later)):
        logits = new(torch.tensor([[*shared, last, *begun_later.token_ids]])).logits[0, len(shared) : -1]
        assert_close(torch.tensor(begun_later.logprobs), logprobs_of(logits, begun_later.token_ids))


def keeping_settings(folder: Path, kept_kv_bytes: int) -> VllmSettings:
    """Of an engine that loses its cache as it falls asleep, but for these bytes."""
    return engine_settings(
        folder,
        async_engine=True,
        kept_kv_bytes=kept_kv_bytes,
        vllm_kwargs={"worker_extension_cls": spoiled_kv.BY_NAME},
    )


def block_bytes() -> int:
    """Of a block of the CPU's cache."""
    config = make_family("qwen3", 0).config
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4 * BLOCK_TOKENS


def sleep_in_the_middle(
    engine: EngineProcess, prompts: list[list[int]], sampling: SamplingSettings, num_kept: int
) -> tuple[list[Completion], list[Completion]]:
    """Responses without a sleep, and with one in which so many blocks are kept, both with the same weights."""
    weights = checkpoint_tensors(make_family("qwen3", 1))
    send_weights(engine, weights, 2**20)
    whole = [one for (one,) in engine.generate(prompts, sampling)]
    send_weights(engine, weights, 2**20)  # so that no prompt is cached
    wait_s, kept = 0.05, -1
    while kept != num_kept:  # until the sleep is in the middle of the responses
        engine.begin("generate", prompts, sampling)
        time.sleep(wait_s)
        engine.finish_generation(discard_weights=True)
        (kept,) = engine.call("_rpc", "num_kept", ())
        engine.prepare_for_generation(["weights"])
        send_weights(engine, weights, 2**20)
        engine.prepare_for_generation()
        slept = [one for (one,) in engine.ended()]
        wait_s *= 0.7 if wait_s > 1 else 1.5
    return whole, slept


def check_same_as_without_sleep(engine: EngineProcess) -> None:
    """A response is bit for bit the same, and so is the next one of its prompt, whose cached blocks are lost."""
    prompt = torch.randint(0, 256, (BLOCK_TOKENS + 2,), generator=torch.Generator().manual_seed(0)).tolist()
    whole, slept = sleep_in_the_middle(engine, [prompt], replace(GREEDY, max_new_tokens=200), num_kept=2)
    assert slept == whole
    engine.generate([prompt], GREEDY)  # the prompt is cached
    engine.finish_generation(discard_weights=False)  # so that nothing but the sleep drops it
    engine.prepare_for_generation()
    ((again,),) = engine.generate([prompt], GREEDY)
    assert again.token_ids == whole[0].token_ids[:8]
    assert_close(torch.tensor(again.logprobs), torch.tensor(whole[0].logprobs[:8]))


def check_kept_within_limit(engine: EngineProcess) -> None:
    """Of two responses one is kept; the other is computed again, which gives the same tokens."""
    prompts, sampling = [[5, 6, 7, 8], [9, 10, 11, 12]], replace(GREEDY, max_new_tokens=BLOCK_TOKENS - 4)
    whole, slept = sleep_in_the_middle(engine, prompts, sampling, num_kept=1)
    for one, other in zip(whole, slept, strict=True):
        assert one.token_ids == other.token_ids
        assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs))


def check_aborted(engine: EngineProcess) -> None:
    """What an aborted call gives back begins the whole responses, with right logprobs, and can be continued."""
    model, prompts = make_family("qwen3", 2), PROMPTS[:2]
    sampling = SamplingSettings(max_new_tokens=200, temperature=1.0, seed=3)
    whole = engine.generate(prompts, sampling, 2)
    wait_s, groups = 0.05, whole
    while not any(one.finish_reason == "abort" and one.token_ids for group in groups for one in group):
        engine.begin("generate", prompts, sampling, 2)
        time.sleep(wait_s)
        engine.call("abort_generation")
        groups = engine.ended()
        wait_s *= 0.7 if any(one.finish_reason == "length" for group in groups for one in group) else 2
    begun = [(prompt, said) for prompt, group in zip(prompts, groups, strict=True) for said in group]
    rest = engine.call(
        "generate_each",
        [prompt + said.token_ids for prompt, said in begun],
        [replace(GREEDY, max_new_tokens=201 - len(said.token_ids)) for _, said in begun],
    )
    all_whole = [one for group in whole for one in group]
    for (prompt, said), more, one in zip(begun, rest, all_whole, strict=True):
        num_said = len(said.token_ids)
        assert said.token_ids == one.token_ids[:num_said]
        token_ids = said.token_ids + more.token_ids
        assert len(token_ids) == 201 or token_ids[-1] == model.config.eos_token_id
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        assert_close(torch.tensor(said.logprobs), logprobs_of(logits[:num_said], said.token_ids))
        assert more.token_ids == logits[num_said:].argmax(-1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_response_goes_on_from_the_hosts_copy_of_its_cache_after_a_sleep_that_freed_the_gpu(tmp_path: Path) -> None:
    verdicts, output = tmp_path / "verdicts.json", tmp_path / "output"
    output.mkdir()
    script = Script(
        [Path(__file__).parents[2] / "support/slept_responses.py", tmp_path / "model", verdicts],
        output,
        cwd=tmp_path,
        env={**os.environ, **vllm_env("cuda")},
    )
    ended = script.wait(1500)
    assert ended.status == 0, ended.stderr
    found = json.loads(verdicts.read_text())
    assert found["kept"] > 1 and found["freed_bytes"] > 2**25  # of a cache of 2**26
    whole, slept = found["whole"], found["slept"]
    pairs = list(zip(whole["token_ids"], slept["token_ids"], strict=False))
    num_same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
    # Other kernels may round another way, so that a token comes which is as likely; in any case after the sleep.
    assert num_same > 16 * found["kept"] - found["num_prompt"]
    logprobs = [torch.tensor(one["logprobs"][:num_same]) for one in (slept, whole)]
    assert relative_difference(*logprobs) < 2e-2  # of bfloat16


def logprobs_of(logits: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """Of the tokens, from logits [T, V]."""
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
