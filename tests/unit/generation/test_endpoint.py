"""An engine's HTTP server: what clients of OpenAI's get, and what is kept of it for training."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from closeness import assert_close
from engine_process import (
    TEMPLATE,
    TOKEN,
    EngineProcess,
    endpoint_settings,
    engine_process,
    engine_settings,
    send_weights,
)
from model_families import checkpoint_tensors, make_family, save_family_folder
from tiny_models import make_tokenizer

from nemo_offload_rl.environments.agents import AgentTask
from nemo_offload_rl.environments.verifiers_agent import VerifiersAgent
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.generation.served_rollouts import ServedCall, call_seed
from nemo_offload_rl.keys.engine import Listening
from nemo_offload_rl.keys.generation import SamplingSettings

# Sharp enough that some responses end by themselves; filtered, which logprobs are not.
SAMPLING = SamplingSettings(max_new_tokens=12, temperature=0.8, top_p=0.95, seed=11)
TOOLS = {"enable_auto_tools": True, "tool_parser": "hermes"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, who is there?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder and model."""
    folder = tmp_path_factory.mktemp("model")
    return folder, save_family_folder(folder, "qwen3")


@pytest.fixture(scope="module")
def started(model: tuple[Path, Any]) -> Iterator[tuple[EngineProcess, str]]:
    """An engine that has had no refit yet, and where its server is."""
    folder, _ = model
    with engine_process() as process:
        process.start(
            engine_settings(folder, async_engine=True, endpoint=endpoint_settings(folder, serving_chat_kwargs=TOOLS))
        )
        yield process, process.call("endpoint_url")


@pytest.fixture
def engine(started: tuple[EngineProcess, str], model: tuple[Path, Any]) -> tuple[EngineProcess, str]:
    """Awake, and with the model's weights."""
    process, url = started
    process.prepare_for_generation()
    send_weights(process, checkpoint_tensors(model[1]), 2**20)
    return process, url


def client(base_url: str, token: str = TOKEN) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=token, max_retries=0)


def rollout(engine: tuple[EngineProcess, str], name: str, sampling: SamplingSettings = SAMPLING) -> str:
    """A rollout that is open, by the base URL of a client."""
    process, url = engine
    process.call("open_rollouts", {name: sampling})
    return f"{url}/rollouts/{name}/v1"


def ask(base_url: str, messages: Sequence[dict[str, Any]], **more: Any) -> Any:
    with client(base_url) as chat:
        answer = chat.chat.completions.create(model=ask_model(base_url), messages=list(messages), **more)
        return list(answer) if more.get("stream") else answer


def ask_model(base_url: str) -> str:
    """What the engine calls its model."""
    with client(base_url) as chat:
        return chat.models.list().data[0].id


def taken(engine: tuple[EngineProcess, str], name: str) -> list[ServedCall]:
    (calls,) = engine[0].call("take_rollouts", [name]).values()
    return calls


