"""Evaluates a model: the engine samples responses, environments score them.

1. Configuration, model folder and data are checked before Ray starts.
2. The engine loads the model's own weights; there is no policy and no refit.
3. The engine answers batches of prompts: `num_tests_per_prompt` responses to each, and a greedy one with `eval.greedy`.
   Each answer is scored and written when it is finished; an interrupted evaluation asks for those that are missing.
4. Results are printed, and written with an HTML page.
"""

from __future__ import annotations

import json
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
from nemo_offload_rl.protocols.engine import Finished
from nemo_offload_rl.runs.answers_file import (
    PAGE_FILE,
    RESPONSES_FILE,
    RESULTS_FILE,
    AnswerKey,
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

SAMPLED, GREEDY = "sampled", "greedy"

type Generate = Callable[[Sequence[Sequence[int]], Sequence[Sequence[SamplingSettings]]], Iterator[list[Finished]]]
"""Signature of `RayGenerationEngine.generate_as_finished`."""

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
        sampled, greedy = ([a for a in mine if a["kind"] == kind] for kind in (SAMPLED, GREEDY))
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
    num_answers = {SAMPLED: config.eval.num_tests_per_prompt, GREEDY: int(config.eval.greedy)}
    answers = AnswersFile(folder, identity, len(prompts), num_answers)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    batches = batches_of(answers.missing(), config.generation.num_prompts_per_step or len(prompts))
    progress = RunProgress(len(batches), unit="batch")
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
        if answers.records:
            facts["goes on"] = f"{answers.count()} answers are in this folder"
        progress.begin(f"evaluation, {config.eval.num_tests_per_prompt} responses to each prompt", facts)
        if batches:
            try:
                engine = stack.enter_context(evaluation_engine(config, progress.starting))
                ask_all(config, prompts, batches, engine.generate_as_finished, scoring, decode, answers, progress)
            except BaseException as error:
                error.add_note(LastLines(answers.way_to_go_on()))
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


def batches_of(missing: Sequence[AnswerKey], num_prompts: int) -> list[list[AnswerKey]]:
    """Split answers, which stand in the order of the data, into those to `num_prompts` prompts at a time."""
    to_prompts = [list(keys) for _, keys in groupby(missing, key=lambda key: key.prompt_index)]
    return [
        [key for keys in to_prompts[start : start + num_prompts] for key in keys]
        for start in range(0, len(to_prompts), num_prompts)
    ]


def ask_all(
    config: EvalConfig,
    prompts: Sequence[Prompt],
    batches: Sequence[Sequence[AnswerKey]],
    generate: Generate,
    environments: Mapping[str, Environment],
    decode: Decode,
    answers: AnswersFile,
    progress: RunProgress,
) -> None:
    """Ask for answers batch by batch; score and add those that are finished. Rollouts have one turn."""
    timer = PhaseTimer()
    progress.follow(lambda: f"{timer.current()}, {answers.count()} answers")
    turns = Turns(max_turns=1, max_tokens=config.engine.max_model_len, encode=lambda observation, response: ())

    def ask(keys: Sequence[AnswerKey]) -> Iterator[Rollout]:
        to_prompts = [list(group) for _, group in groupby(keys, key=lambda key: key.prompt_index)]
        chunks = generate(
            [prompts[group[0].prompt_index].token_ids for group in to_prompts],
            [[sampling_of(config, key) for key in group] for group in to_prompts],
        )
        while True:
            with timer.phase("generation"):
                finished = next(chunks, None)
            if finished is None:
                return
            found = [to_prompts[place][number] for place, number, _ in finished]
            asked = Rollouts(
                [prompts[key.prompt_index] for key in found],
                group_size=1,
                environments=environments,
                decode=decode,
                turns=turns,
            )
            with timer.phase("reward"):
                asked.step([[completion] for _, _, completion in finished])
            rollouts = asked.batch().rollouts
            answers.add([_record(*pair) for pair in zip(found, rollouts, strict=True)])
            yield from rollouts

    for number, batch in enumerate(batches, 1):
        by_kind = {kind: [key for key in batch if key.kind == kind] for kind in (SAMPLED, GREEDY)}
        rollouts = {kind: list(ask(keys)) for kind, keys in by_kind.items() if keys}
        right = _mean([rollout.correct for rollout in rollouts.get(SAMPLED, []) if rollout.unscored is None])
        figures = {"answers": answers.count()}
        progress.step_done(number, figures if right is None else {**figures, "accuracy": f"{right:.1%}"}, timer.drain())


def sampling_of(config: EvalConfig, key: AnswerKey) -> SamplingSettings:
    """Return how to sample an answer; its seed depends only on its place, so batches and engines change no draw."""
    if key.kind == GREEDY:
        return config.generation.sampling(greedy=True)
    place = key.prompt_index * config.eval.num_tests_per_prompt + key.sample
    seed = config.eval.seed * 2**32 + place if config.generation.vllm_cfg.per_request_seeds else None
    return replace(config.generation.sampling(greedy=False), seed=seed)


def ballots_of(
    answers: Sequence[AnswerRecord], prompts: Sequence[Prompt], environments: Mapping[str, Environment]
) -> list[list[Ballot]]:
    """Return the votes of the scored sampled responses to each prompt.

    Equal answers vote for the spelling that came first. Without `math`, only the same text is equal.

    Raises:
        ConfigError: No response has an answer.
    """
    groups = _by_prompt([answer for answer in answers if answer["kind"] == SAMPLED])
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


def _record(key: AnswerKey, rollout: Rollout) -> AnswerRecord:
    return {
        **key._asdict(),
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
