"""Rules of the DTensor backend, all checked before Ray starts."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from nemo_offload_rl.backends.alternatives import advice
from nemo_offload_rl.backends.dtensor.supported import (
    DROPS_AT_RANDOM,
    context_problem,
    declared_plan,
    experts_problem,
    sequence_problem,
    sizes_problem,
    split_problem,
    unsupported,
)
from nemo_offload_rl.backends.hf.model_folder import local_model_config
from nemo_offload_rl.keys.dtensor import DTensorConfig
from nemo_offload_rl.keys.master import Rule, RunConfig, rules_in
from nemo_offload_rl.keys.policy import TrainedPolicyConfig
from nemo_offload_rl.models.families import DTENSOR, dropout_rates, has_shared_keys


def inputs_of_recomputed_layers_are_offloaded(policy: TrainedPolicyConfig) -> str | None:
    """DTensor's `activation_offload` needs `activation_checkpointing`, and excludes tensor and context parallelism."""
    dtensor, key = policy.dtensor_cfg, "policy.dtensor_cfg.activation_offload"
    if not dtensor.activation_offload:
        return None
    if name := _split_by(dtensor):
        return (
            f"{key} is true and {name} is {getattr(dtensor, name)}, but activations of split layers are not offloaded; "
            f"set activation_offload to false, or {name} to 1"
        )
    if not dtensor.activation_checkpointing:
        return (
            f"{key} is true and activation_checkpointing is false, but only the inputs of recomputed layers are "
            "offloaded, since all else is recomputed faster than it is copied; set activation_checkpointing to true"
        )
    if dtensor.activation_offload_fraction != 1.0:
        return (
            f"{key}_fraction is {dtensor.activation_offload_fraction}, but the inputs of all layers are offloaded as "
            "far as they fit; set it to 1.0, and limit their host memory by activation_offload_host_limit_gib"
        )
    return None


def _split_by(dtensor: DTensorConfig) -> str | None:
    """Return the first key that splits layers or their rows over devices; None if none does."""
    names = ("tensor_parallel_size", "context_parallel_size")
    return next((name for name in names if getattr(dtensor, name) > 1), None)


def compiled_layers_are_whole(policy: TrainedPolicyConfig) -> str | None:
    """DTensor's `torch_compile` excludes tensor and context parallelism."""
    if policy.dtensor_cfg.torch_compile and (name := _split_by(policy.dtensor_cfg)):
        return (
            f"policy.dtensor_cfg.torch_compile is true, but layers that {name} splits cannot be compiled; set "
            f"torch_compile to false, or {name} to 1"
        )
    return None


def shared_rows_are_not_packed(policy: TrainedPolicyConfig) -> str | None:
    """DTensor's context parallelism excludes packed rows; `policy.dynamic_batching` works with it."""
    if policy.dtensor_cfg.context_parallel_size != 1 and policy.sequence_packing.enabled:
        return (
            f"policy.dtensor_cfg.context_parallel_size is {policy.dtensor_cfg.context_parallel_size} and "
            "policy.sequence_packing.enabled is true, but rows that devices share are not packed; use "
            "policy.dynamic_batching instead"
        )
    return None


def shared_rows_exclude_divided_experts(policy: TrainedPolicyConfig) -> str | None:
    """DTensor's context parallelism excludes expert parallelism."""
    dtensor = policy.dtensor_cfg
    if dtensor.context_parallel_size != 1 and dtensor.expert_parallel_size != 1:
        return (
            f"policy.dtensor_cfg.context_parallel_size is {dtensor.context_parallel_size} and expert_parallel_size is "
            f"{dtensor.expert_parallel_size}, but they do not work together; set one of them to 1"
        )
    return None


def sequence_parallel_needs_tensor_parallel(policy: TrainedPolicyConfig) -> str | None:
    """DTensor's `sequence_parallel` needs tensor parallelism."""
    if policy.dtensor_cfg.sequence_parallel and policy.dtensor_cfg.tensor_parallel_size == 1:
        return (
            "policy.dtensor_cfg.sequence_parallel is true, but it splits rows among tensor-parallel devices and "
            "tensor_parallel_size is 1; set sequence_parallel to false, or the size above 1"
        )
    return None


