"""Rollouts with a scripted engine: the engine itself is tested with vLLM elsewhere."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.metrics import rollout_metrics, step_metrics
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.interfaces import Observation, Response, Score, Turn, Unscored
from nemo_offload_rl.environments.math import ArithmeticEnvironment, RetryEnvironment
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.experience.pass_at_k import cons_at_k, pass_at_k, powers_of_two
from nemo_offload_rl.experience.rollouts import Rollouts, Turns
from nemo_offload_rl.experience.types import Rollout, RolloutBatch, Segment
from nemo_offload_rl.protocols.engine import Completion
from nemo_offload_rl.protocols.loss import TrainResult

END = 0


def decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in token_ids if token != END)


def encode(text: str) -> tuple[int, ...]:
    return tuple(ord(character) for character in text)


class ScriptedEngine:
    """Answers each prompt with the texts that the script has for it; `...` at the end means cut at the limit."""

    def __init__(self, script: dict[str, list[str]]) -> None:
        self.script = script
        self.calls: list[int] = []

    def generate(self, prompts, num_samples):
        self.calls.append(num_samples)
        return [[self.complete(text) for text in self.script[decode(prompt)]] for prompt in prompts]

    @staticmethod
    def complete(text: str) -> Completion:
        cut = text.endswith("...")
        token_ids = list(encode(text.removesuffix("..."))) + ([] if cut else [END])
        logprobs = [-0.1 * (position + 1) for position in range(len(token_ids))]
        return Completion(token_ids=token_ids, logprobs=logprobs, finish_reason="length" if cut else "stop")


def prompt(text: str, answer: str, env_name: str = "arithmetic") -> Prompt:
    return Prompt(token_ids=encode(text), text=text, reference_answer=answer, env_name=env_name)


def collect(engine, prompts, environments=None, group_size=2, max_turns=1, max_tokens=100, **stop) -> RolloutBatch:
    rollouts = Rollouts(
        prompts,
        group_size=group_size,
        environments=environments or {"arithmetic": ArithmeticEnvironment()},
        decode=decode,
        turns=Turns(max_turns=max_turns, max_tokens=max_tokens, encode=lambda text, _: encode(text), **stop),
    )
    while rollouts.under_way:
        rollouts.step(engine.generate(*rollouts.prompts()))
    return rollouts.batch()


def make_batch() -> RolloutBatch:
    engine = ScriptedEngine({"1+1=": ["2", "3"], "2+3=": ["5", "5..."], "9+9=": ["18", "9+9=18"]})
    return collect(engine, [prompt("1+1=", "2"), prompt("2+3=", "5"), prompt("9+9=", "18")])


def test_rollouts_come_group_by_group_in_the_order_of_the_prompts_with_rewards_of_their_own():
    batch = make_batch()
    assert [rollout.prompt.text for rollout in batch.rollouts] == ["1+1="] * 2 + ["2+3="] * 2 + ["9+9="] * 2
    assert batch.rewards_PG().tolist() == [[1, 0], [1, 0], [1, 1]]
    assert batch.truncated().tolist() == [False, False, False, True, False, False]
    assert batch.response_lengths().tolist() == [2, 2, 2, 1, 3, 7]


def test_the_engine_is_called_once_with_the_group_size():
    engine = ScriptedEngine({"1+1=": ["2"] * 4})
    collect(engine, [prompt("1+1=", "2")], group_size=4)
    assert engine.calls == [4]


def test_each_prompt_is_scored_by_the_environment_that_it_names():
    class Half:
        def step(self, responses: Sequence[Response]) -> list[Score]:
            assert {response.reference_answer for response in responses} == {"x"}
            return [Score(reward=0.5, correct=False) for _ in responses]

        def close(self) -> None: ...

    engine = ScriptedEngine({"1+1=": ["2", "2"], "?": ["a", "b"]})
    prompts = [prompt("?", "x", "half"), prompt("1+1=", "2"), prompt("?", "x", "half")]
    batch = collect(engine, prompts, {"arithmetic": ArithmeticEnvironment(), "half": Half()})
    assert batch.rewards_PG().tolist() == [[0.5, 0.5], [1, 1], [0.5, 0.5]]


def test_an_environment_that_is_not_configured_is_an_error_that_names_it():
    with pytest.raises(
        ConfigError, match=r"data names environment 'chess', which is no key of env \(its keys: arithmetic\)"
    ):
        collect(ScriptedEngine({"1+1=": ["2", "2"]}), [prompt("1+1=", "2", "chess")])


def retrying(message: str = "no ") -> dict[str, RetryEnvironment]:
    return {"arithmetic": RetryEnvironment(ArithmeticEnvironment(), message)}


def test_a_wrong_answer_is_told_so_and_the_policy_answers_again_while_it_has_turns_left():
    engine = ScriptedEngine(
        {
            "1+1=": ["2", "3", "4", "5..."],
            "1+1=3no ": ["2"],
            "1+1=4no ": ["8"],
            "1+1=4no 8no ": ["9"],
        }
    )
    batch = collect(engine, [prompt("1+1=", "2")], retrying(), group_size=4, max_turns=3)
    # The first is right at once, the second in its second turn, the third never, and the fourth was cut off.
    assert batch.rewards_PG().tolist() == [[1, 1, 0, 0]]
    assert batch.num_turns().tolist() == [1, 2, 3, 1]
    assert batch.truncated().tolist() == [False, False, False, True]
    assert [rollout.response_text for rollout in batch.rollouts] == ["2", "3no 2", "4no 8no 9", "5"]
    assert batch.response_lengths().tolist() == [2, 4, 6, 1]
    assert batch.longest_responses().tolist() == [2, 2, 2, 1]
    assert [rollout.num_tokens for rollout in batch.rollouts] == [6, 11, 16, 5]
    assert engine.calls == [4, 1, 1]
    sequence = batch.rollouts[1].sequences()[0]
    assert list(sequence.token_ids) == [*encode("1+1=3"), END, *encode("no 2"), END]
    assert list(sequence.token_mask) == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]


def test_an_environment_sees_the_turns_before_and_whether_more_may_follow():
    seen: list[Response] = []

    class Counting:
        def step(self, responses: Sequence[Response]) -> list[Score | Observation]:
            seen.extend(responses)
            return [Observation("so? ", otherwise=Score(0.25, correct=False)) for _ in responses]

        def close(self) -> None: ...

    engine = ScriptedEngine({"?": ["a"], "?aso? ": ["b"]})
    batch = collect(engine, [prompt("?", "x", "counting")], {"counting": Counting()}, group_size=1, max_turns=2)
    assert [(response.text, response.earlier, response.may_go_on) for response in seen] == [
        ("a", (), True),
        ("b", (Turn("a", "so? "),), False),
    ]
    assert batch.rewards().tolist() == [0.25]


@pytest.mark.parametrize(("max_tokens", "num_turns", "reward"), [(9, 1, -1.0), (10, 2, 1.0)])
def test_a_rollout_goes_on_only_where_an_answer_of_one_token_still_fits(max_tokens, num_turns, reward):
    class Strict(ArithmeticEnvironment):
        def step(self, responses: Sequence[Response]) -> list[Score]:
            return [score if score.correct else Score(-1.0, correct=False) for score in super().step(responses)]

    engine = ScriptedEngine({"1+1=": ["3"], "1+1=3no ": ["2"]})  # 4 + 2 tokens, then 3, then 2
    environments = {"arithmetic": RetryEnvironment(Strict(), "no ")}
    batch = collect(engine, [prompt("1+1=", "2")], environments, group_size=1, max_turns=2, max_tokens=max_tokens)
    assert batch.num_turns().tolist() == [num_turns]
    assert batch.rewards().tolist() == [reward]
    assert batch.truncated().tolist() == [False]  # what was said was said to its end


def test_a_rollout_whose_second_turn_cannot_be_scored_has_no_score_and_its_group_goes_on():
    class Flaky(ArithmeticEnvironment):
        def step(self, responses: Sequence[Response]) -> list[Score | Unscored]:
            outcomes = super().step(responses)
            return [
                Unscored("failed", "no judge") if response.text == "8" else outcome
                for response, outcome in zip(responses, outcomes, strict=True)
            ]

    engine = ScriptedEngine({"1+1=": ["2", "3", "4"], "1+1=3no ": ["8"], "1+1=4no ": ["2"]})
    environments = {"arithmetic": RetryEnvironment(Flaky(), "no ")}
    batch = collect(engine, [prompt("1+1=", "2")], environments, group_size=3, max_turns=3)
    assert batch.scored().tolist() == [True, False, True]
    assert batch.num_turns().tolist() == [1, 2, 2]
    assert rollout_metrics(batch)["failed_rate"] == pytest.approx(1 / 3)


def test_a_rollout_ends_where_a_hook_says_so_with_the_score_that_it_or_the_observation_has():
    asked = []

    def stopped(response: Response, observation: Observation) -> Score | None:
        asked.append((response.text, observation.text))
        return {"4": observation.otherwise, "5": Score(0.5, correct=True)}.get(response.text)

    # Right at once, stopped twice, wrong in the first turn and right in the second.
    engine = ScriptedEngine({"1+1=": ["2", "4", "5", "6"], "1+1=6no ": ["2"]})
    environments = {"arithmetic": RetryEnvironment(ArithmeticEnvironment(), "no ")}
    batch = collect(engine, [prompt("1+1=", "2")], environments, group_size=4, max_turns=2, stopped=stopped)
    assert asked == [("4", "no "), ("5", "no "), ("6", "no ")]
    assert batch.stopped().tolist() == [False, True, True, False]
    assert batch.num_turns().tolist() == [1, 1, 1, 2]
    assert batch.rewards().tolist() == [1.0, 0.0, 0.5, 1.0]
    assert batch.correct().tolist() == [True, False, True, True]


def test_collation_counts_response_tokens_and_keeps_the_samplers_logprobs_at_them():
    tensors = make_batch().collate(pad_id=7)
    assert tensors.input_ids[0].tolist() == [*encode("1+1=2"), END, 7, 7, 7, 7, 7]
    assert tensors.token_mask[0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert tensors.generation_logprobs[0, 3:7].tolist() == pytest.approx([0.0, -0.1, -0.2, 0.0])
    assert tensors.input_lengths.tolist() == [6, 6, 6, 5, 7, 11]


class TellingEngine(ScriptedEngine):
    """Sends the tokens of each call to experts of the call's number; its first response to a prompt lacks them."""

    def generate(self, prompts, num_samples):
        found = super().generate(prompts, num_samples)
        pairs = zip(prompts, found, strict=True)
        return [[self.told(len(each), said, place) for place, said in enumerate(group)] for each, group in pairs]

    def told(self, size, said, place):
        experts = np.array([[2 * len(self.calls), 0]], dtype=np.uint8)  # one layer, two experts per token
        routing = np.tile(experts, (size + len(said.token_ids) - 1, 1, 1))
        return replace(said, routed_experts=None if len(self.calls) == 1 and place == 0 else routing)


