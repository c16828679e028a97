"""Builds the parts of an SFT or DPO run, runs it, and takes it down.

All input is checked before Ray starts, including the lengths of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_offload_rl.algorithms.checkpoints import CheckpointKeeper, resume_point
from nemo_offload_rl.algorithms.dpo import DpoRecipe
from nemo_offload_rl.algorithms.identity import Identity, run_identity
from nemo_offload_rl.algorithms.losses import DpoLoss, NLLLoss
from nemo_offload_rl.algorithms.reference_logprobs import FILE_NAME, ReferenceFile, fingerprint
from nemo_offload_rl.algorithms.sft import SftRecipe
from nemo_offload_rl.algorithms.supervised import Recipe, SupervisedParts, SupervisedTrainer
from nemo_offload_rl.algorithms.user_code import UserLoss, example_batch
from nemo_offload_rl.backends.factory import check_model
from nemo_offload_rl.backends.hf.model_folder import model_vocab_size
from nemo_offload_rl.data.batch import PreferenceBatch, TrainBatch
from nemo_offload_rl.data.datasets import load_example_pairs, load_examples
from nemo_offload_rl.data.given import Rows, with_given_rows
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.data.records import Part, digest_of_lengths
from nemo_offload_rl.data.tokenizer import check_token_ids, load_tokenizer, padding_id, whole_text
from nemo_offload_rl.keys.master import DpoConfig, SftConfig, SupervisedConfig
from nemo_offload_rl.keys.supervised import SupervisedSectionConfig
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.runs.checks import begin, check_data_sets, check_profile_steps
from nemo_offload_rl.runs.planned import planned_metrics
from nemo_offload_rl.runs.result import RunResult, data_line, result_of, show_beginning
from nemo_offload_rl.utils.garbage import frozen_objects
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE, MemorySampler
from nemo_offload_rl.utils.progress import RunProgress, Starting

type StartPolicy = Callable[[SupervisedConfig, bool], AbstractContextManager[Policy]]
"""Starts a policy from the configuration and `keep_reference`; the policy ends with the context."""


def run_sft(
    config: SftConfig,
    start_policy: StartPolicy | None = None,
    console: Console | None = None,
    *,
    train_data: Rows | None = None,
    validation_data: Rows | None = None,
    callbacks: Sequence[Any] = (),
) -> RunResult:
    """Run SFT from a checked configuration.

    Args:
        config: The run's configuration.
        start_policy: Starts the policy; None starts workers on the Ray cluster that `config.cluster` describes.
        console: Shows progress; None for standard output.
        train_data: Rows with `messages`, or with `prompt` and `completion`, in place of `data.train` and
            `data.validation`.
        validation_data: Such rows in place of `data.validation`.
        callbacks: Functions of step and metrics, called after each step, or objects with `write`, as `MetricSink` has.

    Returns:
        The last metrics and where everything is.

    Raises:
        UserError: The user can fix the cause, or a worker died.
        KeyboardInterrupt: Ctrl-C, or a notebook's interrupt; the last finished step is saved first.
    """
    begin(config.cluster, starts_ray=start_policy is None, console=console)
    own = UserLoss.load(config.loss_fn, NLLLoss(), example_batch(TrainBatch))
    check_model(config.worker)
    tokenizer = load_tokenizer(config.policy.tokenizer)
    kwargs = config.policy.tokenizer.chat_template_kwargs
    data = with_given_rows(config.data, train_data, validation_data)
    examples = load_examples(data, tokenizer, kwargs, last_turn_only=config.sft.only_unmask_final)
    rows = (example.token_ids for example in (*examples.train, *examples.validation))
    check_token_ids(tokenizer, rows, model_vocab_size(config.policy.model_name, config.policy.hf_config_overrides))
    recipe = SftRecipe(
        data=examples,
        decode=whole_text(tokenizer),
        pad_id=padding_id(tokenizer),
        width_multiple=config.policy.make_sequence_length_divisible_by,
        loss=own or NLLLoss(),
    )
    identity, digest = run_identity(config, tokenizer), digest_of_lengths(examples.train)
    names = [example.data_set for example in examples.train]
    run = _Run("sft", config, config.sft, recipe, examples.parts, digest, identity, names)
    return _train(run, start_policy, keep_reference=False, console=console, callbacks=callbacks)


def run_dpo(
    config: DpoConfig,
    start_policy: StartPolicy | None = None,
    console: Console | None = None,
    *,
    train_data: Rows | None = None,
    validation_data: Rows | None = None,
    callbacks: Sequence[Any] = (),
) -> RunResult:
    """Run DPO from a checked configuration; as `run_sft`, but rows have `prompt`, `chosen` and `rejected`."""
    begin(config.cluster, starts_ray=start_policy is None, console=console)
    own = UserLoss.load(config.loss_fn, DpoLoss(config.dpo), example_batch(PreferenceBatch))
    check_model(config.worker)
    tokenizer = load_tokenizer(config.policy.tokenizer)
    data = with_given_rows(config.data, train_data, validation_data)
    pairs = load_example_pairs(data, tokenizer, config.policy.tokenizer.chat_template_kwargs)
    both = (example for pair in (*pairs.train, *pairs.validation) for example in (pair.chosen, pair.rejected))
    rows = (example.token_ids for example in both)
    check_token_ids(tokenizer, rows, model_vocab_size(config.policy.model_name, config.policy.hf_config_overrides))
    saved: ReferenceFile | None = None
    if config.dpo.precompute_reference_logprobs and config.checkpointing.enabled:
        path = Path(config.checkpointing.checkpoint_dir) / FILE_NAME
        saved = ReferenceFile(path, fingerprint(pairs, config.worker))
    recipe = DpoRecipe(
        config.dpo,
        pairs=pairs,
        decode=whole_text(tokenizer),
        pad_id=padding_id(tokenizer),
        width_multiple=config.policy.make_sequence_length_divisible_by,
        saved=saved,
        loss=own,
    )
    identity, digest = run_identity(config, tokenizer), digest_of_lengths(pairs.train)
    names = [pair.data_set for pair in pairs.train]
    run = _Run("dpo", config, config.dpo, recipe, pairs.parts, digest, identity, names)
    return _train(run, start_policy, keep_reference=recipe.needs_reference, console=console, callbacks=callbacks)


@contextmanager
def ray_policy(config: SupervisedConfig, keep_reference: bool, starting: Starting = nullcontext) -> Iterator[Policy]:
    """Start policy workers on the Ray cluster that `config.cluster` describes; `starting` shows what is waited for."""
    # Imported late, since Ray takes seconds to import and bad input should be refused first.
    from nemo_offload_rl.distributed.policy_group import start_policy
    from nemo_offload_rl.distributed.virtual_cluster import cluster_session

    with ExitStack() as stack:
        with starting("Ray"):
            cluster = stack.enter_context(cluster_session(config.cluster, num_colocated_groups=1))
        with starting("policy"):
            policy = start_policy(cluster, config.worker, keep_reference)
            policy.local_pids()  # waits for the workers
        yield policy


@contextmanager
def local_policy(config: SupervisedConfig, keep_reference: bool) -> Iterator[Policy]:
    """Start one worker in this process, without Ray, for tests, debuggers and small models."""
    from nemo_offload_rl.distributed.local import start_local_policy

    device = "cuda:0" if config.cluster.device_type == "cuda" else "cpu"
    policy = start_local_policy(config.worker, keep_reference, device)
    try:
        yield policy
    finally:
        policy.shutdown()


@dataclass(frozen=True)
class _Run:
    """Arguments from `run_sft` and `run_dpo`."""

    name: str
    config: SupervisedConfig
    settings: SupervisedSectionConfig
    recipe: Recipe
    parts: tuple[Part, ...]
    digest: str
    identity: Identity
    data_sets: Sequence[str]


def _train(
    run: _Run,
    start_policy: StartPolicy | None,
    *,
    keep_reference: bool,
    console: Console | None,
    callbacks: Sequence[Any],
) -> RunResult:
    name, config, settings, recipe = run.name, run.config, run.settings, run.recipe
    validation_sets = {item.data_set for item in recipe.data.validation}
    check_data_sets(config, {"train": recipe.data.overlong, "val": validation_sets})
    loader = ShuffledLoader(
        range(len(recipe.data.train)),
        batch_size=config.policy.train_global_batch_size,
        shuffle=config.data.shuffle,
        seed=settings.seed,
        parts=run.parts,
        num_epochs=settings.max_num_epochs,
        digest=run.digest,
        batch_size_key="policy.train_global_batch_size",
    )
    checkpoints = CheckpointKeeper(config.checkpointing, name, run.identity)
    with ExitStack() as stack:
        stack.enter_context(checkpoints.locked())
        resume_from, num_steps = resume_point(checkpoints, loader, settings.max_num_steps, name)
        check_profile_steps(config.logger, num_steps)
        resume_after = None if resume_from is None else resume_from.step
        run_logger = stack.enter_context(RunLogger(config.logger, config.resolved, resume_after, callbacks))
        progress = stack.enter_context(RunProgress(num_steps, resume_after or 0, console))
        show_beginning(
            progress,
            config,
            data=data_line(run.data_sets, len(recipe.data.validation), "pairs" if name == "dpo" else "rows"),
            run_dir=run_logger.run_dir,
            num_steps=num_steps,
            resume_from=resume_from,
        )
        start = partial(ray_policy, starting=progress.starting) if start_policy is None else start_policy
        policy = stack.enter_context(start(config, keep_reference))
        owners = dict.fromkeys(policy.local_pids(), "policy")
        memory_file, period_s = run_logger.run_dir / MEMORY_FILE, config.logger.memory_sample_period_s
        memory = stack.enter_context(MemorySampler(owners, memory_file, period_s))
        progress.note(f"residency plan of each policy worker:\n{policy.residency_plan()}")
        made = SupervisedParts(
            policy=policy,
            recipe=recipe,
            loader=loader,
            checkpoints=checkpoints,
            memory=memory,
            num_samples_to_print=config.logger.num_val_samples_to_print,
            planned=planned_metrics(config),
            profile_steps=config.logger.profile_steps,
        )
        stack.enter_context(frozen_objects())
        SupervisedTrainer(settings, made, run_logger, progress).run(num_steps, resume_from)
    return result_of(run_logger, checkpoints)
