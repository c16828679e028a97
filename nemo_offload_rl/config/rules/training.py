"""Optimizers, schedules, offload keys, checkpoints and loggers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.rules.base import Rule
from nemo_offload_rl.config.schema import GrpoMasterConfig
from nemo_offload_rl.policy.megatron_config import MegatronOptimizerConfig
from nemo_offload_rl.utils.config import nearest_key


def optimizer_can_be_built(cfg: GrpoMasterConfig) -> str | None:
    """The optimizer exists and takes its arguments."""
    optimizer = cfg["policy"]["optimizer"]
    if not cfg["policy"]["dtensor_cfg"]["enabled"]:
        return None
    if optimizer is None:
        return "policy.optimizer is null, but the DTensor backend has no other; set policy.optimizer.name and kwargs"
    return _call_problem("policy.optimizer", optimizer["name"], optimizer["kwargs"])


def scheduler_phases_can_be_built(cfg: GrpoMasterConfig) -> str | None:
    """The schedulers exist and take their arguments."""
    for index, entry in enumerate(cfg["policy"]["scheduler"] or []):
        if "name" not in entry:
            continue
        if (problem := _call_problem(f"policy.scheduler.{index}", entry["name"], entry["kwargs"])) is not None:
            return problem
    return None


def scheduler_milestones_separate_the_phases(cfg: GrpoMasterConfig) -> str | None:
    """There is one ascending milestone between each two scheduler phases."""
    entries = cfg["policy"]["scheduler"] or []
    num_phases = sum("name" in entry for entry in entries)
    lists = [entry["milestones"] for entry in entries if "milestones" in entry]
    milestones = lists[0] if lists else []
    if len(lists) > 1 or (lists and "milestones" not in entries[-1]):
        return "policy.scheduler has milestones before its end; write the phases first and one `milestones` entry last"
    if entries and len(milestones) != num_phases - 1:
        return (
            f"policy.scheduler has {num_phases} phases and {len(milestones)} milestones, but each phase after the "
            "first begins at one; change either"
        )
    if any(b <= a for a, b in zip([0, *milestones], milestones, strict=False)):
        return (
            f"policy.scheduler milestones are {milestones}, but phases follow each other; write ascending steps above 0"
        )
    return None


def megatron_optimizer_lives_in_one_place(cfg: GrpoMasterConfig) -> str | None:
    """Megatron's optimizer is offloaded in one way."""
    optimizer = _megatron_optimizer(cfg)
    if optimizer is not None and optimizer["optimizer_cpu_offload"] and optimizer["offload_optimizer_states"]:
        return (
            "policy.megatron_cfg.optimizer.optimizer_cpu_offload and offload_optimizer_states are both true, but the "
            "first updates on the CPU and the second on the GPU; set one of them to false"
        )
    return None


def megatron_offload_fraction_is_positive(cfg: GrpoMasterConfig) -> str | None:
    """The share of Megatron's optimizer on the host is above 0."""
    optimizer = _megatron_optimizer(cfg)
    if optimizer is not None and optimizer["optimizer_cpu_offload"] and optimizer["optimizer_offload_fraction"] == 0:
        return (
            "policy.megatron_cfg.optimizer.optimizer_offload_fraction is 0, but optimizer_cpu_offload is true and "
            "would move nothing; set a share above 0, at most 1"
        )
    return None


def megatron_overlap_needs_cpu_offload(cfg: GrpoMasterConfig) -> str | None:
    """Overlapping copies need Megatron's CPU optimizer."""
    optimizer = _megatron_optimizer(cfg)
    if optimizer is None or optimizer["optimizer_cpu_offload"]:
        return None
    if optimizer["overlap_cpu_optimizer_d2h_h2d"]:
        return (
            "policy.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d is true, but it hides the copies of "
            "optimizer_cpu_offload, which is false; set that to true or this to false"
        )
    return None


def megatron_cpu_offload_needs_the_distributed_optimizer(cfg: GrpoMasterConfig) -> str | None:
    """Megatron's CPU optimizer is a distributed optimizer."""
    optimizer = _megatron_optimizer(cfg)
    if optimizer is not None and optimizer["optimizer_cpu_offload"] and not optimizer["use_distributed_optimizer"]:
        return (
            "policy.megatron_cfg.optimizer.optimizer_cpu_offload is true, but Megatron moves only a distributed "
            "optimizer; set use_distributed_optimizer to true"
        )
    return None