def test_each_token_keeps_the_experts_of_the_call_that_first_computed_it():
    script = {"1+1=": ["2", "3"], "1+1=3no ": ["2"]}
    batch = collect(TellingEngine(script), [prompt("1+1=", "2")], retrying(), max_turns=2)
    experts = batch.collate(pad_id=0).routed_experts
    assert experts.dtype == torch.uint8
    assert experts[..., 1].sum() == 0
    # The prompt, "3" without the end of the turn, that end and what follows but the last token.
    assert experts[:, :, 0, 0].tolist() == [[0] * 11, [2] * 5 + [4] * 5 + [0]]
    metrics = step_metrics(SampledGroups.all_of(batch), TrainResult([0.0], [0.0], [0.0]), {"training": 1.0}, None, {})
    assert metrics["routed_token_rate"] == pytest.approx(10 / 17)
    assert metrics["routed_experts_mib"] == 2 * 10 / 2**20
    assert batch.select_groups([0]).collate(pad_id=0, multiple=4).routed_experts.shape == (2, 12, 1, 2)


def test_a_response_that_is_cut_and_continued_keeps_the_experts_that_sampled_it():
    first = Completion([1, 2, 3], [0.0] * 3, "abort", routed_experts=np.full((6, 1, 2), 1))  # after four tokens
    rest = Completion([4, 5], [0.0] * 2, "stop", routed_experts=np.full((7, 1, 2), 2))
    joined = first.cut(2).continued_by(rest)
    assert joined.token_ids == [1, 2, 4, 5]
    assert joined.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 1, 2, 2]
    assert replace(first, routed_experts=None).continued_by(rest).routed_experts is rest.routed_experts


