"""Evaluates a model: the engine samples responses, environments score them.

1. Configuration, model folder and data are checked before Ray starts.
2. The engine loads the model's own weights; there is no policy and no refit.
3. The engine answers batches of prompts: `num_tests_per_prompt` responses to each, and a greedy one with `eval.greedy`.
   The answers are written after each batch; an interrupted evaluation goes on after the last one.
4. Results are printed, and written with an HTML page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_offload_rl.algorithms.identity import evaluation_identity
from nemo_offload_rl.algorithms.rollout_log import score_record
from nemo_offload_rl.backends.hf.model_folder import model_vocab_size
from nemo_offload_rl.data.datasets import load_prompts
from nemo_offload_rl.data.given import Rows, with_given_rows
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.data.tokenizer import check_token_ids, load_tokenizer
from nemo_offload_rl.environments.agents import AgentEnvironment
from nemo_offload_rl.environments.interfaces import Environment
from nemo_offload_rl.environments.math import MathEnvironment, RetryEnvironment
from nemo_offload_rl.errors import ConfigError, UserError
from nemo_offload_rl.experience.pass_at_k import cons_at_k, pass_at_k, powers_of_two
from nemo_offload_rl.experience.rollouts import Decode, Rollouts, Turns
from nemo_offload_rl.experience.types import Rollout, unscored_rates
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.keys.master import EvalConfig
from nemo_offload_rl.protocols.engine import Completion
from nemo_offload_rl.runs.answers_file import (
    PAGE_FILE,
    RESPONSES_FILE,
    RESULTS_FILE,
    AnswerRecord,
    AnswersFile,
    check_writable,
    writing,
)
from nemo_offload_rl.runs.checks import begin
from nemo_offload_rl.runs.environments import load_code, open_environments
from nemo_offload_rl.runs.result import data_line
from nemo_offload_rl.utils.cli import LastLines
from nemo_offload_rl.utils.progress import RunProgress, Starting, aligned, shown_path
from nemo_offload_rl.utils.timer import PhaseTimer

if TYPE_CHECKING:
    from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine

ALL = "all"

type Generate = Callable[[Sequence[Sequence[int]], SamplingSettings, int], list[list[Completion]]]
type Results = dict[str, dict[str, float | None]]
"""Metrics by data set, and over all prompts under `all`; a metric is None if no response has the score it needs."""


type Ballot = tuple[str | None, bool]
"""The answer that a response votes for, None for none, and whether the response is right."""


@dataclass(frozen=True)
class Evaluation:
    """The answers to all prompts.

    Attributes:
        answers: Lines of responses.jsonl, one prompt after the other.
        ballots: The votes of the scored sampled responses to each prompt, for cons@k; None for no vote.
    """

    answers: Sequence[AnswerRecord]
    ballots: Sequence[Sequence[Ballot]] | None = None

    def results(self, k: int) -> Results:
        """Return metrics by data set, and over all data sets if there are several."""
        names = list(dict.fromkeys(answer["data_set"] for answer in self.answers))
        found = {name: self._metrics(name, k) for name in names}
        return found if len(names) == 1 else {ALL: self._metrics(None, k), **found}

    def _metrics(self, name: str | None, k: int) -> dict[str, float | None]:
        mine = [answer for answer in self.answers if name in (None, answer["data_set"])]
        sampled, greedy = ([a for a in mine if a["kind"] == kind] for kind in ("sampled", "greedy"))
        groups = _by_prompt(sampled)
        scored = [_scored(group) for group in groups.values()]
        correct, num_scored = [sum(a["correct"] for a in group) for group in scored], [len(group) for group in scored]
        ks = sorted({1, k, *powers_of_two(max(map(len, groups.values())))})
        metrics: dict[str, float | None] = {"num_prompts": float(len(groups))}
        metrics |= {f"pass_at_{n}": pass_at_k(correct, num_scored, n) for n in ks}
        if self.ballots is not None:
            ballots = [self.ballots[index] for index in groups]
            metrics |= {f"cons_at_{n}": cons_at_k(ballots, n) for n in ks}
        if greedy:
            metrics["accuracy_greedy"] = _mean([answer["correct"] for answer in _scored(greedy)])
        metrics["reward"] = _mean([answer["reward"] for answer in _scored(sampled)])
        metrics["truncation_rate"] = _mean([answer["truncated"] for answer in sampled])
        metrics["mean_response_tokens"] = _mean([len(answer["token_ids"]) for answer in sampled])
        rates = unscored_rates([answer["unscored"] for answer in sampled])
        return metrics | {f"{why}_rate": share for why, share in rates.items()}


@contextmanager
def _own_keys() -> Iterator[None]:
    """Replace training's key names by an evaluation's, such as `tokenizer.name`, in errors of shared code."""
    try:
        yield
    except UserError as error:
        text = str(error).replace("policy.model_name", "generation.model_name")
        error.args = (re.sub(r"\bpolicy\.(?=(?:tokenizer|generation)\.)", "", text),)
        raise


@_own_keys()
def run_eval(config: EvalConfig, *, validation_data: Rows | None = None) -> Results:
    """Evaluate a model from a checked configuration.

    Args:
        config: From `load_eval_config`.
        validation_data: Rows with `prompt`, `answer` and any other columns, in place of `data.validation`.

    Raises:
        UserError: The user can fix the cause.
    """
    begin(config.cluster)
    folder = None if config.eval.save_path is None else Path(config.eval.save_path)
    if folder is not None:
        check_writable(folder)  # before hours of sampling
    tokenizer = load_tokenizer(config.tokenizer)
    code = load_code(config.env)
    data = with_given_rows(config.data, None, validation_data)
    splits = load_prompts(data, tokenizer, config.tokenizer.chat_template_kwargs)
    prompts = splits.validation[: config.eval.max_samples]
    vocab_size = model_vocab_size(config.engine.model_name, config.engine.hf_config_overrides)
    check_token_ids(tokenizer, (prompt.token_ids for prompt in prompts), vocab_size)
    identity = {} if folder is None else evaluation_identity(config, tokenizer, prompts, code)
    answers = AnswersFile(folder, identity, config.eval.num_tests_per_prompt + config.eval.greedy)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    num_left = len(prompts) - answers.num_prompts
    size = config.generation.num_prompts_per_step or len(prompts)
    progress = RunProgress(math.ceil(num_left / size), unit="batch")
    with ExitStack() as stack:
        environments = stack.enter_context(open_environments(config.env, code, splits))
        scoring = {name: found for name, found in environments.items() if not isinstance(found, AgentEnvironment)}
        if agents := environments.keys() - scoring.keys():
            raise ConfigError(
                f"env.{min(agents)} talks to the engine over HTTP, which an evaluation does not serve; name an "
                "environment that scores responses"
            )
        stack.enter_context(progress)
        facts = {
            "model": shown_path(config.engine.model_name),
            "data": data_line((prompt.data_set for prompt in prompts), None, "prompts"),
            "results": "not kept (eval.save_path is null)" if folder is None else shown_path(folder),
        }
        if answers.num_prompts:
            facts["goes on"] = f"{answers.num_prompts} of {len(prompts)} prompts are answered in this folder"
        progress.begin(f"evaluation, {config.eval.num_tests_per_prompt} responses to each prompt", facts)
        if num_left:
            try:
                engine = stack.enter_context(evaluation_engine(config, progress.starting))
                ask_all(config, prompts, engine.generate, scoring, decode, answers, progress)
            except BaseException as error:
                error.add_note(LastLines(answers.way_to_go_on(len(prompts))))
                raise
        ballots = ballots_of(answers.records, prompts, scoring) if config.eval.metric == "cons@k" else None
    evaluation = Evaluation(answers.records, ballots)
    results = evaluation.results(config.eval.k_value)
    told = {"scores": summary(config, results)}
    if folder is not None:
        write_evaluation(folder, config, evaluation, results)
        answers.finish()
        names = {"results": RESULTS_FILE, "responses": RESPONSES_FILE, "page": PAGE_FILE}
        told |= {what: shown_path(folder / name) for what, name in names.items()}
    progress.note(render(results))
    progress.note(aligned(told))
    return results


def ask_all(
    config: EvalConfig,
    prompts: Sequence[Prompt],
    generate: Generate,
    environments: Mapping[str, Environment],
    decode: Decode,
    answers: AnswersFile,
    progress: RunProgress,
) -> None:
    """Ask the prompts that are not answered yet, batch by batch, and score the responses; rollouts have one turn."""
    timer = PhaseTimer()
    progress.follow(timer.current)
    size, seed = config.generation.num_prompts_per_step or len(prompts), config.eval.seed
    num, seeded = config.eval.num_tests_per_prompt, config.generation.vllm_cfg.per_request_seeds
    turns = Turns(max_turns=1, max_tokens=config.engine.max_model_len, encode=lambda observation, response: ())

    def ask(batch: Sequence[Prompt], sampling: SamplingSettings, group_size: int) -> list[Sequence[Rollout]]:
        asked = Rollouts(batch, group_size=group_size, environments=environments, decode=decode, turns=turns)
        token_ids, num_samples = asked.prompts()
        with timer.phase("generation"):
            responses = generate(token_ids, sampling, num_samples)
        with timer.phase("reward"):
            asked.step(responses)
        rollouts = asked.batch().rollouts
        return [rollouts[start : start + group_size] for start in range(0, len(rollouts), group_size)]

    for number, start in enumerate(range(answers.num_prompts, len(prompts), size), 1):
        batch = prompts[start : start + size]
        # A response's seed depends only on its place: batch sizes and engines do not change the draws.
        place = seed * 2**32 + start * num if seeded else None
        sampled = ask(batch, replace(config.generation.sampling(greedy=False), seed=place), num)
        greedy = ask(batch, config.generation.sampling(greedy=True), 1) if config.eval.greedy else [()] * len(batch)
        answers.add(
            [
                _record(start + index, kind, rollout)
                for index in range(len(batch))
                for kind, groups in (("sampled", sampled), ("greedy", greedy))
                for rollout in groups[index]
            ]
        )
        right = _mean([rollout.correct for group in sampled for rollout in group if rollout.unscored is None])
        figures = {"prompts": f"{start + len(batch)} of {len(prompts)}"}
        progress.step_done(number, figures if right is None else {**figures, "accuracy": f"{right:.1%}"}, timer.drain())


def ballots_of(
    answers: Sequence[AnswerRecord], prompts: Sequence[Prompt], environments: Mapping[str, Environment]
) -> list[list[Ballot]]:
    """Return the votes of the scored sampled responses to each prompt.

    Equal answers vote for the spelling that came first. Without `math`, only the same text is equal.

    Raises:
        ConfigError: No response has an answer.
    """
    groups = _by_prompt([answer for answer in answers if answer["kind"] == "sampled"])
    if all(answer["answer"] is None for group in groups.values() for answer in group):
        raise ConfigError(
            "eval.metric is cons@k, which counts answers, but no response has one; return Scores with `answer` from "
            "your environment, or set eval.metric to pass@k"
        )
    voted_for: dict[int, dict[str, str]] = {}  # by prompt and answer
    by_environment: dict[str, list[tuple[AnswerRecord, AnswerRecord]]] = {}
    for index, group in groups.items():
        first = {answer["answer"]: answer for answer in reversed(_scored(group)) if answer["answer"] is not None}
        voted_for[index] = {answer: answer for answer in first}
        pairs = combinations(sorted(first.values(), key=group.index), 2)
        # A right answer equals no wrong one.
        to_compare = [pair for pair in pairs if pair[0]["correct"] == pair[1]["correct"]]
        by_environment.setdefault(prompts[index].env_name, []).extend(to_compare)
    for name, pairs in by_environment.items():
        environment = environments[name]
        if isinstance(environment, RetryEnvironment):
            environment = environment.environment
        if not isinstance(environment, MathEnvironment):
            continue
        are_equal = environment.same_answers([(one["response"], other["response"]) for one, other in pairs])
        for (one, other), is_equal in zip(pairs, are_equal, strict=True):
            votes = voted_for[one["prompt_index"]]
            if is_equal and votes[other["answer"]] == other["answer"]:
                votes[other["answer"]] = votes[one["answer"]]
    return [
        [(voted_for[index].get(answer["answer"]), answer["correct"]) for answer in _scored(group)]
        for index, group in groups.items()
    ]


@contextmanager
def evaluation_engine(config: EvalConfig, starting: Starting) -> Iterator[RayGenerationEngine]:
    """Start engines with the model's weights on all devices of `cluster`, for the `with` block."""
    from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
    from nemo_offload_rl.distributed.virtual_cluster import cluster_session

    with ExitStack() as stack:
        with starting("Ray"):
            cluster = stack.enter_context(cluster_session(config.cluster, num_colocated_groups=1))
        with starting("engine"):
            engine = RayGenerationEngine(cluster, config.engine)
            engine.wait_until_ready()
        yield engine


