"""What agents talked about becomes samples: tokens as they were, masks on what the policy sampled."""

from __future__ import annotations

import logging
import os
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from nemo_offload_rl.algorithms.advantages import token_advantages
from nemo_offload_rl.algorithms.metrics import rollout_metrics
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.agents import AgentEnvironment, AgentRuns, AgentTask
from nemo_offload_rl.environments.interfaces import Score
from nemo_offload_rl.environments.outcomes import OnError
from nemo_offload_rl.errors import UserCodeError
from nemo_offload_rl.experience.agent_rollouts import agent_rollouts
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.generation.served_rollouts import ServedCall
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion
from nemo_offload_rl.runs.loading import load_grpo_config
from nemo_offload_rl.targets import UserCode

SAMPLING = SamplingSettings(max_new_tokens=4, seed=100)


class Talking:
    """An endpoint that agents of this process talk to by a method; the policy says what it is told to."""

    def __init__(self) -> None:
        self.seeds: list[int | None] = []
        self.calls: dict[str, list[ServedCall]] = {}

    def open_rollouts(self, sampling: Sequence[SamplingSettings]) -> list[str]:
        self.seeds = [each.seed for each in sampling]
        self.calls = {f"url{number}": [] for number in range(len(sampling))}
        return list(self.calls)

    def take_rollouts(self, base_urls: Sequence[str]) -> list[list[ServedCall]]:
        return [self.calls.pop(url) for url in base_urls]

    def say(
        self, url: str, prompt: list[int], response: list[int], parent: int | None = None, end: str = "stop"
    ) -> None:
        experts = np.full((len(prompt) + len(response) - 1, 1, 2), len(self.calls[url]))
        said = Completion(response, [-0.5 * token for token in response], end, routed_experts=experts)
        self.calls[url].append(
            ServedCall(prompt_token_ids=tuple(prompt), completion=said, parent=parent, weight_version=1)
        )


class Made:
    """Stands for a user's object."""

    def __init__(self, run: Callable[[AgentTask], Any]) -> None:
        self.run = run


def rolled(
    talking: Talking,
    prompts: Sequence[Prompt],
    group_size: int = 1,
    on_error: OnError = None,
    timeout_s: float = 300.0,
    **runs: Callable[[AgentTask], Any],
) -> RolloutBatch:
    agents = {
        name: AgentEnvironment(
            UserCode(f"env.{name}.target", Made(run)),
            num_workers=0,
            timeout_s=timeout_s,
            name=f"env.{name}",
            on_error=on_error,
        )
        for name, run in runs.items()
    }
    return agent_rollouts(
        prompts,
        group_size=group_size,
        environments=agents,
        endpoint=talking,
        sampling=SAMPLING,
        decode=lambda token_ids: "".join(map(chr, token_ids)),
        model="model",
        api_key="none",
    )


def prompt(env_name: str = "one", question: str = "?") -> Prompt:
    return Prompt(
        token_ids=(1,), text="x", reference_answer="7", env_name=env_name, question=question, metadata={"level": 3}
    )


def test_a_conversation_is_one_sequence_whose_sampled_tokens_alone_are_counted() -> None:
    talking, tasks = Talking(), []

    async def run(task: AgentTask) -> float:
        tasks.append(task)
        talking.say(task.base_url, [65, 66], [67, 68])
        talking.say(task.base_url, [90], [91])  # a conversation beside it
        talking.say(task.base_url, [65, 66, 67, 68, 10, 11], [69], parent=0, end="length")
        return 1.5

    batch = rolled(talking, [prompt(question="How?")], one=run)
    assert tasks == [
        AgentTask(
            base_url="url0",
            api_key="none",
            model="model",
            question="How?",
            answer="7",
            metadata={"level": 3},
            messages=({"role": "user", "content": "How?"},),
        )
    ]
    (rollout,) = batch.rollouts
    sequence, aside = rollout.sequences()
    assert list(sequence.token_ids) == [65, 66, 67, 68, 10, 11, 69]
    assert list(sequence.token_mask) == [0, 0, 1, 1, 0, 0, 1]
    assert list(sequence.generation_logprobs) == [0, 0, -33.5, -34.0, 0, 0, -34.5]
    assert (rollout.reward, rollout.correct, rollout.truncated, rollout.num_turns) == (1.5, True, True, 3)
    assert (list(aside.token_ids), list(aside.token_mask)) == ([90, 91], [0, 1])
    assert list(aside.generation_logprobs) == [0, -45.5]
    # Each token has the experts of the call that computed it first; of a call's last token no call knows them.
    assert sequence.routed_experts[:, 0, 0].tolist() == [0, 0, 0, 2, 2, 2]
    assert aside.routed_experts[:, 0, 0].tolist() == [1]
    assert (rollout.prompt.text, rollout.response_text) == ("AB", "CD\n\x0bE")
    assert rollout.prompt.loss_multiplier == 1.0


