"""What one vLLM engine answers and refuses; `test_refits.py` has refits, `unit/models/test_matrix.py` the models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from engine_process import EngineProcess, engine_process, engine_settings, send_weights
from model_families import checkpoint_tensors, save_family_folder
from tiny_models import make_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.hf.export import load_config
from nemo_offload_rl.backends.scoring.logprobs import drawn_scores
from nemo_offload_rl.errors import ConfigError, DataError
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.keys.worker import TokenFilter
from nemo_offload_rl.protocols.engine import Finished
from nemo_offload_rl.protocols.vocab import VocabShard

GREEDY = SamplingSettings(max_new_tokens=12, temperature=0.0)
# With these the model says something else than its config.json would.
OVERRIDES = {"rms_norm_eps": 0.3, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 60, 140, 300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """Hugging Face's with the config of a policy, whose weights the engine gets."""
    save_family_folder(folder, "qwen3")
    return AutoModelForCausalLM.from_pretrained(folder, config=load_config(str(folder), OVERRIDES))


@pytest.fixture(scope="module")
def started(folder: Path, model: Any) -> Iterator[EngineProcess]:
    """An engine that has had no refit yet, or one of a test before."""
    with engine_process() as process:
        process.start(engine_settings(folder, hf_config_overrides=OVERRIDES))
        yield process


@pytest.fixture
def engine(started: EngineProcess, model: Any) -> EngineProcess:
    """Awake, and with the model's weights."""
    started.prepare_for_generation()
    send_weights(started, checkpoint_tensors(model), 2**20)
    return started


