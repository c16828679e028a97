"""Builds the parts of a run with rollouts, such as GRPO, runs it, and takes it down.

The user's input is checked before Ray starts; `workers.py` starts the processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.algorithms.checkpoints import Checkpoint, CheckpointKeeper, resume_point
from nemo_offload_rl.algorithms.grpo import GrpoTrainer
from nemo_offload_rl.algorithms.identity import run_identity
from nemo_offload_rl.algorithms.rollout_parts import EndpointParts, RolloutParts
from nemo_offload_rl.algorithms.user_code import GrpoCode
from nemo_offload_rl.backends.factory import check_model
from nemo_offload_rl.backends.hf.model_folder import model_vocab_size
from nemo_offload_rl.backends.hf.served_adapters import adapters_of
from nemo_offload_rl.data.datasets import load_prompts
from nemo_offload_rl.data.encoding import TurnEncoder
from nemo_offload_rl.data.given import Rows, with_given_rows
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.data.records import digest_of_lengths
from nemo_offload_rl.data.tokenizer import check_token_ids, load_tokenizer
from nemo_offload_rl.experience.rollouts import Decode, Turns
from nemo_offload_rl.keys.grpo import needs_prev_logprobs
from nemo_offload_rl.keys.master import GrpoConfig, RolloutConfig
from nemo_offload_rl.keys.worker import TeacherSettings
from nemo_offload_rl.runs.checks import begin, check_data_sets, check_profile_steps
from nemo_offload_rl.runs.environments import load_code, open_environments
from nemo_offload_rl.runs.planned import adapters_line, chosen_kv_line, planned_metrics, with_adapters, with_chosen_kv
from nemo_offload_rl.runs.result import RunResult, data_line, result_of, show_beginning
from nemo_offload_rl.runs.workers import GrpoWorkers, grpo_workers, num_engine_devices, prepared_workers
from nemo_offload_rl.utils.flops import read_model_speed
from nemo_offload_rl.utils.garbage import frozen_objects
from nemo_offload_rl.utils.gpu_memory import first_gpu_name
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE, MemorySampler
from nemo_offload_rl.utils.progress import RunProgress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GivenObjects:
    """Objects from Python code that replace parts of the configuration; see `run_grpo`."""

    environments: Mapping[str, Any] | None = None
    train_data: Rows | None = None
    validation_data: Rows | None = None
    callbacks: Sequence[Any] = ()


def run_grpo(
    config: GrpoConfig,
    *,
    environments: Mapping[str, Any] | None = None,
    train_data: Rows | None = None,
    validation_data: Rows | None = None,
    callbacks: Sequence[Any] = (),
) -> RunResult:
    """Run GRPO from a checked configuration.

    Args:
        config: From `load_grpo_config`.
        environments: Replacements of `env.NAME`, by NAME: a reward function `(prompt, response, answer, **row)`, a list
            of them, or an `Environment`, as an object or as its class.
        train_data: Rows with `prompt`, `answer` and any other columns, in place of `data.train` and `data.validation`.
        validation_data: Such rows in place of `data.validation`.
        callbacks: Functions of step and metrics, called after each step, or objects with `write`, as `MetricSink` has.

    Returns:
        The last metrics and where everything is.

    Raises:
        UserError: The user can fix the cause, or a worker died.
        KeyboardInterrupt: Ctrl-C, or a notebook's interrupt; the last finished step is saved first.
    """
    begin(config.cluster, num_more=num_engine_devices(config))
    own = GrpoCode.load(config.grpo, config.loss_fn)
    given = GivenObjects(
        environments=environments, train_data=train_data, validation_data=validation_data, callbacks=callbacks
    )
    keep_reference = config.loss_fn.reference_policy_kl_penalty != 0
    with open_run(config, keep_reference=keep_reference, given=given) as (parts, last_step, resume_from):
        if has_needless_logprobs(config):
            parts.progress.note(
                "each step makes one update, so the probability ratio is 1 but for rounding: "
                "loss_fn.force_on_policy_ratio=true would save the pass for the policy's logprobs"
            )
        if counts_other_probabilities(config):
            parts.progress.note(
                "responses are sampled with 8-bit weights or KV caches, so their probabilities are not the policy's: "
                "loss_fn.use_importance_sampling_correction=true would weigh tokens by the quotient"
            )
        trainer = GrpoTrainer(config.grpo, config.loss_fn, config.policy.generation, parts, own)
        trainer.run(last_step, resume_from)
    return result_of(parts.logger, parts.checkpoints)


def has_needless_logprobs(config: GrpoConfig) -> bool:
    """Tell whether `loss_fn.force_on_policy_ratio` would save a pass of each step and change only rounding."""
    grpo, loss, policy = config.grpo, config.loss_fn, config.policy
    adapters = adapters_of(policy)
    return (
        policy.train_global_batch_size == grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        and not (loss.force_on_policy_ratio or loss.use_cispo or loss.disable_ppo_ratio)
        and loss.target is None
        # Dropout makes the logprobs of the training pass differ.
        and not (policy.dropout or (adapters is not None and adapters.dropout))
        and not needs_prev_logprobs(grpo, replace(loss, force_on_policy_ratio=True))
    )


def counts_other_probabilities(config: GrpoConfig) -> bool:
    """Tell whether the engine computes in 8 bits, and the loss takes its samples as if the policy had drawn them."""
    is_corrected = config.loss_fn.use_importance_sampling_correction or config.loss_fn.target is not None
    return config.policy.generation.vllm_cfg.differs_from_policy and not is_corrected


@contextmanager
def open_run(
    config: RolloutConfig,
    *,
    keep_reference: bool = False,
    teacher: TeacherSettings | None = None,
    given: GivenObjects | None = None,
) -> Iterator[tuple[RolloutParts, int, Checkpoint | None]]:
    """Build the parts of a run with rollouts, and take them down at the end.

    Args:
        config: The run's checked configuration.
        keep_reference: The loss reads logprobs of the initial policy.
        teacher: The loss reads distributions of this model.
        given: Objects that replace parts of the configuration.

    Yields:
        The parts, the number of the last step, and the checkpoint to resume from (None for a new run).

    Raises:
        UserError: The user can fix the cause, or a worker died.
    """
    given = given or GivenObjects()
    code = load_code(config.env, given.environments, has_endpoint=config.engine.endpoint is not None)
    with ExitStack() as stack:
        prepared = stack.enter_context(prepared_workers(config))
        check_model(config.worker)
        config = with_adapters(with_chosen_kv(config))
        name, section = config.algorithm
        tokenizer = load_tokenizer(config.policy.tokenizer)
        data = with_given_rows(config.data, given.train_data, given.validation_data)
        prompts = load_prompts(data, tokenizer, config.policy.tokenizer.chat_template_kwargs)
        rows = (prompt.token_ids for prompt in (*prompts.train, *prompts.validation))
        check_token_ids(tokenizer, rows, model_vocab_size(config.policy.model_name, config.policy.hf_config_overrides))
        by_prefix = {"train": prompts.train, "val": prompts.validation}
        check_data_sets(config, {prefix: {prompt.data_set for prompt in rows} for prefix, rows in by_prefix.items()})
        loader = ShuffledLoader(
            prompts.train,
            batch_size=section.prompts_per_generation_batch,
            shuffle=config.data.shuffle,
            seed=section.seed,
            parts=prompts.parts,
            num_epochs=section.max_num_epochs,
            digest=digest_of_lengths(prompts.train),
            batch_size_key=f"{name}.num_prompts_per_step",
        )
        checkpoints = CheckpointKeeper(config.checkpointing, name, run_identity(config, tokenizer))
        turns = _turns(config, tokenizer)
        pad_id = tokenizer.pad_token_id
        assert isinstance(pad_id, int)
        stack.enter_context(checkpoints.locked())
        resume_from, num_steps = resume_point(checkpoints, loader, section.max_num_steps, name)
        check_profile_steps(config.logger, num_steps)
        environments = stack.enter_context(open_environments(config.env, code, prompts, needs_answers=teacher is None))
        resume_after = None if resume_from is None else resume_from.step
        run_logger = stack.enter_context(RunLogger(config.logger, config.resolved, resume_after, given.callbacks))
        progress = stack.enter_context(RunProgress(num_steps, resume_after or 0))
        train_sets = (prompt.data_set for prompt in prompts.train)
        show_beginning(
            progress,
            config,
            data=data_line(train_sets, len(prompts.validation), "prompts"),
            run_dir=run_logger.run_dir,
            num_steps=num_steps,
            resume_from=resume_from,
        )
        workers = stack.enter_context(grpo_workers(config, keep_reference, teacher, progress.starting, prepared))
        memory_file, period_s = run_logger.run_dir / MEMORY_FILE, config.logger.memory_sample_period_s
        memory = stack.enter_context(MemorySampler(workers.owners(), memory_file, period_s))
        if chosen := chosen_kv_line(config):
            progress.note(chosen)
        if adapters := adapters_line(config):
            progress.note(adapters)
        progress.note(f"residency plan of each policy worker:\n{workers.policy.residency_plan()}")
        parts = RolloutParts(
            policy=workers.policy,
            engine=workers.engine,
            restart_engine=workers.restart_engine,
            environments=environments,
            loader=loader,
            validation_prompts=prompts.validation,
            decode=_decoder(tokenizer),
            turns=turns,
            pad_id=pad_id,
            width_multiple=config.policy.make_sequence_length_divisible_by,
            checkpoints=checkpoints,
            logger=run_logger,
            progress=progress,
            num_samples_to_print=config.logger.num_val_samples_to_print,
            memory=memory,
            speed=read_model_speed(config.policy.model_name, first_gpu_name(), config.cluster.world_size),
            endpoint=_endpoint(config, workers),
            overlong_rows=prompts.overlong,
            pausing=workers.engine if config.engine.async_engine else None,
            keeps_paused=config.engine.kept_kv_bytes is not None,
            planned=planned_metrics(config),
            profile_steps=config.logger.profile_steps,
        )
        stack.enter_context(frozen_objects())
        yield parts, num_steps, resume_from


def _endpoint(config: RolloutConfig, workers: GrpoWorkers) -> EndpointParts | None:
    """Return the endpoint for agents, if any."""
    endpoint = config.engine.endpoint
    if endpoint is None:
        return None
    api_key = endpoint.listening.token or "none"
    return EndpointParts(engine=workers.engine, model=config.engine.model_name, api_key=api_key)


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    return decode


def _turns(config: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> Turns:
    """Build the limits of rollouts; this also checks that the chat template can render messages between turns."""
    encode = TurnEncoder(tokenizer, config.policy.tokenizer.chat_template_kwargs)
    max_turns, max_tokens = config.algorithm[1].max_rollout_turns, config.engine.max_model_len
    messages = [section.retry_message for section in config.env.values() if section.retry_message is not None]
    if max_turns > 1 and any(section.target is not None for section in config.env.values()):
        messages.append("?")  # messages of a user's environment are not known yet
    if messages:
        longest = max(len(encode(message, ())) for message in messages)
        response = config.policy.generation.sampling.max_new_tokens
        needed = config.data.max_input_seq_length + max_turns * response + (max_turns - 1) * longest
        if needed > max_tokens:
            logger.warning(
                "%d turns can take %d tokens, and rollouts end at policy.generation.vllm_cfg.max_model_len=%d: some "
                "will have fewer turns; raise policy.max_total_sequence_length, or lower max_new_tokens",
                max_turns,
                needed,
                max_tokens,
            )
    return Turns(max_turns=max_turns, max_tokens=max_tokens, encode=encode)
