from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from closeness import assert_close
from tiny_models import make_qwen3, make_tokenizer, qwen3_config
from torch import Tensor
from transformers import Qwen3ForCausalLM

from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
from nemo_offload_rl.errors import ConfigError, DataError, WorkerDiedError
from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.weight_sync.errors import RefitError
from nemo_offload_rl.weight_sync.refit import refit

GREEDY = SamplingSettings(max_new_tokens=12, temperature=0.0)
# vLLM's cache blocks hold 128 tokens on CPU: the last two prompts fill one and two of them.
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 60, 140, 300)]


class Pair:
    """An engine and the policy that feeds it."""

    def __init__(self, engine: RayGenerationEngine, policy, tied: bool) -> None:
        self.engine = engine
        self.policy = policy
        self.tied = tied

    def refit(self, seed: int, **kwargs: object) -> Qwen3ForCausalLM:
        """Refit to the weights of `seed` and return the Hugging Face model that has them."""
        self.policy.set_weights(seed, **kwargs)
        refit(self.policy, self.engine)
        return make_qwen3(seed, qwen3_config(tied=self.tied))


@pytest.fixture(scope="module")
def pairs(start_engine, start_policy) -> dict[bool, Pair]:
    engines = {tied: start_engine(tied=tied) for tied in (False, True)}
    return {tied: Pair(engine, start_policy(tied=tied), tied) for tied, engine in engines.items()}


@pytest.fixture
def pair(pairs: dict[bool, Pair]) -> Iterator[Pair]:
    """The untied one, awake and with the weights of seed 1 (`make_qwen3(1)`)."""
    pairs[False].policy.set_buffer(2**20)
    pairs[False].refit(1)
    yield pairs[False]
    pairs[False].engine.prepare_for_generation()


@torch.no_grad()
def logits_of_response(model: Qwen3ForCausalLM, prompt: list[int], response: list[int]) -> Tensor:
    """[T, V] float32 logits from which each token of the response was drawn."""
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()


def assert_greedy_matches(pair: Pair, model: Qwen3ForCausalLM) -> None:
    completions = pair.engine.generate(PROMPTS, GREEDY)
    assert [len(samples) for samples in completions] == [1] * len(PROMPTS)
    for prompt, (completion,) in zip(PROMPTS, completions, strict=True):
        logits = logits_of_response(model, prompt, completion.token_ids)
        assert completion.token_ids == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).max(-1).values
        assert_close(torch.tensor(completion.logprobs), expected)


def test_an_engine_with_dummy_weights_refuses_to_generate(pairs: dict[bool, Pair]) -> None:
    with pytest.raises(RuntimeError, match="before a refit had brought the weights"):
        pairs[False].engine.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("tied", [False, True])
def test_after_every_refit_greedy_tokens_are_those_of_the_new_weights(pairs: dict[bool, Pair], tied: bool) -> None:
    for seed, buffer_bytes in enumerate((1, 20_000, 150_000, 2**30), start=10):
        pairs[tied].policy.set_buffer(buffer_bytes)
        model = pairs[tied].refit(seed)
        # Twice: the second time the long prompts come from the prefix cache, which the next refit must drop.
        assert_greedy_matches(pairs[tied], model)
        assert_greedy_matches(pairs[tied], model)


def test_weights_of_another_type_are_cast(pair: Pair) -> None:
    model = pair.refit(3, dtype="bfloat16")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert_greedy_matches(pair, model)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_behaviour_logprobs_are_those_at_the_sampling_temperature(pair: Pair, temperature: float) -> None:
    completions = pair.engine.generate(PROMPTS, SamplingSettings(max_new_tokens=16, temperature=temperature))
    for prompt, (completion,) in zip(PROMPTS, completions, strict=True):
        logits = logits_of_response(make_qwen3(1), prompt, completion.token_ids)
        logprobs = (logits / temperature).log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert_close(torch.tensor(completion.logprobs), expected)


def test_behaviour_logprobs_are_those_after_truncation(pair: Pair) -> None:
    sampling = SamplingSettings(max_new_tokens=16, temperature=0.7, top_k=5)
    for (completion,), prompt in zip(pair.engine.generate(PROMPTS, sampling), PROMPTS, strict=True):
        logits = logits_of_response(make_qwen3(1), prompt, completion.token_ids) / 0.7
        kept = logits >= logits.topk(5).values[:, -1:]
        logprobs = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert_close(torch.tensor(completion.logprobs), expected)


def test_a_seed_repeats_a_call_and_gives_every_sample_its_own_draws(pair: Pair) -> None:
    sampling = SamplingSettings(max_new_tokens=8, temperature=1.5, seed=5)
    first = pair.engine.generate([PROMPTS[0]] * 2, sampling, num_samples=4)
    assert pair.engine.generate([PROMPTS[0]] * 2, sampling, num_samples=4) == first
    assert [len(samples) for samples in first] == [4, 4]
    assert len({tuple(sample.token_ids) for samples in first for sample in samples}) == 8