def render(results: Results) -> str:
    """Render a text table with one column for each data set."""
    names = list(results)
    rows = [["", *names]]
    rows += [[metric, *(_text(metric, results[name][metric]) for name in names)] for metric in results[names[0]]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names) + 1)]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def write_evaluation(folder: Path, config: EvalConfig, evaluation: Evaluation, results: Results) -> None:
    """Write results.json and the page.

    Raises:
        ConfigError: The folder cannot be written.
    """
    from nemo_offload_rl.report.evaluation import evaluation_page

    table = [
        (metric, [_text(metric, metrics[metric]) for metrics in results.values()])
        for metric in results[next(iter(results))]
    ]
    page = evaluation_page(config.engine.model_name, list(results), table, evaluation.answers, config.resolved)
    with writing(folder):
        found = {"model": config.engine.model_name, "results": results, "config": config.resolved}
        (folder / RESULTS_FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        (folder / PAGE_FILE).write_text(page, encoding="utf-8", errors="backslashreplace")


def summary(config: EvalConfig, results: Results) -> str:
    """Return the most important results over all data sets in one line."""
    metrics = results[next(iter(results))]
    score = "cons" if config.eval.metric == "cons@k" else "pass"
    names = ["pass_at_1", f"{score}_at_{config.eval.k_value}", "accuracy_greedy", "truncation_rate"]
    told = (f"{name} {_text(name, metrics[name])}" for name in dict.fromkeys(names) if name in metrics)
    return f"{', '.join(told)} ({_text('num_prompts', metrics['num_prompts'])} prompts)"


def _record(index: int, kind: str, rollout: Rollout) -> AnswerRecord:
    return {
        "prompt_index": index,
        "kind": kind,
        "data_set": rollout.prompt.data_set,
        "prompt": rollout.prompt.text,
        "response": rollout.response_text,
        "reference_answer": rollout.prompt.reference_answer,
        **score_record(rollout),
        "answer": rollout.answer,
        "truncated": rollout.truncated,
        "token_ids": [token for segment in rollout.segments for token in segment.token_ids],
    }


def _by_prompt(answers: Sequence[AnswerRecord]) -> dict[int, list[AnswerRecord]]:
    return {index: list(group) for index, group in groupby(answers, key=lambda answer: answer["prompt_index"])}


def _scored(answers: Sequence[AnswerRecord]) -> list[AnswerRecord]:
    return [answer for answer in answers if answer["unscored"] is None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _text(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.0f}" if metric == "num_prompts" else f"{value:.1f}" if metric.endswith("tokens") else f"{value:.4f}"
    )