def test_tokens_and_logprobs_over_http_are_bit_by_bit_those_of_the_direct_path(engine) -> None:
    url = rollout(engine, "one")
    answer = ask(url, HELLO, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
    (call,) = taken(engine, "one")
    tokenizer = make_tokenizer()
    prompt = tokenizer.apply_chat_template(HELLO, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False)
    assert list(call.prompt_token_ids) == prompt == answer.prompt_token_ids

    seeded = SamplingSettings(max_new_tokens=12, temperature=0.8, top_p=0.95, seed=call_seed(11, prompt, 0))
    ((direct,),) = engine[0].generate([prompt], seeded)
    assert call.completion == direct
    (choice,) = answer.choices
    assert choice.token_ids == direct.token_ids
    assert [position.logprob for position in choice.logprobs.content] == direct.logprobs
    assert choice.message.content == tokenizer.decode(direct.token_ids, skip_special_tokens=True)
    assert choice.finish_reason == direct.finish_reason


def test_later_turns_begin_with_the_very_tokens_of_the_earlier_ones(engine) -> None:
    url, messages, tokenizer = rollout(engine, "turns"), list(HELLO), make_tokenizer()
    for question in ("Why?", "And then?", None):
        answer = ask(url, messages).choices[0].message
        # Clients write an answer back in ways of their own.
        messages += [{"role": "assistant", "content": [{"type": "text", "text": f"{answer.content} "}]}]
        messages += [] if question is None else [{"role": "user", "content": question}]
    calls = taken(engine, "turns")
    assert [call.parent for call in calls] == [None, 0, 1]
    retokenized = 0
    for earlier, later, question in zip(calls, calls[1:], ("Why?", "And then?"), strict=False):
        said = (*earlier.prompt_token_ids, *earlier.completion.token_ids)
        assert later.prompt_token_ids[: len(said)] == said
        between = tokenizer.decode(later.prompt_token_ids[len(said) :])
        ended = earlier.completion.finish_reason == "stop"
        assert between == ("" if ended else "<|im_end|>") + f"<user>{question}<|im_end|><assistant>"
        text = tokenizer.decode(earlier.completion.token_ids, skip_special_tokens=True)
        retokenized += tokenizer.encode(text, add_special_tokens=False) != earlier.completion.token_ids
    assert retokenized, "the model said nothing that other tokens spell too: the test shows nothing"


def test_two_conversations_at_once_do_not_mix(engine) -> None:
    names = ("left", "right")
    urls = [rollout(engine, name) for name in names]

    async def converse(url: str, word: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=TOKEN) as chat:
            messages: list[Any] = [{"role": "user", "content": word}]
            for _ in range(3):
                answer = await chat.chat.completions.create(model="", messages=messages)
                said = {"role": "assistant", "content": answer.choices[0].message.content}
                messages += [said, {"role": "user", "content": word}]

    async def both() -> None:
        await asyncio.gather(*(converse(url, word) for url, word in zip(urls, names, strict=True)))

    asyncio.run(both())
    for word, other in zip(names, reversed(names), strict=True):
        calls = taken(engine, word)
        assert [call.parent for call in calls] == [None, 0, 1]
        asked = make_tokenizer().decode(calls[-1].prompt_token_ids)
        assert asked.count(f"<user>{word}<") == 3 and f"<user>{other}<" not in asked


def test_an_answer_that_is_streamed_is_the_same_and_is_kept(engine) -> None:
    whole = ask(rollout(engine, "whole"), HELLO)
    chunks = ask(rollout(engine, "streamed"), HELLO, stream=True, stream_options={"include_usage": True})
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(said) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert taken(engine, "streamed") == taken(engine, "whole")


def test_a_question_that_is_repeated_is_answered_anew_and_the_limits_of_a_client_hold(engine) -> None:
    url = rollout(engine, "again")
    for _ in range(3):
        ask(url, HELLO, max_tokens=5, temperature=0.8)
    ask(url, HELLO, max_completion_tokens=1000)
    calls = taken(engine, "again")
    assert {call.prompt_token_ids for call in calls} == {calls[0].prompt_token_ids}
    answers = [tuple(call.completion.token_ids) for call in calls]
    assert len(set(answers[:3])) == 3 and {len(answer) for answer in answers[:3]} == {5}
    assert len(answers[3]) <= 12


def test_a_conversation_with_tools_goes_on_while_the_tools_are_the_same(engine) -> None:
    url, messages = rollout(engine, "tools"), list(HELLO)
    for tools in ([ADD], [ADD], []):
        answer = ask(url, messages, **({"tools": tools} if tools else {})).choices[0].message
        assert not answer.tool_calls
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ]
    assert [call.parent for call in taken(engine, "tools")] == [None, 0, None]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"temperature": 1.0}, "temperature=1.0, but this rollout is sampled with temperature=0.8"),
        ({"top_p": 0.5}, "top_p=0.5, but"),
        ({"extra_body": {"top_k": 3}}, "top_k=3, but"),
        ({"n": 2}, "n=2 cannot be asked for"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias="),
        ({"response_format": {"type": "json_object"}}, "response_format changes"),
        ({"extra_body": {"min_p": 0.1}}, "min_p=0.1"),
        (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}},
            "add_generation_prompt=False",
        ),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice=required cannot be asked for"),
        ({"model": "another"}, "`another` does not exist"),
    ],
)
def test_what_would_draw_other_tokens_than_the_run_says_is_refused(engine, asked: dict[str, Any], told: str) -> None:
    url = rollout(engine, "refused")
    with client(url) as chat, pytest.raises(openai.APIStatusError) as refused:
        chat.chat.completions.create(**({"model": "", "messages": HELLO} | asked))
    assert refused.value.status_code in (400, 404) and told in str(refused.value)
    assert taken(engine, "refused") == []