def test_tokens_that_an_environment_wrote_are_in_the_sequence_but_not_in_the_loss():
    rollout = Rollout(
        prompt=prompt("ab", "x"),
        segments=(
            Segment(token_ids=(1, 2), logprobs=(-1.0, -2.0)),
            Segment(token_ids=(3,), logprobs=None),
            Segment(token_ids=(4,), logprobs=(-4.0,)),
        ),
        response_text="",
        reward=0.0,
        correct=False,
        truncated=False,
    )
    sequence = rollout.sequences()[0]
    assert list(sequence.token_ids) == [*encode("ab"), 1, 2, 3, 4]
    assert list(sequence.token_mask) == [0, 0, 1, 1, 0, 1]
    assert list(sequence.generation_logprobs) == [0, 0, -1.0, -2.0, 0, -4.0]
    assert rollout.num_response_tokens == 3


def test_groups_can_be_selected_and_joined_again():
    batch = make_batch()
    joined = RolloutBatch.concatenate([batch.select_groups([2]), batch.select_groups([0, 1])])
    assert joined == batch.select_groups([2, 0, 1])
    assert batch.select_groups([]).num_prompts == 0


def test_an_incomplete_group_is_refused():
    with pytest.raises(ValueError, match="3 rollouts are not whole groups of 2"):
        RolloutBatch(rollouts=make_batch().rollouts[:3], group_size=2)