def test_groups_keep_their_order_and_every_rollout_its_seed_whosever_agent_drives_it() -> None:
    talking = Talking()

    def run_of(name: str) -> Callable[[AgentTask], Score]:
        def run(task: AgentTask) -> Score:  # not async
            talking.say(task.base_url, [1], [ord(name), int(task.base_url[3:])])
            return Score(reward=float(task.question), correct=False)

        return run

    prompts = [prompt("a", "0"), prompt("b", "1"), prompt("a", "2")]
    batch = rolled(talking, prompts, 2, a=run_of("a"), b=run_of("b"))
    assert [rollout.reward for rollout in batch.rollouts] == [0, 0, 1, 1, 2, 2]
    said = [rollout.segments[0].token_ids for rollout in batch.rollouts]
    assert said == [(ord(name), row) for row, name in enumerate("aabbaa")]
    assert talking.seeds == [100, 101, 102, 103, 104, 105]


def test_rollouts_that_fail_hang_or_say_nothing_are_told_of_and_not_trained_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talking = Talking()

    async def run(task: AgentTask) -> Any:
        import asyncio

        if task.question != "silent":
            talking.say(task.base_url, [1], [2])
        match task.question:
            case "fails":
                raise RuntimeError("no tool\nat all")
            case "hangs":
                await asyncio.sleep(60)
            case "text":
                return "1.0"
            case "nan":
                return float("nan")
            case "none":
                return None
        return 1.0

    questions = ["fails", "hangs", "silent", "text", "nan", "none", "fine"]
    with caplog.at_level(logging.WARNING):
        batch = rolled(talking, [prompt(question=question) for question in questions], timeout_s=5.0, one=run)
    assert [rollout.unscored and rollout.unscored.why for rollout in batch.rollouts] == [
        "failed", "timed_out", "failed", "failed", "failed", "no_reward", None,
    ]  # fmt: skip
    assert batch.scored().tolist() == [False] * 6 + [True]
    assert batch.rewards()[-1] == 1.0 and batch.rewards()[:-1].isnan().all()
    assert batch.loss_multipliers().tolist() == [1.0] * 7  # no prompt is too long
    assert rollout_metrics(batch) | {
        "accuracy": 1.0, "failed_rate": 4 / 7, "timed_out_rate": 1 / 7, "no_reward_rate": 1 / 7,
        "overlong_prompt_rate": 0.0,
    } == rollout_metrics(batch)  # fmt: skip
    told = " ".join(caplog.messages)
    assert "1 of 7 rollouts took longer than 5 s" in told and "raise env.one.timeout_s" in told
    assert (
        "3 of 7 rollouts failed" in told and "RuntimeError: no tool, at " in told and "test_agent_rollouts.py:" in told
    )
    assert "1 of 7 agents sent no request to the policy" in told


def test_a_rollout_that_is_tried_again_has_a_new_conversation_with_the_same_seed() -> None:
    talking, tried = Talking(), []

    def run(task: AgentTask) -> float:
        tried.append(task.question)
        talking.say(task.base_url, [1], [10 * len(tried)])
        if task.question == "broken" or (task.question == "flaky" and tried.count("flaky") < 2):
            raise RuntimeError("no tool")
        return 1.0

    prompts = [prompt(question=question) for question in ("fine", "flaky", "broken")]
    batch = rolled(talking, prompts, on_error="retry", one=run)
    assert [tried.count(question) for question in ("fine", "flaky", "broken")] == [1, 2, 3]
    assert batch.scored().tolist() == [True, True, False]
    assert [len(rollout.segments) for rollout in batch.rollouts] == [1, 1, 1]  # of the last try alone
    assert talking.seeds == [102]
    with pytest.raises(UserCodeError, match=r"RuntimeError: no tool.*set env\.one\.on_error to skip or retry"):
        rolled(talking, prompts, on_error="raise", one=run)