def adapters_need_whole_layers(policy: TrainedPolicyConfig) -> str | None:
    """DTensor's low-rank adapters exclude tensor parallelism."""
    dtensor = policy.dtensor_cfg
    if dtensor.lora_cfg.enabled and dtensor.tensor_parallel_size != 1:
        return (
            f"policy.dtensor_cfg.lora_cfg.enabled is true and tensor_parallel_size is "
            f"{dtensor.tensor_parallel_size}, but layers that are split over devices get no adapters; "
            "set tensor_parallel_size to 1"
        )
    return None


def adapters_have_their_layers(policy: TrainedPolicyConfig) -> str | None:
    """DTensor's low-rank adapters have `target_modules` or `match_all_linear`, not both."""
    lora = policy.dtensor_cfg.lora_cfg
    if lora.enabled and not lora.match_all_linear and not lora.target_modules:
        return (
            "policy.dtensor_cfg.lora_cfg.target_modules is empty and match_all_linear is false, so no layer would be "
            "trained; name layers, for instance [q_proj,v_proj], or set match_all_linear to true"
        )
    if lora.enabled and lora.match_all_linear and lora.target_modules:
        return (
            f"policy.dtensor_cfg.lora_cfg.target_modules is [{', '.join(lora.target_modules)}] and match_all_linear is "
            "true, which adapts every layer; set match_all_linear to false, or target_modules to []"
        )
    return None


def host_held_training_recomputes_layers(policy: TrainedPolicyConfig) -> str | None:
    """`cpu_offload` needs `activation_checkpointing`."""
    if policy.dtensor_cfg.cpu_offload and not policy.dtensor_cfg.activation_checkpointing:
        return (
            "policy.dtensor_cfg.cpu_offload is true and activation_checkpointing is false, but a layer that comes "
            "back for its backward pass is computed again; set activation_checkpointing to true"
        )
    return None


def host_held_training_is_of_all_weights(policy: TrainedPolicyConfig) -> str | None:
    """`cpu_offload` excludes low-rank adapters."""
    if policy.dtensor_cfg.cpu_offload and policy.dtensor_cfg.lora_cfg.enabled:
        return (
            "policy.dtensor_cfg.cpu_offload and lora_cfg.enabled are both true, but a frozen model with adapters "
            "cannot pass through the device part by part; set one of them to false"
        )
    return None


def host_held_training_excludes_offload_keys(policy: TrainedPolicyConfig) -> str | None:
    """`cpu_offload` excludes the keys that offload only the optimizer."""
    others = {
        "policy.offload_optimizer_states_for_logprob": policy.offload_optimizer_states_for_logprob,
        "policy.dtensor_cfg.offload_optimizer_states": policy.dtensor_cfg.offload_optimizer_states,
    }
    for key, is_set in others.items():
        if policy.dtensor_cfg.cpu_offload and is_set:
            return (
                f"policy.dtensor_cfg.cpu_offload and {key} are both true, but cpu_offload already keeps the "
                "optimizer on the host outside of its step; set one of them to false"
            )
    return None


def parallel_sizes_divide_the_world(cfg: RunConfig) -> str | None:
    """DTensor's tensor size times its context size divides the workers; its expert size, the data-parallel workers."""
    dtensor = cfg.policy.dtensor_cfg
    return sizes_problem(dtensor, cfg.cluster.world_size) if dtensor.enabled else None


def _trained_model(cfg: RunConfig) -> Mapping[str, Any] | None:
    """Return the model's config.json; None if it is not known, or this backend does not train the model."""
    model = local_model_config(cfg) if cfg.policy.dtensor_cfg.enabled else None
    return None if model is None or unsupported(model) else model


def rows_of_the_model_can_be_shared(cfg: RunConfig) -> str | None:
    """DTensor's context parallelism excludes attention with soft-caps or sinks, and changing rotary frequencies."""
    model, size = _trained_model(cfg), cfg.policy.dtensor_cfg.context_parallel_size
    return None if model is None else context_problem(model, size, cfg.policy.max_total_sequence_length)