def test_a_conversation_that_has_grown_too_long_is_refused_in_the_words_of_others(engine) -> None:
    url = rollout(engine, "long")
    answer = ask(url, HELLO).choices[0].message.content
    more = [*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": "x" * 400}]
    for messages in (more, more[-1:]):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            ask(url, messages)
    assert len(taken(engine, "long")) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/rollouts/x/v1/chat/completions"])
def test_only_who_bears_the_token_is_answered(engine, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer another-token-of-16"}, {"Authorization": TOKEN}):
        answer = httpx.post(f"{engine[1]}{path}", headers=headers, json={"messages": HELLO})
        assert answer.status_code == 401 and "token is missing or wrong" in answer.json()["error"]["message"]


def test_a_rollout_that_has_ended_takes_no_more_calls(engine) -> None:
    url = rollout(engine, "ended")
    ask(url, HELLO)
    assert len(taken(engine, "ended")) == 1
    with pytest.raises(openai.NotFoundError, match="rollout ended is not open"), client(url) as chat:
        chat.chat.completions.create(model="", messages=HELLO)


def test_a_plain_client_samples_as_it_likes_and_no_request_is_answered_with_a_traceback(engine) -> None:
    base = f"{engine[1]}/v1"
    greedy = ask(base, HELLO, temperature=0, max_tokens=6, extra_body={"return_token_ids": True})
    prompt = greedy.prompt_token_ids
    ((direct,),) = engine[0].generate([prompt], SamplingSettings(max_new_tokens=6, temperature=0.0))
    assert [choice.token_ids for choice in greedy.choices] == [direct.token_ids]
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    for body in (b"", b"{", b"[]", b'{"messages": 3}', b'{"messages": []}', b'{"messages": [{"content": "x"}]}'):
        for where in (f"{base}/chat/completions", f"{rollout(engine, 'odd')}/chat/completions"):
            answer = httpx.post(where, content=body, headers={**bearer, "Content-Type": "application/json"})
            assert 400 <= answer.status_code < 500 and "Traceback" not in answer.text, (body, answer.text)
        text = httpx.post(where, content=b'{"messages": []}', headers={**bearer, "Content-Type": "text/plain"})
        assert text.status_code == 400 and "send JSON" in text.text


ODD = (
    {"n": 5000},
    {"n": 0},
    {"n": -1},
    {"n": 2**63},
    {"messages": [[[]]]},
    {"messages": [{"role": "user", "content": [[]]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": {"a": 1}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "no such type"}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
    {"messages": [{"role": "assistant", "tool_calls": 3}]},
    {"messages": [{"role": None, "content": None}]},
    {"tools": [{}]},
    {"tools": {"a": 1}},
    {"tools": [{"type": "function", "function": {"name": 3}}]},
    {"tool_choice": {"type": "function", "function": {"name": "none"}}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"grammar": "("}},
    {"temperature": -1},
    {"temperature": 1e300},
    {"top_p": 2},
    {"top_k": -5},
    {"top_k": 2**70},
    {"min_p": 7},
    {"seed": 2**70},
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"max_tokens": 10**30},
    {"max_completion_tokens": 2**40},
    {"min_tokens": 10**6},
    {"stop": [1]},
    {"stop": [""]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [2**40]},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999999": 1}},
    {"logit_bias": {"-5": 1}},
    {"allowed_token_ids": [10**9]},
    {"allowed_token_ids": []},
    {"bad_words": [""]},
    {"logprobs": True, "top_logprobs": 10**6},
    {"logprobs": True, "top_logprobs": -1},
    {"prompt_logprobs": 10**6},
    {"truncate_prompt_tokens": -7},
    {"truncate_prompt_tokens": 10**9},
    {"chat_template": "{{ 1 / 0 }}"},
    {"chat_template": "{% for %}"},
    {"chat_template_kwargs": {"messages": 3}},
    {"chat_template_kwargs": {"tokenize": True, "conversation": 1, "return_dict": True}},
    {"chat_template_kwargs": {"add_generation_prompt": "x", "continue_final_message": 1}},
    {"chat_template_kwargs": [1]},
    {"continue_final_message": True},
    {"documents": 3},
    {"mm_processor_kwargs": {"a": 1}},
    {"use_beam_search": True, "n": 3, "stream": True},
    {"stream": True, "stream_options": 5},
    {"stream_options": {"include_usage": True}},
    {"reasoning_effort": "none at all"},
    {"priority": 10**30},
    {"request_id": "\n" * 100},
    {"request_id": 3},
    {"kv_transfer_params": {"a": 1}},
    {"vllm_xargs": {"a": {"b": 1}}},
    {"cache_salt": ""},
    {"user": 3},
    {"echo": True},
    {"repetition_detection": {"a": 1}},
    {"thinking_token_budget": -1},
    {"thinking_token_budget": 2**40},
    {"top_k": 2**31},
    {"top_k": 2**40},
    {"seed": 2**62},
    {"seed": -(2**62)},
    {"max_tokens": 2**62},
    {"priority": -(2**62)},
    {"temperature": 5e-324},
    {"temperature": 1e-300},
    {"top_p": 1e-300},
    {"min_p": 1e-300},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e-300},
    {"logit_bias": {"5": 1e308}},
    {"stop_token_ids": [2**31]},
    {"min_tokens": 2, "stop_token_ids": [2**62]},
    {"min_tokens": 2, "stop_token_ids": [10**6]},
    {"min_tokens": 2, "stop_token_ids": [-1]},
    {"top_k": 2**31 - 1},
    {"top_k": 10**6},
    {"thinking_token_budget": 2**31 - 1},
    {"allowed_token_ids": [-1]},
    {"logit_bias": {"1": 1e308, "2": -1e308}},
    {"bad_words": ["hello", " "]},
    {"repetition_detection": {"max_pattern_size": 10**9, "min_count": 2}},
    {"bad_words": ["x" * 1000]},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}}}},
)  # fmt: skip


