"""The configuration of an evaluation: the shipped one, its rules, and which folder a checkpoint stands for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tokenizer, qwen3_config, save_model_folder

from nemo_offload_rl.config.convert import model_folder
from nemo_offload_rl.config.rules.evaluation import EVAL_RULES
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.interfaces import Response
from nemo_offload_rl.environments.math import MathEnvironment, RetryEnvironment
from nemo_offload_rl.errors import ConfigError, DataError
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.keys.published import MathProblemsConfig
from nemo_offload_rl.protocols.engine import Completion, Finished
from nemo_offload_rl.runs import evaluation
from nemo_offload_rl.runs.evaluation import run_eval
from nemo_offload_rl.runs.loading import load_eval_config, load_grpo_config

EVAL = Path("examples/configs/eval.yaml")
BROKEN: dict[str, tuple[list[str], str]] = {
    "k_is_at_most_the_number_of_responses": (["eval.k_value=2"], "eval.k_value 2 is above"),
    "several_responses_are_sampled": (["eval.num_tests_per_prompt=4"], "all responses to a prompt are the same"),
    "prompts_leave_room_for_a_response": (["data.max_input_seq_length=2048"], "leaves no room for a response"),
    "evaluated_environments_exist": (["data.default.env_name=chess"], "scored by the environment chess"),
    "every_row_is_evaluated": (["+data.validation.split_validation_size=0.1"], "all rows are evaluated"),
    "evaluating_engine_fits_its_devices": (
        ["generation.vllm_cfg.tensor_parallel_size=2"],
        "does not divide the 1 devices of a host",
    ),
    "evaluation_serves_no_endpoint": (["+generation.vllm_cfg.expose_http_server=true"], "serves nothing over HTTP"),
    "only_evaluating_engines_in_8_bits_keep_layers": (
        ["+generation.vllm_cfg.num_first_layers_in_bf16=1"],
        "num_first_layers_in_bf16 is set, but precision is bfloat16",
    ),
    "evaluating_engines_share_out_experts_over_their_devices": (
        ["generation.vllm_cfg.expert_parallel_size=4"],
        "set it to 1, or both to 4",
    ),
    "quantized_folders_are_not_quantized_again": (
        ["generation.model_name=FOLDER", "generation.vllm_cfg.precision=fp8"],
        "are quantized already (quantization_config in its config.json)",
    ),
    "evaluation_kwargs_are_allowed": (["+generation.vllm_kwargs.load_format=dummy"], "generation.vllm_kwargs.load_f"),
}


def test_the_shipped_evaluation_passes_every_check_and_loads_the_models_own_weights() -> None:
    config = load_eval_config(EVAL)
    assert config.engine.model_name == config.tokenizer.name == config.generation.model_name
    assert config.engine.vllm_kwargs == {"load_format": "auto"}
    assert isinstance(config.data.validation, MathProblemsConfig)
    assert config.data.validation.env_name == "math"


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_says_which_keys_to_change(rule: str, tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    overrides, message = BROKEN[rule]
    with pytest.raises(ConfigError) as caught:
        load_eval_config(EVAL, [override.replace("FOLDER", str(tmp_path)) for override in overrides])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_rule_of_evaluations_is_broken_once() -> None:
    assert {rule.__name__ for rule in EVAL_RULES} == set(BROKEN)


def test_greedy_and_sampled_differ_in_the_temperature_alone() -> None:
    more = ["generation.temperature=0.7", "generation.top_p=0.9", "generation.top_k=5", "eval.num_tests_per_prompt=4"]
    generation = load_eval_config(EVAL, more).generation
    sampled, greedy = generation.sampling(greedy=False), generation.sampling(greedy=True)
    assert (sampled.temperature, sampled.top_p, sampled.top_k) == (0.7, 0.9, 5)
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, None)
    assert sampled.max_new_tokens == greedy.max_new_tokens == 2048


def test_on_a_cpu_the_engine_needs_no_keys_of_its_own() -> None:
    assert load_eval_config(EVAL).engine.kv_cache_memory_gib is None
    assert load_eval_config(EVAL, ["cluster.gpus_per_node=0"]).engine.kv_cache_memory_gib == 1.0
    config = load_grpo_config("examples/configs/grpo_math_1B.yaml", {"cluster.gpus_per_node": 0})
    assert config.engine.kv_cache_memory_gib == config.worker.engine_kv_cache_gib == 1.0


def test_a_run_of_another_kind_is_told_its_script() -> None:
    with pytest.raises(ConfigError, match=r"configures eval, not grpo; start it with examples/run_eval\.py"):
        load_grpo_config(EVAL)
    with pytest.raises(ConfigError, match=r"configures grpo, not eval; start it with examples/run_grpo\.py"):
        load_eval_config("examples/configs/grpo_math_1B.yaml")


def make(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def test_a_checkpoint_stands_for_its_model_folder_and_a_run_for_its_newest(tmp_path: Path) -> None:
    make(tmp_path, "step_9/hf/config.json", "step_9/progress.json", "step_10/hf/config.json", "step_11.partial/x")
    assert model_folder(str(tmp_path)) == str(tmp_path / "step_10/hf")
    assert model_folder(str(tmp_path / "step_9")) == str(tmp_path / "step_9/hf")
    assert model_folder(str(tmp_path / "step_9/hf")) == str(tmp_path / "step_9/hf")
    assert model_folder("Qwen/Qwen2.5-1.5B") == "Qwen/Qwen2.5-1.5B"
    make(tmp_path, "step_12/progress.json", "other/readme")
    with pytest.raises(ConfigError, match=r"checkpoint step_12 has no model folder hf/.*save_consolidated=true"):
        model_folder(str(tmp_path))
    with pytest.raises(ConfigError, match=r"is a folder without config\.json and no checkpoint"):
        model_folder(str(tmp_path / "other"))
    (tmp_path / "step_9/hf/config.json").write_text('{"max_position_embeddings": 64}')
    with pytest.raises(
        ConfigError, match=r"^generation\.vllm_cfg\.max_model_len 2048 is above the 64 tokens .*step_9/hf"
    ):
        load_eval_config(EVAL, [f"generation.model_name={tmp_path}/step_9"])


def test_a_folder_for_results_that_cannot_be_written_is_told_before_anything_is_sampled(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = load_eval_config(EVAL, [f"eval.save_path={tmp_path}/file/out", "cluster.gpus_per_node=0"])
    with pytest.raises(
        ConfigError, match=r"eval\.save_path .*/file/out cannot be written: Not a directory; name another"
    ):
        run_eval(config)


def test_errors_of_code_that_training_shares_name_the_keys_of_an_evaluation(tmp_path: Path) -> None:
    config = load_eval_config(EVAL, ["eval.save_path=null", f"tokenizer.name={tmp_path}", "cluster.gpus_per_node=0"])
    with pytest.raises(DataError, match=r"no tokenizer can be loaded from .*; set tokenizer\.name to a folder"):
        run_eval(config)


TOKENIZER = make_tokenizer()


class SeededEngine:
    """In place of an engine: answers of sums, drawn by the seed of each response, three at a time and the last first.

    It can end after some answers.
    """

    def __init__(self, answers_left: int) -> None:
        self.answers_left = answers_left
        self.num_asked = 0

    def generate_as_finished(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sequence[SamplingSettings]]
    ) -> Iterator[list[Finished]]:
        asked = [(place, number) for place, of_prompt in enumerate(samplings) for number in range(len(of_prompt))]
        self.num_asked += len(asked)
        for end in range(len(asked), 0, -3):
            if self.answers_left <= 0:
                raise KeyboardInterrupt
            self.answers_left -= 3
            answered = asked[max(0, end - 3) : end]
            yield [
                (place, number, self._answer(prompts[place], samplings[place][number].seed or 0))
                for place, number in answered
            ]

    @staticmethod
    def _answer(prompt: Sequence[int], seed: int) -> Completion:
        drawn = hashlib.sha256(f"{list(prompt)} {seed}".encode()).digest()[0]
        tokens = [*TOKENIZER.encode(f"\\boxed{{{drawn % 3}{'.0' * (drawn % 2)}}}"), 257]
        return Completion(token_ids=tokens, logprobs=[0.0] * len(tokens), finish_reason="stop")


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SeededEngine]:
    """Run an evaluation of six sums in tmp_path/NAME, whose engine ends after `answers`."""
    save_model_folder(tmp_path / "model", 0, qwen3_config(tied=True, num_layers=1, hidden_size=32))
    rows = [{"q": f"{row}+0=", "a": str(row % 3)} for row in range(6)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def score(response, answer):\n    return float(answer in response)\n")

    def run(name: str, *overrides: str, answers: int = 99, data: Any = None) -> SeededEngine:
        source = f"dataset_name: ResponseDataset, path: {tmp_path}/d.jsonl, input_key: q, output_key: a"
        own = [f"generation.model_name={tmp_path}/model", f"eval.save_path={tmp_path}/{name}", "env.math.num_workers=0"]
        own += [
            "cluster.gpus_per_node=0",
            "eval.num_tests_per_prompt=4",
            "eval.k_value=3",
            "eval.metric=cons@k",
            "eval.greedy=true",
        ]
        own += ["generation.temperature=1.0"]
        own += ["generation.vllm_cfg.max_model_len=1024", "data.max_input_seq_length=512"]
        own += ["~data.validation", f"+data.validation={{{source}}}"]
        engine = SeededEngine(answers)

        @contextmanager
        def opened(*_: Any) -> Any:
            yield engine

        monkeypatch.setattr(evaluation, "evaluation_engine", opened)
        run_eval(load_eval_config(EVAL, [*own, *overrides]), validation_data=data)
        return engine

    return run


def test_an_interrupted_evaluation_goes_on_and_ends_as_one_that_was_not(
    evaluated: Callable[..., SeededEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated("whole", "generation.num_prompts_per_step=4").num_asked == 5 * 6  # four sampled and one greedy
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt) as stopped:
        evaluated("out", answers=9)  # all prompts are one batch
    assert stopped.value.__notes__ == [
        f"9 of 30 answers are in {out}/responses.jsonl; the same command goes on from there"
    ]
    assert len((out / "responses.jsonl").read_text().splitlines()) == 9
    assert not (out / "results.json").exists()
    with (out / "responses.jsonl").open("r+") as file:
        file.truncate(len(file.read()) - 20)  # the last answer is cut, as if killed while writing
    for change, key in (
        ("generation.temperature=0.5", "generation.temperature=1.0, which is 0.5 here"),
        ("eval.max_samples=5", "eval.max_samples=null, which is 5 here"),
        ("+env.math.on_error=skip", "env.math.on_error=.*, which is skip here"),
        (f"+data.validation.prompt_file={tmp_path}/p.txt", "data=6 prompts, which is something else"),
    ):
        (tmp_path / "p.txt").write_text("Please: {}")
        before = (out / "responses.jsonl").read_bytes()
        with pytest.raises(ConfigError, match=rf"has the answers of an interrupted evaluation with .*{key}"):
            evaluated("out", change)
        assert (out / "responses.jsonl").read_bytes() == before
    with pytest.raises(KeyboardInterrupt):
        evaluated("out", answers=12)
    again = evaluated("out", "generation.num_prompts_per_step=3", "eval.k_value=2")  # neither changes an answer
    assert again.num_asked == 30 - 8 - 12
    assert (out / "responses.jsonl").read_text() == (tmp_path / "whole/responses.jsonl").read_text()
    mine, whole = (json.loads((folder / "results.json").read_text()) for folder in (out, tmp_path / "whole"))
    assert mine["results"]["d"].items() <= whole["results"]["d"].items()
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "responses.jsonl", "results.json"]
    last = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in last] == ["scores", "results", "responses", "page"]
    assert f"cons_at_2 {mine['results']['d']['cons_at_2']:.4f}, " in last[0] and last[3].endswith("index.html")
    assert evaluated("out").num_asked == 30  # a finished evaluation is done anew
    said = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
    assert evaluated("out", data=[{"conversations": said}]).num_asked == 5
    answer = json.loads((out / "responses.jsonl").read_text().splitlines()[0])
    assert (answer["prompt"], answer["reference_answer"]) == ("1+1=", "2")


def test_another_model_or_reward_under_the_same_name_is_refused(
    evaluated: Callable[..., SeededEngine], tmp_path: Path
) -> None:
    mine = ("data.default.env_name=mine", f"+env.mine={{num_workers: 0, target: {tmp_path}/reward.py:score}}")
    with pytest.raises(KeyboardInterrupt):
        evaluated("out", *mine, "eval.metric=pass@k", answers=2)
    (tmp_path / "reward.py").write_text("def score(response, answer):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"with env\.mine\.target=.*:score, which is something else under this name"):
        evaluated("out", *mine, "eval.metric=pass@k")
    with pytest.raises(KeyboardInterrupt):
        evaluated("other", answers=2)
    save_model_folder(tmp_path / "model", 1, qwen3_config(tied=True, num_layers=1, hidden_size=32))
    with pytest.raises(ConfigError, match=r"generation\.model_name=.*model, which is something else .* to start anew$"):
        evaluated("other")
    with pytest.raises(ConfigError, match=r"no response has one; return Scores"):
        evaluated("votes", *mine)
    assert evaluated("votes", *mine, "eval.metric=pass@k").num_asked == 0  # its answers were there
    (tmp_path / "other/unfinished.json").unlink()
    assert evaluated("other").num_asked == 30


def test_equal_answers_vote_for_the_spelling_that_came_first() -> None:
    environment = MathEnvironment(num_workers=0, timeout_s=1.0)
    said = ["\\boxed{7}", "$x=5$", "no idea", "It is 5.", "\\boxed{1/2}", "$0.5$", "\\boxed{5.0}"]
    answers, prompts = [], []
    for index, right in enumerate(("5", ["0.5", "7"])):
        prompts.append(Prompt(token_ids=(1,), text="p", reference_answer=right, env_name="math"))
        about = {"prompt_text": "p", "truncated": False, "reference_answer": right, "metadata": {}}
        scores = environment.step([Response(text=text, **about) for text in said])
        for text, score in zip(said, scores, strict=True):
            found = {"answer": score.answer, "correct": score.correct, "unscored": None}
            answers.append({"prompt_index": index, "kind": "sampled", "response": text, **found})
    first, second = evaluation.ballots_of(answers, prompts, {"math": RetryEnvironment(environment, "again")})
    seven, five, half = "7", answers[1]["answer"], "1/2"
    votes = [seven, five, None, five, half, half, five]
    assert first == list(zip(votes, [False, True, False, True, False, False, True], strict=True))
    assert second == list(zip(votes, [True, False, False, False, True, True, False], strict=True))
    with pytest.raises(ConfigError, match=r"no response has one; return Scores with `answer`"):
        evaluation.ballots_of([{**answers[2]}], prompts, {})
