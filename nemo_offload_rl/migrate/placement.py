"""Keys that say where things lie, how they travel and which kernels compute them, not what is computed."""

from __future__ import annotations

from nemo_offload_rl.migrate.conversion import Conversion
from nemo_offload_rl.migrate.draft import Draft

_SAME_NUMBERS = "the same numbers, with other memory"
_ENGINE_VARIABLES = ("NCCL_", "NRL_REFIT_", "VLLM_USE_RAY_", "VLLM_USE_FLASHINFER_MOE_")


def _host_held(draft: Draft) -> None:
    key, ours = "policy.dtensor_cfg.cpu_offload", "policy.dtensor_cfg.offload_optimizer_states"
    if not draft.get(key):
        draft.keep(key, key, False)
        return
    note = f"optimizer states are on the host outside of their step; parameters stay on devices: {_SAME_NUMBERS}"
    draft.convert(key, key, False, note)
    draft.fill(ours, True, "in place of cpu_offload")


def _splits(draft: Draft) -> None:
    key = "policy.dtensor_cfg.sequence_parallel"
    if draft.get(key) and draft.number("policy.dtensor_cfg.tensor_parallel_size", 1) == 1:
        draft.convert(key, key, False, "layers are not split, so there is nothing to split the sequence between")
    else:
        draft.keep(key, key, bool(draft.get(key)))
    pieces, again = "policy.dtensor_cfg.context_parallel_size", "policy.dtensor_cfg.activation_checkpointing"
    packs = bool(draft.get("policy.sequence_packing.enabled"))
    if packs and draft.get("policy.dtensor_cfg.enabled") and draft.number(pieces, 1) > 1:
        draft.convert(pieces, pieces, 1, f"packed rows are not split over devices: {_SAME_NUMBERS}")
        draft.convert(again, again, True, "in place of rows that are split")
    else:
        draft.keep(pieces, pieces, draft.number(pieces, 1))
    copies = "policy.dtensor_cfg.dp_replicate_size"
    if draft.has(copies):
        draft.ignore(copies, f"parameters are split over all devices here, not over groups of them: {_SAME_NUMBERS}")


def _fused_logprobs(draft: Draft) -> None:
    key, ours = "policy.megatron_cfg.use_fused_linear_logprobs", "policy.logprob_chunk_size"
    if not draft.has(key):
        return
    if draft.get(key) and draft.number(ours) is None:
        size = draft.number("policy.megatron_cfg.fused_linear_logprobs_chunk_size", 256)
        draft.convert(ours, ours, size, "in place of fused logprobs, which never hold all logits either")
    draft.ignore(key, "a kernel that computes the same logprobs")


def _dispatcher(draft: Draft) -> None:
    key = "policy.megatron_cfg.moe_token_dispatcher_type"
    experts = draft.number("policy.megatron_cfg.expert_model_parallel_size", 1)
    given = draft.get(key)
    if given == "flex" or (given == "allgather" and experts > 1):
        draft.convert(key, key, "alltoall", "how tokens reach their experts, not what these compute")
    elif draft.has(key):
        draft.keep(key, key, given)


def _engine_variables(draft: Draft) -> None:
    section = "policy.generation.vllm_cfg.env_vars"
    for name in draft.section(section):
        if name.startswith(_ENGINE_VARIABLES):
            draft.ignore(f"{section}.{name}", "how the engine's processes talk, or which of vLLM's kernels compute")
        else:
            draft.missing(f"{section}.{name}", "environment variables of the engine")
    if draft.has(section) and not draft.get(section):
        draft.ignore(section, "sets none")


_SAMPLING = ("grpo", "distillation")
PLACEMENT: tuple[Conversion, ...] = (
    Conversion(
        ("policy.dtensor_cfg.cpu_offload",),
        "parameters, gradients and optimizer states on the host, which updates them",
        "with one worker all of them on the host, the device updates part by part; their files get "
        "`offload_optimizer_states`: the optimizer's states on the host outside of its step",
        _host_held,
    ),
    Conversion(
        (
            "policy.dtensor_cfg.sequence_parallel",
            "policy.dtensor_cfg.context_parallel_size",
            "policy.dtensor_cfg.dp_replicate_size",
        ),
        "how activations, sequences and parameters are split",
        "the first two are the same; left out, with the same numbers and other memory: `sequence_parallel` without "
        "tensor parallelism, `context_parallel_size` of packed rows, with `activation_checkpointing` in its place, and "
        "`dp_replicate_size`",
        _splits,
    ),
    Conversion(
        ("policy.megatron_cfg.use_fused_linear_logprobs",),
        "a fused kernel, in pieces of `fused_linear_logprobs_chunk_size`",
        "`policy.logprob_chunk_size` of that size",
        _fused_logprobs,
    ),
    Conversion(
        (),
        "`flex` takes DeepEP or HybridEP; `allgather` pads",
        "`alltoall` in their place",
        _dispatcher,
        reads=("policy.megatron_cfg.moe_token_dispatcher_type",),
    ),
    Conversion(
        ("policy.generation.vllm_cfg.env_vars", "policy.generation.vllm_cfg.env_vars.*"),
        "variables of the engine's processes",
        "none; those of transports and kernels are left out, others refused",
        _engine_variables,
        _SAMPLING,
    ),
)