def test_odd_requests_are_refused_or_answered_and_never_fail_in_the_server(engine) -> None:
    """Whatever a field holds; and the engine goes on."""
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    failed = []
    with httpx.Client(headers=bearer, timeout=300) as chat:
        for where in (f"{engine[1]}/v1/chat/completions", f"{rollout(engine, 'odder')}/chat/completions"):
            for odd in ODD:
                answer = chat.post(where, json={"messages": HELLO, "max_tokens": 2} | odd)
                if answer.status_code >= 500 or "Traceback" in answer.text:
                    failed.append((odd, answer.status_code, answer.text))
            for body in (b'{"messages":' + b"[" * 100_000, b'{"messages": [' + b'{"a":' * 100_000):
                answer = chat.post(where, content=body, headers={"Content-Type": "application/json"})
                assert answer.status_code == 400 and "nests more than 100" in answer.text
            many = chat.post(where, json={"messages": HELLO, "n": 5000})
            assert many.status_code == 400 and "at most 128 answers" in many.text
    assert not failed
    assert ask(rollout(engine, "after odd ones"), HELLO).choices[0].message.content is not None


@pytest.mark.parametrize("num_turns", [1, 3])
def test_an_environment_of_verifiers_converses_as_it_is_and_every_token_is_kept(engine, num_turns: int) -> None:
    pytest.importorskip("verifiers", reason="the package verifiers is not installed (extra `agents`)")
    agent = VerifiersAgent("environment-of-tests", {"num_turns": num_turns})
    rows = {"the environment's own": {"example_id": 1}, "ours": {}}
    for name, metadata in rows.items():
        told = {"question": "Who is there?", "answer": "me"}
        url = rollout(engine, name)
        messages = ({"role": "user", "content": told["question"]},)
        task = AgentTask(
            base_url=url, api_key=TOKEN, model=ask_model(url), metadata=metadata, messages=messages, **told
        )
        score = asyncio.run(agent.run(task))
        calls = taken(engine, name)
        assert [call.parent for call in calls] == [None, *range(num_turns - 1)]
        whole = make_tokenizer().decode(calls[-1].prompt_token_ids)
        question, answer = ("And where?", "here") if metadata else told.values()
        assert whole.startswith(f"<system>Be brief.<|im_end|><user>{question}<|im_end|><assistant>")
        assert whole.count(f"<user>Again: {answer}<|im_end|>") == num_turns - 1
        said = [make_tokenizer().decode(call.completion.token_ids, skip_special_tokens=True) for call in calls]
        # Its client strips some messages, and vLLM leaves out bytes at the end that are not a whole character.
        least = [text.strip().rstrip("\N{REPLACEMENT CHARACTER}") for text in said]
        stripped, whole_texts = (sum(map(len, texts)) for texts in (least, said))
        assert stripped <= score.reward <= whole_texts and score.correct
        for earlier, later in itertools.pairwise(calls):
            before = (*earlier.prompt_token_ids, *earlier.completion.token_ids)
            assert later.prompt_token_ids[: len(before)] == before