def test_stop_token_ids_and_stop_strings_end_a_response_and_belong_to_it(pair: Pair) -> None:
    ((whole,),) = pair.engine.generate([PROMPTS[0]], GREEDY)
    assert whole.finish_reason == "length"
    assert len(whole.token_ids) == 12
    stop = whole.token_ids[4]
    expected = whole.token_ids[: whole.token_ids.index(stop) + 1]
    by_id = SamplingSettings(max_new_tokens=12, temperature=0.0, stop_token_ids=(stop,))
    ((completion,),) = pair.engine.generate([PROMPTS[0]], by_id)
    assert (completion.token_ids, completion.finish_reason) == (expected, "stop")
    text = make_tokenizer().decode([stop])
    by_text = SamplingSettings(max_new_tokens=12, temperature=0.0, stop_strings=(text,))
    ((completion,),) = pair.engine.generate([PROMPTS[0]], by_text)
    assert (completion.token_ids, completion.finish_reason) == (expected, "stop")
    assert len(completion.logprobs) == len(completion.token_ids)


def test_a_response_ends_at_the_engines_limit(pair: Pair) -> None:
    ((completion,),) = pair.engine.generate([[7] * 395], SamplingSettings(max_new_tokens=50, temperature=0.0))
    assert len(completion.token_ids) == 5
    assert completion.finish_reason == "length"


def test_prompts_that_leave_no_room_name_the_limit_and_its_key(pair: Pair) -> None:
    with pytest.raises(DataError) as raised:
        pair.engine.generate([PROMPTS[0], [7] * 400], GREEDY)
    assert "Prompt 1 of 2 has 400 tokens" in str(raised.value)
    assert "in 400; raise policy.generation.vllm_cfg.max_model_len" in str(raised.value)
    with pytest.raises(DataError, match="is empty"):
        pair.engine.generate([[]], GREEDY)
    assert pair.engine.generate([], GREEDY) == []


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"],
)
def test_a_tensor_that_is_not_sent_fails_the_refit_by_name_and_the_engine_refuses(pair: Pair, name: str) -> None:
    with pytest.raises(RefitError, match=rf"as they were: {name}\. The policy"):
        pair.refit(2, drop=name)
    with pytest.raises(RuntimeError, match="before a refit"):
        pair.engine.generate(PROMPTS, GREEDY)
    assert_greedy_matches(pair, pair.refit(2))


@pytest.mark.parametrize("name", ["model.layers.0.mlp.extra.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_a_tensor_that_the_engine_does_not_have_fails_the_refit_by_name(pair: Pair, name: str) -> None:
    with pytest.raises(RefitError, match=name.replace(".", r"\.")):
        pair.refit(2, add=name)
    with pytest.raises(RuntimeError, match="before a refit"):
        pair.engine.generate(PROMPTS, GREEDY)


def test_a_sleeping_engine_refuses_to_generate_and_waking_twice_is_harmless(pair: Pair) -> None:
    pair.engine.finish_generation(discard_weights=False)
    pair.engine.finish_generation(discard_weights=False)
    with pytest.raises(RuntimeError, match="while weights and kv_cache sleep"):
        pair.engine.generate(PROMPTS, GREEDY)
    pair.engine.prepare_for_generation(["weights"])
    with pytest.raises(RuntimeError, match="while kv_cache sleep"):
        pair.engine.generate(PROMPTS, GREEDY)
    pair.engine.prepare_for_generation()
    pair.engine.prepare_for_generation()
    assert_greedy_matches(pair, make_qwen3(1))


def test_discarded_weights_are_not_used_until_the_next_refit(pair: Pair) -> None:
    pair.engine.finish_generation(discard_weights=True)
    pair.engine.prepare_for_generation()
    with pytest.raises(RuntimeError, match="before a refit"):
        pair.engine.generate(PROMPTS, GREEDY)


def test_after_a_refit_the_engine_holds_no_buffer_of_the_policy(pair: Pair) -> None:
    (pid,) = pair.engine.group.pids()
    assert "nemo_offload_rl_refit" not in Path(f"/proc/{pid}/maps").read_text()
    assert not [entry for entry in os.listdir("/dev/shm") if "refit" in entry]


def test_a_start_that_cannot_work_names_the_key_in_one_line(start_engine: Callable[..., RayGenerationEngine]) -> None:
    engine = start_engine(kv_cache_memory_gib=0.0001)
    with pytest.raises(ConfigError, match="max_model_len=400") as raised:
        engine.wait_until_ready()
    assert "\n" not in str(raised.value)
    engine.shutdown()
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 does not divide a host's 1 devices"):
        start_engine(tensor_parallel_size=2)


def test_a_killed_engine_is_named_with_the_cause(pairs: dict[bool, Pair]) -> None:
    engine = pairs[True].engine
    os.kill(engine.group.pids()[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"^vllm worker 0 died during generate: .*unexpected"):
        engine.generate(PROMPTS, GREEDY)
    pairs[True].policy.set_weights(1)
    with pytest.raises(WorkerDiedError, match="vllm worker 0 died during prepare_for_generation"):
        refit(pairs[True].policy, engine)
