"""Estimates what each kind of pass of a policy worker needs of a GPU, from its settings and its model's config.json."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_offload_rl.backends.hf.model_folder import local_config
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.memory import megatron_activations
from nemo_offload_rl.residency import PassKind, PassNeed, Phase

PASSES: Mapping[Phase, PassKind] = {
    Phase.TRAINING: PassKind.TRAINING,
    Phase.LP_INFERENCE: PassKind.LOGPROBS,
    Phase.TEACHER_INFERENCE: PassKind.TEACHER,
}
"""Kind of the passes in a phase, in other phases there are none; the reference's are like those for logprobs."""


def pass_needs(
    settings: PolicySettings, num_workers: int, grads_bytes: int, teacher: PolicySettings | None = None
) -> Mapping[PassKind, PassNeed]:
    """Return the need of each kind of pass that is known; none if the model's files are not here.

    Args:
        settings: The policy's settings.
        num_workers: Number of policy workers.
        grads_bytes: Gradients of one worker, which count as state.
        teacher: The teacher's settings, in the form of a policy's; None without a teacher.
    """
    reading = _reading_need(settings, num_workers)
    kinds = PassKind.LOGPROBS, PassKind.REFERENCE, PassKind.EVALUATION
    found: dict[PassKind, PassNeed | None] = dict.fromkeys(kinds, reading)
    if reading is not None:
        found[PassKind.TRAINING] = _training_need(settings, num_workers, grads_bytes)
    if teacher is not None:
        found[PassKind.TEACHER] = _reading_need(teacher, num_workers, is_teacher=True)
    return {kind: need for kind, need in found.items() if need is not None}


def most_tokens(kind: PassKind, settings: PolicySettings, teacher: PolicySettings | None = None) -> int:
    """Return the tokens of the largest micro-batch in passes of a kind; settings as for `pass_needs`."""
    if kind in (PassKind.TRAINING, PassKind.EVALUATION):
        return settings.most_train_tokens
    if kind is PassKind.TEACHER and teacher is not None:
        return teacher.most_logprob_tokens
    return settings.most_logprob_tokens


def _reading_need(settings: PolicySettings, num_workers: int, *, is_teacher: bool = False) -> PassNeed | None:
    if local_config(settings.model_name, settings.hf_config_overrides) is None:
        return None
    if not settings.dtensor_cfg.enabled:
        return megatron_activations.reading_need(settings)
    from nemo_offload_rl.memory import activations  # imports transformers, which takes seconds

    return activations.reading_need(settings, num_workers, is_teacher=is_teacher)


def _training_need(settings: PolicySettings, num_workers: int, grads_bytes: int) -> PassNeed | None:
    if not settings.dtensor_cfg.enabled:
        return megatron_activations.training_need(settings)
    from nemo_offload_rl.memory import activations  # see `_reading_need`

    return activations.training_need(settings, num_workers, grads_bytes)