def test_an_engine_that_sleeps_or_is_refitted_says_when_to_ask_again_and_answers_tell_their_weights(
    engine, model
) -> None:
    process, url = engine
    bearer = {"Authorization": f"Bearer {TOKEN}"}

    def post(base_url: str) -> httpx.Response:
        asked = {"messages": HELLO, "max_tokens": 2}
        return httpx.post(f"{base_url}/chat/completions", json=asked, headers=bearer)

    name = rollout(engine, "asleep")
    first = post(name)
    version = first.json()["weight_version"]
    assert first.headers["X-Weight-Version"] == str(version) and version >= 1
    assert httpx.get(f"{url}/health", headers=bearer).json() == {"status": "ready", "weight_version": version}

    process.finish_generation(discard_weights=True)
    for step in ("asleep", "awake without weights"):
        for base_url in (name, f"{url}/v1"):
            answer = post(base_url)
            assert answer.status_code == 503 and answer.headers["Retry-After"] == "5", step
            assert "sleeps or gets new weights" in answer.json()["error"]["message"]
        assert httpx.get(f"{url}/health", headers=bearer).status_code == 503
        process.prepare_for_generation()
    send_weights(process, checkpoint_tensors(model[1]), 2**20)
    assert post(name).json()["weight_version"] == version + 1
    assert [call.weight_version for call in taken(engine, "asleep")] == [version, version + 1]


def test_what_is_being_answered_when_the_engine_goes_to_sleep_is_aborted(engine, model) -> None:
    process, _ = engine
    url = rollout(engine, "aborted", SamplingSettings(max_new_tokens=350, temperature=1.0, seed=5))

    async def sleep_meanwhile() -> list[int]:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=300) as chat:
            # So many that none can be done before the others are under way.
            asked = {"messages": HELLO, "ignore_eos": False}
            calls = [asyncio.create_task(chat.post(f"{url}/chat/completions", json=asked)) for _ in range(24)]
            await asyncio.sleep(0.3)
            await asyncio.to_thread(process.finish_generation, True)
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    statuses = asyncio.run(sleep_meanwhile())
    assert set(statuses) <= {200, 503} and statuses.count(503) > 0
    assert len(taken(engine, "aborted")) == statuses.count(200)
    process.prepare_for_generation()
    send_weights(process, checkpoint_tensors(model[1]), 2**20)  # fails if requests were still running
    assert ask(rollout(engine, "after"), HELLO).choices[0].message.content is not None


def test_what_is_being_answered_while_the_engine_is_paused_for_new_weights_is_not_aborted(engine, model) -> None:
    process, _ = engine
    url = rollout(engine, "paused", SamplingSettings(max_new_tokens=200, temperature=1.0, seed=5))
    # Longer than a block of the KV cache, of which the first call keeps some.
    messages = [{"role": "system", "content": "Be brief. " * 15}, *HELLO[1:]]
    new = make_family("qwen3", 7)

    async def pause_meanwhile() -> list[int]:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=300) as chat:
            asked = {"messages": messages}
            calls = [asyncio.create_task(chat.post(f"{url}/chat/completions", json=asked))]
            await asyncio.sleep(0.1)
            await asyncio.to_thread(process.call, "pause_generation", False)
            calls.append(asyncio.create_task(chat.post(f"{url}/chat/completions", json={**asked, "max_tokens": 9})))
            await asyncio.to_thread(send_weights, process, checkpoint_tensors(new), 2**20)
            await asyncio.to_thread(process.call, "resume_generation")
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    version = ask(url, messages).weight_version
    assert asyncio.run(pause_meanwhile()) == [200, 200]
    calls = taken(engine, "paused")
    assert len(calls) == 3
    late = min(calls, key=lambda call: len(call.completion.token_ids))
    assert late.weight_version == version + 1
    ids = [*late.prompt_token_ids, *late.completion.token_ids]
    with torch.no_grad():
        logits = new(torch.tensor([ids])).logits[0, len(late.prompt_token_ids) - 1 : -1]
    by_new = logits.log_softmax(-1).gather(1, torch.tensor(late.completion.token_ids)[:, None])[:, 0]
    assert_close(torch.tensor(late.completion.logprobs), by_new)


def test_a_port_that_is_taken_is_refused_by_name(engine, model) -> None:
    port = int(engine[1].rpartition(":")[2])
    settings = endpoint_settings(model[0], listening=Listening("127.0.0.1", port, TOKEN))
    with engine_process() as another, pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port} "):
        another.start(engine_settings(model[0], async_engine=True, endpoint=settings))