def test_every_conversation_is_trained_on_with_the_advantage_of_its_rollout_and_groups_know_rollouts_only() -> None:
    talking = Talking()

    def run(task: AgentTask) -> float:
        talking.say(task.base_url, [1], [2])
        if task.base_url == "url1":  # the second rollout of the first group has two others, one that begins alike
            talking.say(task.base_url, [1, 2, 7], [3, 4], parent=0)
            talking.say(task.base_url, [1, 2, 8, 9], [5], parent=0)
            talking.say(task.base_url, [6], [6])
        return float(task.base_url[3:])

    batch = rolled(talking, [prompt(), prompt()], 2, one=run)
    assert batch.rewards_PG().tolist() == [[0, 1], [2, 3]]
    assert batch.row_owners().tolist() == [0, 1, 2, 3, 1, 1]
    assert batch.response_lengths().tolist() == [1, 5, 1, 1]
    assert rollout_metrics(batch)["mean_conversations"] == 1.5
    rows = batch.collate(pad_id=0, sample_mask=torch.tensor([1.0, 0.5, 1.0, 0.0]))
    lengths = rows.input_lengths.tolist()
    assert [row[:size] for row, size in zip(rows.input_ids.tolist(), lengths, strict=True)] == [
        [1, 2], [1, 2, 7, 3, 4], [1, 2], [1, 2], [1, 2, 8, 9, 5], [6, 6],
    ]  # fmt: skip
    assert [row[:size] for row, size in zip(rows.token_mask.tolist(), lengths, strict=True)] == [
        [0, 1], [0, 1, 0, 1, 1], [0, 1], [0, 1], [0, 0, 0, 0, 1], [0, 1],
    ]  # fmt: skip
    assert rows.sample_mask.tolist() == [1.0, 0.5, 1.0, 0.0, 0.5, 0.5]
    grpo = load_grpo_config("examples/configs/grpo_math_1B.yaml", ["grpo.normalize_rewards=false"]).grpo
    advantages = token_advantages(grpo, batch.rewards_PG(), rows.loss_mask, owners=batch.row_owners())
    assert advantages[:, 0].tolist() == [-1.0, 1.0, -1.0, 1.0, 1.0, 1.0]
    plus = replace(grpo, adv_estimator=replace(grpo.adv_estimator, name="reinforce_plus_plus", minus_baseline=False))
    found = token_advantages(plus, batch.rewards_PG(), rows.loss_mask, owners=batch.row_owners()).double()
    counted = rows.loss_mask.double()
    assert (found * counted).sum().item() == pytest.approx(0.0, abs=1e-5)  # a mean over the tokens of all rows
    assert torch.equal(found[4], found[1]) and torch.equal(found[5], found[1])


@pytest.mark.processes
def test_agents_in_processes_of_their_own_are_shared_out_and_keep_their_order() -> None:
    environment = AgentEnvironment(
        UserCode.named("env.x.target", "agents_of_tests.Doubling"), num_workers=2, timeout_s=300, name="env.x"
    )
    try:
        tasks = [
            AgentTask(base_url="", api_key="", model="", question=str(number), answer="", metadata={}, messages=())
            for number in range(5)
        ]
        assert environment.run(tasks) == [Score(2.0 * number, number > 0) for number in range(5)]
        assert environment.run(tasks[:1]) == [Score(0.0, False)]
    finally:
        environment.close()


class TakesNothing:
    """An agent that forgot its task."""

    def run(self) -> float:
        return 1.0


def test_an_agent_whose_run_takes_no_task_is_refused_before_any_process_starts() -> None:
    with pytest.raises(UserCodeError, match=r"cannot be called as run\(self, task\)"):
        AgentEnvironment(UserCode("env.x.target", TakesNothing), num_workers=8, timeout_s=1, name="env.x")


class Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Silent."""


def test_agents_reach_their_endpoint_beside_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"http_proxy": "http://127.0.0.1:9", "NO_PROXY": "example.org", "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)

    def run(task: AgentTask) -> bool:
        with urllib.request.urlopen(task.base_url) as answer:
            return answer.status == httpx.get(task.base_url).status_code == 200

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        task = AgentTask(base_url=url, api_key="", model="", question="", answer="", metadata={}, messages=())
        assert AgentRuns(UserCode("env.x.target", Made(run)), timeout_s=600)([task]) == [
            Score(reward=1.0, correct=True)
        ]
        server.shutdown()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,127.0.0.1,::1,localhost"
