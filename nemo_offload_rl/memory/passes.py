"""Estimates what each kind of pass of a policy worker needs of a GPU, and names keys that lower it."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_offload_rl.backends.hf.model_folder import local_config
from nemo_offload_rl.keys.dtensor import DTensorConfig
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


def advice(settings: PolicySettings, kind: PassKind, *, is_divisible: bool = True) -> str:
    """Name keys that lower what passes of a kind need of a GPU.

    Args:
        settings: The policy's settings.
        kind: Kind of the passes.
        is_divisible: Micro-batches may be smaller.
    """
    backend, changes = settings.backend, list[str]()
    with_loss = kind in (PassKind.TRAINING, PassKind.EVALUATION)
    if is_divisible:
        by_rows = "policy.train_micro_batch_size" if with_loss else "policy.logprob_batch_size"
        if kind is PassKind.TEACHER:
            by_rows = "teacher.logprob_batch_size"
        for section in ("sequence_packing", "dynamic_batching"):
            if getattr(settings, section).enabled:
                by_rows = f"policy.{section}.{'train_mb_tokens' if with_loss else 'logprob_mb_tokens'}"
        changes.append(f"lower {by_rows}")
    if kind is PassKind.TRAINING and not backend.activation_checkpointing:
        changes.append(f"set policy.{backend.section}.activation_checkpointing=true")
    elif (
        kind is PassKind.TRAINING
        and not is_divisible
        and isinstance(backend, DTensorConfig)
        and not backend.activation_offload
        and backend.model_parallel.ranks_per_copy == 1
    ):
        changes.append(f"set {backend.activation_key}=true")
    if settings.logprob_chunk_size is None:
        changes.append("set policy.logprob_chunk_size=1024")
    if kind is PassKind.TRAINING:
        changes += streaming_advice(settings)
    changes.append("lower policy.max_total_sequence_length")
    if not is_divisible and not backend.streams_parameters:  # these are for one worker only
        changes.append("use more GPUs")
    return ", or ".join(changes)


def streaming_advice(settings: PolicySettings) -> list[str]:
    """Return the change that keeps optimizer states on the host, if they are not there already."""
    backend = settings.backend
    if backend.streamed_share > 0 or backend.keeps_optimizer_on_host:
        return []
    return [f"set {backend.streaming_section}.offload_optimizer_states=true"]


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
