"""Runs on-policy distillation; `rollouts.py` builds the parts of every run with rollouts."""

from __future__ import annotations

import logging

from nemo_offload_rl.algorithms.distillation import DistillationTrainer
from nemo_offload_rl.backends.factory import check_model
from nemo_offload_rl.backends.hf.model_folder import read_model_config
from nemo_offload_rl.data.given import Rows
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.errors import ConfigError, first_line
from nemo_offload_rl.keys.master import DistillationConfig
from nemo_offload_rl.runs.checks import begin
from nemo_offload_rl.runs.result import RunResult, result_of
from nemo_offload_rl.runs.rollouts import GivenObjects, open_run
from nemo_offload_rl.runs.workers import num_engine_devices
from nemo_offload_rl.utils.hub import looking_up

logger = logging.getLogger(__name__)


def run_distillation(
    config: DistillationConfig, *, train_data: Rows | None = None, validation_data: Rows | None = None
) -> RunResult:
    """Run on-policy distillation from a checked configuration; result and interrupts as of `run_grpo`.

    Args:
        config: From `load_distillation_config`.
        train_data: Rows with `prompt` (and `answer`, for the accuracy), in place of `data.train` and `data.validation`.
        validation_data: Such rows in place of `data.validation`.

    Raises:
        UserError: The user can fix the cause, or a worker died.
    """
    begin(config.cluster, num_more=num_engine_devices(config))
    check_model(config.teacher_worker.model)
    check_vocabularies(config)

    given = GivenObjects(train_data=train_data, validation_data=validation_data)
    with open_run(config, teacher=config.teacher_worker, given=given) as (parts, last_step, resume_from):
        trainer = DistillationTrainer(config.distillation, config.loss_fn, config.policy.generation, parts)
        trainer.run(last_step, resume_from)
    return result_of(parts.logger, parts.checkpoints)


def check_vocabularies(config: DistillationConfig) -> None:
    """Check that student and teacher have the same vocabulary with the same token ids.

    Raises:
        ConfigError: They differ, or the top-k is larger than the vocabulary.
    """
    names = (config.policy.model_name, config.teacher.model_name)
    overrides = (config.policy.hf_config_overrides, config.teacher.hf_config_overrides)
    sizes = [
        {**read_model_config(name), **changes}.get("vocab_size") for name, changes in zip(names, overrides, strict=True)
    ]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"teacher.model_name {names[1]} has a vocab_size of {sizes[1]} in its config.json and policy.model_name "
            f"{names[0]} one of {sizes[0]}, but token by token their distributions are over the same vocabulary; "
            "choose two models of one family"
        )
    topk = config.distillation.topk_logits_k
    if topk is not None and isinstance(sizes[0], int) and topk > sizes[0]:
        raise ConfigError(
            f"distillation.topk_logits_k is {topk}, but the vocabulary has {sizes[0]} tokens; lower it, or set it to "
            "null for all of them"
        )
    from transformers import AutoTokenizer  # heavy

    mine = load_tokenizer(config.policy.tokenizer).get_vocab()
    try:
        with looking_up(names[1]):
            its = AutoTokenizer.from_pretrained(names[1]).get_vocab()
    except (OSError, ValueError) as error:
        cause = first_line(error)
        logger.warning("the tokenizer of teacher.model_name %s is not compared with the student's: %s", names[1], cause)
        return
    if mine != its:
        differing = sorted(mine.items() ^ its.items(), key=lambda item: item[1])
        raise ConfigError(
            f"the tokenizers of teacher.model_name {names[1]} and policy.tokenizer number tokens differently "
            f"({len(differing)} entries, {differing[0][0]!r} among them), so the teacher would read other words than "
            "the student wrote; choose two models of one family"
        )