def activation_offloading_names_its_modules(cfg: GrpoMasterConfig) -> str | None:
    """Activation offloading names modules that can be moved."""
    if "megatron_cfg" not in cfg["policy"]:
        return None
    megatron = cfg["policy"]["megatron_cfg"]
    modules = megatron["offload_modules"] or []
    if megatron["fine_grained_activation_offloading"] and not modules:
        return (
            "policy.megatron_cfg.fine_grained_activation_offloading is true, but offload_modules names nothing to "
            "move; set it, for instance to [core_attn,attn_proj]"
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        return (
            "policy.megatron_cfg.offload_modules has attn_proj without core_attn, but the input of the first is the "
            "output of the second; add core_attn"
        )
    if (
        megatron["recompute_modules"]
        and "moe" in megatron["recompute_modules"]
        and {"expert_fc1", "moe_act"} & {*modules}
    ):
        return (
            "policy.megatron_cfg.offload_modules has modules inside the experts, but recompute_modules has moe, which "
            "throws their activations away; remove one of them"
        )
    return None


def megatron_sequence_parallel_needs_tensor_parallel(cfg: GrpoMasterConfig) -> str | None:
    """Megatron's sequence parallelism needs tensor parallelism."""
    if "megatron_cfg" not in cfg["policy"]:
        return None
    megatron = cfg["policy"]["megatron_cfg"]
    if megatron["sequence_parallel"] and megatron["tensor_model_parallel_size"] == 1:
        return (
            "policy.megatron_cfg.sequence_parallel is true, but it splits along the tensor-parallel devices and "
            "tensor_model_parallel_size is 1; set one of them otherwise"
        )
    return None


def checkpoint_metric_is_measured(cfg: GrpoMasterConfig) -> str | None:
    """The metric that ranks checkpoints is measured."""
    checkpointing, grpo = cfg["checkpointing"], cfg["grpo"]
    name = checkpointing["metric_name"]
    if not checkpointing["enabled"] or name is None:
        return None
    if not name.startswith(("train:", "val:")):
        return f"checkpointing.metric_name is {name}, which is no metric; write train:NAME or val:NAME, or null"
    if name.startswith("val:") and not grpo["val_period"]:
        return (
            f"checkpointing.metric_name is {name}, but grpo.val_period is 0 and nothing is validated; set a period, "
            "or a train: metric, or null"
        )
    return None


def wandb_has_its_section(cfg: GrpoMasterConfig) -> str | None:
    """Weights & Biases has its section."""
    if cfg["logger"]["wandb_enabled"] and "wandb" not in cfg["logger"]:
        return (
            "logger.wandb_enabled is true, but the section logger.wandb is gone; keep it or set wandb_enabled to false"
        )
    return None


def _megatron_optimizer(cfg: GrpoMasterConfig) -> MegatronOptimizerConfig | None:
    return cfg["policy"]["megatron_cfg"]["optimizer"] if "megatron_cfg" in cfg["policy"] else None


def _call_problem(where: str, dotted: str, kwargs: Mapping[str, Any]) -> str | None:
    """Why the torch class cannot be called with its first argument and `kwargs`."""
    module_name, _, class_name = dotted.rpartition(".")
    if not module_name.startswith("torch.optim"):
        return f"{where}.name is {dotted}, but only classes of torch.optim work; write for instance torch.optim.AdamW"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return f"{where}.name is {dotted}, but there is no module {module_name}; correct the path"
    classes = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    if class_name not in classes:
        near = nearest_key(class_name, classes)
        hint = f"did you mean {module_name}.{near}?" if near else "correct the name"
        return f"{where}.name is {dotted}, which does not exist; {hint}"
    accepted = dict(list(inspect.signature(classes[class_name]).parameters.items())[1:])
    for name in kwargs:
        if name not in accepted:
            near = nearest_key(name, accepted)
            hint = f"did you mean {near}?" if near else f"it takes {', '.join(accepted)}"
            return f"{where}.kwargs.{name} is no argument of {dotted}; {hint}"
    for name, parameter in accepted.items():
        if parameter.default is parameter.empty and name not in kwargs:
            return f"{where}.kwargs has no {name}, which {dotted} needs; set {where}.kwargs.{name}"
    return None


RULES: tuple[Rule, ...] = (
    optimizer_can_be_built,
    scheduler_phases_can_be_built,
    scheduler_milestones_separate_the_phases,
    megatron_optimizer_lives_in_one_place,
    megatron_offload_fraction_is_positive,
    megatron_overlap_needs_cpu_offload,
    megatron_cpu_offload_needs_the_distributed_optimizer,
    activation_offloading_names_its_modules,
    megatron_sequence_parallel_needs_tensor_parallel,
    checkpoint_metric_is_measured,
    wandb_has_its_section,
)
