"""Evaluates a model: the engine samples responses, environments score them.

1. Configuration, model folder and data are checked before Ray starts.
2. The engine loads the model's own weights; there is no policy and no refit.
3. The engine answers batches of prompts: `num_tests_per_prompt` responses to each, and a greedy one with `eval.greedy`.
4. Results are printed, and written with all responses and an HTML page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.algorithms.rollout_log import score_record
from nemo_offload_rl.backends.hf.model_folder import model_vocab_size
from nemo_offload_rl.data.datasets import load_prompts
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.data.tokenizer import check_token_ids, load_tokenizer
from nemo_offload_rl.environments.agents import AgentEnvironment
from nemo_offload_rl.environments.interfaces import Environment
from nemo_offload_rl.errors import ConfigError, UserError
from nemo_offload_rl.experience.pass_at_k import cons_at_k, pass_at_k, powers_of_two
from nemo_offload_rl.experience.rollouts import Decode, Rollouts, Turns
from nemo_offload_rl.experience.types import Rollout, RolloutBatch, unscored_rates
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.keys.master import EvalConfig
from nemo_offload_rl.protocols.engine import Completion
from nemo_offload_rl.runs.environments import load_code, open_environments
from nemo_offload_rl.runs.result import data_line
from nemo_offload_rl.utils.progress import RunProgress, Starting, aligned, shown_path
from nemo_offload_rl.utils.timer import PhaseTimer

if TYPE_CHECKING:
    from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine

ALL = "all"
RESULTS_FILE, RESPONSES_FILE, PAGE_FILE = "results.json", "responses.jsonl", "index.html"

type Generate = Callable[[Sequence[Sequence[int]], SamplingSettings, int], list[list[Completion]]]
type Results = dict[str, dict[str, float | None]]
"""Metrics by data set, and over all prompts under `all`; a metric is None if no response has the score it needs."""


@dataclass(frozen=True)
class Evaluation:
    """Sampled responses in groups of `num_tests_per_prompt`, and greedy ones or None; with `votes` also cons@k."""

    sampled: RolloutBatch
    greedy: RolloutBatch | None
    votes: bool = False

    def results(self, k: int) -> Results:
        """Return metrics by data set, and over all data sets if there are several."""
        names = list(dict.fromkeys(rollout.prompt.data_set for rollout in self.sampled.rollouts))
        found = {name: self._metrics(name, k) for name in names}
        return found if len(names) == 1 else {ALL: self._metrics(None, k), **found}

    def _metrics(self, name: str | None, k: int) -> dict[str, float | None]:
        size = self.sampled.group_size
        rollouts = _of(self.sampled, name)
        groups = [_scored(rollouts[start : start + size]) for start in range(0, len(rollouts), size)]
        correct, scored = [sum(r.correct for r in group) for group in groups], [len(group) for group in groups]
        ks = sorted({1, k, *powers_of_two(size)})
        metrics: dict[str, float | None] = {"num_prompts": float(len(groups))}
        metrics |= {f"pass_at_{n}": pass_at_k(correct, scored, n) for n in ks}
        if self.votes:
            ballots = [[(rollout.answer, rollout.correct) for rollout in group] for group in groups]
            metrics |= {f"cons_at_{n}": cons_at_k(ballots, n) for n in ks}
        if self.greedy is not None:
            metrics["accuracy_greedy"] = _mean([rollout.correct for rollout in _scored(_of(self.greedy, name))])
        metrics["reward"] = _mean([rollout.reward for rollout in _scored(rollouts)])
        metrics["truncation_rate"] = _mean([rollout.truncated for rollout in rollouts])
        metrics["mean_response_tokens"] = _mean([rollout.num_response_tokens for rollout in rollouts])
        return metrics | {f"{why}_rate": share for why, share in unscored_rates(rollouts).items()}


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
def run_eval(config: EvalConfig) -> Results:
    """Evaluate a model from a checked configuration.

    Raises:
        UserError: The user can fix the cause.
    """
    if config.eval.save_path is not None:
        with _writing(Path(config.eval.save_path)) as folder:  # before hours of sampling
            (folder / RESPONSES_FILE).open("a").close()
    tokenizer = load_tokenizer(config.tokenizer)
    code = load_code(config.env)
    splits = load_prompts(config.data, tokenizer, config.tokenizer.chat_template_kwargs)
    prompts = splits.validation[: config.eval.max_samples]
    vocab_size = model_vocab_size(config.engine.model_name, config.engine.hf_config_overrides)
    check_token_ids(tokenizer, (prompt.token_ids for prompt in prompts), vocab_size)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    size = config.generation.num_prompts_per_step or len(prompts)
    progress = RunProgress(math.ceil(len(prompts) / size), unit="batch")
    with ExitStack() as stack:
        environments = stack.enter_context(open_environments(config.env, code, splits))
        scoring = {name: found for name, found in environments.items() if not isinstance(found, AgentEnvironment)}
        if agents := environments.keys() - scoring.keys():
            raise ConfigError(
                f"env.{min(agents)} talks to the engine over HTTP, which an evaluation does not serve; name an "
                "environment that scores responses"
            )
        stack.enter_context(progress)
        folder = config.eval.save_path
        facts = {
            "model": shown_path(config.engine.model_name),
            "data": data_line((prompt.data_set for prompt in prompts), None, "prompts"),
            "results": "not kept (eval.save_path is null)" if folder is None else shown_path(folder),
        }
        progress.begin(f"evaluation, {config.eval.num_tests_per_prompt} responses to each prompt", facts)
        engine = stack.enter_context(evaluation_engine(config, progress.starting))
        evaluation = evaluate(config, prompts, engine.generate, scoring, decode, progress)
    results = evaluation.results(config.eval.k_value)
    progress.note(render(results))
    if folder is not None:
        write_evaluation(Path(folder), config, evaluation, results)
        names = {"results": RESULTS_FILE, "responses": RESPONSES_FILE, "page": PAGE_FILE}
        progress.note(aligned({what: shown_path(Path(folder) / name) for what, name in names.items()}))
    return results


def evaluate(
    config: EvalConfig,
    prompts: Sequence[Prompt],
    generate: Generate,
    environments: Mapping[str, Environment],
    decode: Decode,
    progress: RunProgress,
) -> Evaluation:
    """Ask all prompts, batch by batch, and score the responses; rollouts have one turn."""
    timer = PhaseTimer()
    progress.follow(timer.current)
    size, seed = config.generation.num_prompts_per_step or len(prompts), config.eval.seed
    num, seeded = config.eval.num_tests_per_prompt, config.generation.vllm_cfg.per_request_seeds
    turns = Turns(max_turns=1, max_tokens=config.engine.max_model_len, encode=lambda observation, response: ())

    def ask(batch: Sequence[Prompt], sampling: SamplingSettings, group_size: int) -> RolloutBatch:
        asked = Rollouts(batch, group_size=group_size, environments=environments, decode=decode, turns=turns)
        token_ids, num_samples = asked.prompts()
        with timer.phase("generation"):
            responses = generate(token_ids, sampling, num_samples)
        with timer.phase("reward"):
            asked.step(responses)
        return asked.batch()

    sampled: list[RolloutBatch] = []
    greedy: list[RolloutBatch] = []
    for number, start in enumerate(range(0, len(prompts), size), 1):
        batch = prompts[start : start + size]
        # A response's seed depends only on its place: batch sizes and engines do not change the draws.
        place = seed * 2**32 + start * num if seeded else None
        sampled.append(ask(batch, replace(config.generation.sampling(greedy=False), seed=place), num))
        if config.eval.greedy:
            greedy.append(ask(batch, config.generation.sampling(greedy=True), 1))
        right = _mean([rollout.correct for rollout in _scored(sampled[-1].rollouts)])
        figures = {"prompts": f"{start + len(batch)} of {len(prompts)}"}
        progress.step_done(number, figures if right is None else {**figures, "accuracy": f"{right:.1%}"}, timer.drain())
    whole = RolloutBatch.concatenate(sampled)
    votes = config.eval.metric == "cons@k"
    if votes and all(rollout.answer is None for rollout in whole.rollouts):
        raise ConfigError(
            "eval.metric is cons@k, which counts answers, but no response has one; return Scores with `answer` from "
            "your environment, or set eval.metric to pass@k"
        )
    return Evaluation(whole, RolloutBatch.concatenate(greedy) if greedy else None, votes)


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
    """Write results.json, responses.jsonl and the page.

    Raises:
        ConfigError: The folder cannot be written.
    """
    from nemo_offload_rl.report.evaluation import evaluation_page

    records = list(_records(evaluation))
    table = [
        (metric, [_text(metric, metrics[metric]) for metrics in results.values()])
        for metric in results[next(iter(results))]
    ]
    page = evaluation_page(config.engine.model_name, list(results), table, records, config.resolved)
    with _writing(folder):
        summary = {"model": config.engine.model_name, "results": results, "config": config.resolved}
        (folder / RESULTS_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        # UTF-8 cannot encode a lone surrogate; its escape is valid JSON.
        with (folder / RESPONSES_FILE).open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (folder / PAGE_FILE).write_text(page, encoding="utf-8", errors="backslashreplace")


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """Create `folder`, and turn errors of writing in the block into a `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise ConfigError(
            f"eval.save_path {folder} cannot be written: {error.strerror}; name another folder or set null"
        ) from error


def _records(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    for kind, batch in (("sampled", evaluation.sampled), ("greedy", evaluation.greedy)):
        for place, rollout in enumerate(batch.rollouts if batch is not None else ()):
            assert batch is not None
            yield {
                "prompt_index": place // batch.group_size,
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


def _of(batch: RolloutBatch, name: str | None) -> list[Rollout]:
    return [rollout for rollout in batch.rollouts if name is None or rollout.prompt.data_set == name]


def _scored(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if rollout.unscored is None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _text(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.0f}" if metric == "num_prompts" else f"{value:.1f}" if metric.endswith("tokens") else f"{value:.4f}"
    )