def test_metrics_are_those_counted_by_hand():
    metrics = rollout_metrics(make_batch())
    assert metrics == pytest.approx(
        {
            "reward_mean": 4 / 6,
            "reward_std": math.sqrt((4 * (1 / 3) ** 2 + 2 * (2 / 3) ** 2) / 5),
            "reward_min": 0.0,
            "reward_max": 1.0,
            "accuracy": 4 / 6,
            "overlong_prompt_rate": 0.0,
            "mean_prompt_tokens": 4.0,
            "max_prompt_tokens": 4.0,
            "mean_response_tokens": 17 / 6,
            "max_response_tokens": 7,
            "mean_turns": 1.0,
            "truncation_rate": 1 / 6,
            "failed_rate": 0.0,
            "timed_out_rate": 0.0,
            "no_reward_rate": 0.0,
            "constant_group_rate": 1 / 3,
            "pass_rate": 1.0,
            "pass_at_2": 1.0,
        }
    )


@given(group_size=st.integers(1, 9), counts=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_pass_at_k_is_the_share_of_subsets_of_k_responses_with_a_correct_one(group_size, counts):
    counts = [min(count, group_size) for count in counts]
    assert powers_of_two(group_size) == [k for k in (2, 4, 8) if k <= group_size]
    for k in range(1, group_size + 1):
        subsets = list(combinations(range(group_size), k))
        shares = [sum(any(row < count for row in subset) for subset in subsets) / len(subsets) for count in counts]
        assert pass_at_k(counts, [group_size] * len(counts), k) == pytest.approx(sum(shares) / len(shares))


def test_parts_of_a_reward_and_numbers_that_it_logged_are_reported_over_the_rollouts_that_have_them():
    batch = make_batch()
    parts = [{"form": 1.0, "right": 0.0}, {"form": 0.5, "right": 1.0}, {"right": 0.5}, {}, {}, {}]
    extra = [{"length": 3, "said": "x"}, {"length": 6.0}, {}, {}, {}, {}]
    rollouts = [
        replace(rollout, reward_parts=part, reward_extra=other)
        for rollout, part, other in zip(batch.rollouts, parts, extra, strict=True)
    ]
    metrics = rollout_metrics(RolloutBatch(rollouts=tuple(rollouts), group_size=2))
    found = {name: metrics[name] for name in metrics if name.startswith(("reward_part/", "reward_extra/"))}
    assert found == {"reward_part/form": 0.75, "reward_part/right": 0.5, "reward_extra/length": 4.5}


@given(st.lists(st.lists(st.sampled_from(["1", "2", None]), min_size=4, max_size=6), min_size=1, max_size=3), st.data())
def test_cons_at_k_is_the_share_of_votes_of_k_that_are_right(answers, data):
    groups = [[(answer, answer == "1") for answer in group] for group in answers]
    k = data.draw(st.integers(1, 4))
    shares = []
    for group in answers:
        won = [max(subset, key=subset.count) == "1" for subset in combinations(group, k)]
        shares.append(sum(won) / len(won))
    assert cons_at_k(groups, k) == pytest.approx(sum(shares) / len(shares))
    assert cons_at_k(groups, 1) == pytest.approx(sum(group.count("1") / len(group) for group in answers) / len(answers))


def test_cons_at_k_of_very_many_subsets_is_an_estimate():
    group = [("1", True)] * 26 + [("2", False)] * 14
    exact = sum(comb(26, n) * comb(14, 15 - n) for n in range(8, 16)) / comb(40, 15)
    assert cons_at_k([group], 15) == pytest.approx(exact, abs=0.02)


def test_a_mixture_reports_each_of_its_data_sets():
    batch = make_batch()
    rollouts = [
        replace(rollout, prompt=replace(rollout.prompt, data_set="easy" if row < 4 else "hard"))
        for row, rollout in enumerate(batch.rollouts)
    ]
    metrics = rollout_metrics(RolloutBatch(rollouts=tuple(rollouts), group_size=2))
    names = [name for name in metrics if "/" in name]
    assert {name: metrics[name] for name in names} == {
        "reward_mean/easy": 0.5, "accuracy/easy": 0.5, "reward_mean/hard": 1.0, "accuracy/hard": 1.0,
    }  # fmt: skip