def sequence_parallelism_splits_the_model(cfg: RunConfig) -> str | None:
    """DTensor's `sequence_parallel` needs a model whose attention and MLPs each end with one row-wise split."""
    model = _trained_model(cfg) if cfg.policy.dtensor_cfg.sequence_parallel else None
    return None if model is None else sequence_problem(model, declared_plan(model["model_type"]))


def host_held_training_has_one_worker(cfg: RunConfig) -> str | None:
    """`cpu_offload` needs a run with one policy worker."""
    return one_worker_problem(cfg.policy, cfg.cluster.world_size) if cfg.policy.dtensor_cfg.enabled else None


def one_worker_problem(policy: TrainedPolicyConfig, num_workers: int) -> str | None:
    """Return why `num_workers` cannot keep their state on the host, and what to do; None if they can."""
    if policy.dtensor_cfg.cpu_offload and num_workers > 1:
        return (
            f"policy.dtensor_cfg.cpu_offload is true, but there are {num_workers} policy workers and it works with "
            "one; set it to false, since several devices share the state anyway, or use one device"
        )
    return None


def host_held_training_draws_nothing(cfg: RunConfig) -> str | None:
    """`cpu_offload` excludes dropout."""
    model = _trained_model(cfg) if cfg.policy.dtensor_cfg.cpu_offload and cfg.policy.dropout else None
    return DROPS_AT_RANDOM if model is not None and dropout_rates(model) else None


def host_held_layers_pass_on_hidden_states(cfg: RunConfig) -> str | None:
    """`cpu_offload` excludes models whose layers share keys and values (Gemma 4 E2B and E4B)."""
    model = _trained_model(cfg) if cfg.policy.dtensor_cfg.cpu_offload else None
    if model is None or not has_shared_keys(model):
        return None
    return (
        "policy.dtensor_cfg.cpu_offload is true, so layers pass through the device one by one, but some layers of the "
        "model need keys and values of earlier layers; set it to false"
    )


def dtensor_trains_the_model(cfg: RunConfig) -> str | None:
    """The DTensor backend trains the families of [Models](../models.md), unless their weights are quantized."""
    model = local_model_config(cfg)
    if not cfg.policy.dtensor_cfg.enabled or model is None or (reason := unsupported(model)) is None:
        return None
    return (
        f"policy.dtensor_cfg.enabled is true, but config.json of {cfg.policy.model_name} has {reason}; "
        f"{advice(model, DTENSOR, has_gpus=cfg.cluster.gpus_per_node > 0)}"
    )


def tensor_parallelism_splits_the_model(cfg: RunConfig) -> str | None:
    """DTensor's tensor-parallel size divides the model's heads, MLP channels and vocabulary."""
    size = cfg.policy.dtensor_cfg.tensor_parallel_size
    model = _trained_model(cfg) if size > 1 else None
    return None if model is None else split_problem(model, declared_plan(model["model_type"]), size)


def experts_divide_over_devices(cfg: RunConfig) -> str | None:
    """DTensor's expert parallelism needs a number of experts that it divides, and excludes tensor parallelism."""
    model, dtensor = _trained_model(cfg), cfg.policy.dtensor_cfg
    if model is None:
        return None
    return experts_problem(model, dtensor.tensor_parallel_size, dtensor.expert_parallel_size)


POLICY_RULES = rules_in(__name__, TrainedPolicyConfig)
"""Rules between keys of `policy`; the backend checks them again, for settings that no rule has seen."""


def _of_run(rule: Callable[[TrainedPolicyConfig], str | None]) -> Rule[RunConfig]:
    @wraps(rule)
    def of_run(cfg: RunConfig) -> str | None:
        return rule(cfg.policy) if cfg.policy.dtensor_cfg.enabled else None

    return of_run


RULES = (*map(_of_run, POLICY_RULES), *rules_in(__name__, RunConfig))
