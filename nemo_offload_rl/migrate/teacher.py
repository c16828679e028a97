"""The section `teacher` of distillation: a whole policy there, of which the model and how it is read count."""

from __future__ import annotations

from nemo_offload_rl.migrate.conversion import Conversion
from nemo_offload_rl.migrate.draft import Draft, leaves

_TAKEN = ("model_name", "hf_config_overrides", "precision", "logprob_batch_size", "logprob_chunk_size")
_SAMPLING = ("temperature", "top_p", "top_k")
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def _teacher(draft: Draft) -> None:
    for name in _TAKEN:
        key = f"teacher.{name}"
        draft.keep(key, key, draft.get(key, draft.get(f"policy.{name}", {} if name == "hf_config_overrides" else None)))
    _read_as_the_policy(draft)
    on_dtensor = bool(draft.get("teacher.dtensor_cfg.enabled", draft.get("policy.dtensor_cfg.enabled")))
    if on_dtensor != bool(draft.get("policy.dtensor_cfg.enabled")):
        draft.missing("teacher.dtensor_cfg.enabled", "a teacher on another backend than the policy's")
    size = "teacher.dtensor_cfg.tensor_parallel_size"
    if on_dtensor:
        draft.keep(size, size, draft.get(size, draft.get("policy.dtensor_cfg.tensor_parallel_size", 1)))
    else:
        draft.fill(size, 1, "the backend is Megatron")
    for path, _ in leaves(draft.section("teacher"), "teacher"):
        if path in draft.done:
            continue
        if path.removeprefix("teacher.megatron_cfg.") in _SIZES and not on_dtensor:
            draft.ignore(path, "it lies on devices as the policy does: the same numbers, with other memory")
        else:
            draft.ignore(path, "a teacher is read only, in batches and by the backend of the policy")


def _read_as_the_policy(draft: Draft) -> None:
    """Its logits are divided by the policy's temperature here."""
    for name in _SAMPLING:
        key, own = f"teacher.generation.{name}", draft.get(f"policy.generation.{name}")
        if name == "temperature" and draft.get(key, own) != own:
            draft.missing(key, "a teacher with a temperature of its own")


TEACHER = Conversion(
    ("teacher", "teacher.*"),
    "a policy of its own",
    "model, precision, batches and tensor parallelism; all else as in `policy`",
    _teacher,
    ("distillation",),
)