@torch.no_grad()
def logits_of_response(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """[T, V] float32 logits from which each token of the response was drawn."""
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()


def assert_greedy_matches(engine: EngineProcess, model: Any) -> None:
    for prompt, (completion,) in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        logits = logits_of_response(model, prompt, completion.token_ids)
        assert completion.token_ids == logits.argmax(-1).tolist()
        assert_close(torch.tensor(completion.logprobs), logits.log_softmax(-1).max(-1).values)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_behaviour_logprobs_are_those_at_the_sampling_temperature(
    engine: EngineProcess, model: Any, temperature: float
) -> None:
    completions = engine.generate(PROMPTS, SamplingSettings(max_new_tokens=16, temperature=temperature))
    for prompt, (completion,) in zip(PROMPTS, completions, strict=True):
        logits = logits_of_response(model, prompt, completion.token_ids)
        logprobs = (logits / temperature).log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert_close(torch.tensor(completion.logprobs), expected)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kept", [TokenFilter(5, 1.0), TokenFilter(None, 0.7), TokenFilter(40, 0.5)])
def test_logprobs_are_those_of_the_tokens_that_filters_leave_as_the_by_policy_are(
    engine: EngineProcess, model: Any, kept: TokenFilter, seed: int | None
) -> None:
    sampling = SamplingSettings(max_new_tokens=16, temperature=0.7, seed=seed, top_k=kept.top_k, top_p=kept.top_p)
    for (completion,), prompt in zip(engine.generate(PROMPTS, sampling), PROMPTS, strict=True):
        logits, sampled = logits_of_response(model, prompt, completion.token_ids), torch.tensor(completion.token_ids)
        by_policy = drawn_scores(logits, sampled, 0.7, VocabShard(0, None), kept=kept).logprobs
        # Where the policy has 0, for a token that is not in its set, the engine would have drawn one with less.
        assert_close(torch.tensor(completion.logprobs), by_policy)


def test_a_seed_repeats_a_call_and_gives_every_sample_its_own_draws(engine: EngineProcess) -> None:
    sampling = SamplingSettings(max_new_tokens=8, temperature=1.5, seed=5)
    first = engine.generate([PROMPTS[0]] * 2, sampling, num_samples=4)
    assert engine.generate([PROMPTS[0]] * 2, sampling, num_samples=4) == first
    assert [len(samples) for samples in first] == [4, 4]
    assert len({tuple(sample.token_ids) for samples in first for sample in samples}) == 8
    # Responses that are asked for one by one are the same, and those that finish first come first.
    samplings = [[replace(sampling, seed=5 + 4 * place + number) for number in range(4)] for place in range(2)]
    samplings[0][1] = replace(samplings[0][1], max_new_tokens=2)
    engine.call("begin_generation", [PROMPTS[0]] * 2, samplings)
    steps: list[list[Finished]] = [engine.call("take_finished", 0.0) for _ in range(9)]
    (place, number, short), *others = [finished for step in steps for finished in step]
    assert (place, number, short.token_ids) == (0, 1, first[0][1].token_ids[:2])
    assert len(others) == 7 and all(completion == first[place][number] for place, number, completion in others)
    assert engine.call("take_finished", 9.0) == []


def test_stop_token_ids_and_stop_strings_end_a_response_and_belong_to_it(engine: EngineProcess) -> None:
    ((whole,),) = engine.generate([PROMPTS[0]], GREEDY)
    assert whole.finish_reason == "length"
    assert len(whole.token_ids) == 12
    stop = whole.token_ids[4]
    expected = whole.token_ids[: whole.token_ids.index(stop) + 1]
    by_id = SamplingSettings(max_new_tokens=12, temperature=0.0, stop_token_ids=(stop,))
    ((completion,),) = engine.generate([PROMPTS[0]], by_id)
    assert (completion.token_ids, completion.finish_reason) == (expected, "stop")
    text = make_tokenizer().decode([stop])
    by_text = SamplingSettings(max_new_tokens=12, temperature=0.0, stop_strings=(text,))
    ((completion,),) = engine.generate([PROMPTS[0]], by_text)
    assert (completion.token_ids, completion.finish_reason) == (expected, "stop")
    assert len(completion.logprobs) == len(completion.token_ids)


def test_a_response_ends_at_the_engines_limit(engine: EngineProcess) -> None:
    ((completion,),) = engine.generate([[7] * 395], SamplingSettings(max_new_tokens=50, temperature=0.0))
    assert len(completion.token_ids) == 5
    assert completion.finish_reason == "length"


def test_prompts_that_leave_no_room_name_the_limit_and_its_key(engine: EngineProcess) -> None:
    with pytest.raises(DataError) as raised:
        engine.generate([PROMPTS[0], [7] * 400], GREEDY)
    assert "Prompt 1 of 2 has 400 tokens" in str(raised.value)
    assert "in 400; raise policy.generation.vllm_cfg.max_model_len" in str(raised.value)
    with pytest.raises(DataError, match="is empty"):
        engine.generate([[]], GREEDY)
    assert engine.generate([], GREEDY) == []


def test_a_sleeping_engine_refuses_to_generate_and_waking_twice_is_harmless(engine: EngineProcess, model: Any) -> None:
    engine.finish_generation(discard_weights=False)
    engine.finish_generation(discard_weights=False)
    with pytest.raises(RuntimeError, match="while weights and kv_cache sleep"):
        engine.generate(PROMPTS, GREEDY)
    engine.prepare_for_generation(["weights"])
    with pytest.raises(RuntimeError, match="while kv_cache sleep"):
        engine.generate(PROMPTS, GREEDY)
    engine.prepare_for_generation()
    engine.prepare_for_generation()
    assert_greedy_matches(engine, model)


def test_discarded_weights_are_not_used_until_the_next_refit(engine: EngineProcess) -> None:
    engine.finish_generation(discard_weights=True)
    engine.prepare_for_generation()
    with pytest.raises(RuntimeError, match="before a refit"):
        engine.generate(PROMPTS, GREEDY)


def test_after_a_refit_the_engine_holds_no_buffer_of_the_policy(engine: EngineProcess) -> None:
    assert "nemo_offload_rl_refit" not in Path(f"/proc/{engine.pid}/maps").read_text()
    assert not [entry for entry in os.listdir("/dev/shm") if "refit" in entry]


def test_a_start_that_cannot_work_names_the_key_and_a_new_engine_refuses_to_generate_from_dummy_weights(
    started: EngineProcess, folder: Path
) -> None:
    with pytest.raises(ConfigError, match="max_model_len=400") as raised:
        started.start(engine_settings(folder, kv_cache_memory_gib=0.0001))
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="vllm_kwargs max_num_seqs=many: ") as raised:
        started.start(engine_settings(folder, vllm_kwargs={"max_num_seqs": "many"}))
    assert "\n" not in str(raised.value)
    started.start(engine_settings(folder))
    with pytest.raises(RuntimeError, match="before a refit had brought the weights"):
        started.generate(PROMPTS, GREEDY)
