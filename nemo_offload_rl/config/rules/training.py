"""Rules on optimizers, schedules, checkpoints and loggers."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nemo_offload_rl.algorithms.checkpoints import seconds_of
from nemo_offload_rl.algorithms.metric_names import metric_problem, names_of
from nemo_offload_rl.backends.dtensor.torch_optim import NO_OPTIMIZER, optimizer_spec, try_schedule
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import RunConfig, rules_in
from nemo_offload_rl.keys.policy import SchedulerMilestonesConfig
from nemo_offload_rl.keys.run import validates_a_checkpoint
from nemo_offload_rl.keys.worker import scheduler_phases
from nemo_offload_rl.utils.config import nearest_key

OWN_OPTIMIZERS = "nemo_offload_rl.optim"


def optimizer_can_train(cfg: RunConfig) -> str | None:
    """The optimizer exists, takes its arguments, and can update parameters as the DTensor backend shards them."""
    optimizer = cfg.policy.optimizer
    if not cfg.policy.dtensor_cfg.enabled:
        return None
    if optimizer is None:
        return NO_OPTIMIZER
    problem = _call_problem("policy.optimizer", optimizer.name, optimizer.kwargs, Optimizer)
    return problem or _refusal(lambda: optimizer_spec(optimizer, on_gpu=cfg.cluster.gpus_per_node > 0))


def scheduler_phases_can_step(cfg: RunConfig) -> str | None:
    """The schedulers exist, take their arguments, and can make the steps of their phases."""
    optimizer = cfg.policy.optimizer
    phases = scheduler_phases(cfg.policy.scheduler)
    for index, phase in enumerate(phases):
        problem = _call_problem(f"policy.scheduler.{index}", phase.name, phase.kwargs, LRScheduler)
        if problem is not None:
            return problem
    if optimizer is None or optimizer_can_train(cfg) or scheduler_milestones_separate_the_phases(cfg):
        return None  # these rules report it
    name, section = cfg.algorithm
    num_steps, key = section.max_num_steps, f"{name}.max_num_steps"
    return _refusal(lambda: try_schedule(optimizer, phases, num_steps, key))


def _refusal(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except ConfigError as error:
        return str(error)
    return None


def scheduler_milestones_separate_the_phases(cfg: RunConfig) -> str | None:
    """There is one ascending milestone between each two scheduler phases."""
    entries = list(cfg.policy.scheduler or ())
    lists = [list(entry.milestones) for entry in entries if isinstance(entry, SchedulerMilestonesConfig)]
    num_phases = len(entries) - len(lists)
    milestones = lists[0] if lists else []
    if len(lists) > 1 or (lists and not isinstance(entries[-1], SchedulerMilestonesConfig)):
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


def checkpoint_metric_is_measured(cfg: RunConfig) -> str | None:
    """The metric that ranks checkpoints is measured."""
    checkpointing = cfg.checkpointing
    algorithm, section = cfg.algorithm
    name = checkpointing.metric_name
    if not checkpointing.enabled or name is None:
        return None
    if (problem := metric_problem(name, names_of(cfg))) is not None:
        return problem
    if name.startswith("val:") and not section.val_period:
        return (
            f"checkpointing.metric_name is {name}, but {algorithm}.val_period is 0 so nothing is validated; set a "
            "period, a train: metric or null"
        )
    save_period, val_period, num_steps = checkpointing.save_period, section.val_period, section.max_num_steps
    is_ranked = section.val_at_end or validates_a_checkpoint(save_period, val_period, num_steps)
    if name.startswith("val:") and not is_ranked:
        return (
            f"checkpointing.metric_name is {name}, but none of the {num_steps} steps has both a checkpoint "
            f"(save_period={save_period}) and a validation ({algorithm}.val_period={val_period}), so nothing could be "
            f"ranked; make save_period a multiple of val_period, set {algorithm}.val_at_end, "
            "rank by a train: metric or null, or, for a trial, set checkpointing.enabled=false"
        )
    return None


def save_deadline_is_a_time(cfg: RunConfig) -> str | None:
    """The deadline of the last save is a time."""
    text = cfg.checkpointing.checkpoint_must_save_by
    if text is not None and not seconds_of(text):
        return (
            f"checkpointing.checkpoint_must_save_by is {text!r}, which is not a time; write "
            "days:hours:minutes:seconds, such as '00:03:45:00', or null"
        )
    return None


def loggers_have_their_sections(cfg: RunConfig) -> str | None:
    """Weights & Biases, MLflow and Prometheus have their sections."""
    logger = cfg.logger
    sections = (
        ("wandb", logger.wandb_enabled, logger.wandb),
        ("mlflow", logger.mlflow_enabled, logger.mlflow),
        ("prometheus", logger.prometheus_enabled, logger.prometheus),
    )
    for name, enabled, section in sections:
        if enabled and section is None:
            return (
                f"logger.{name}_enabled is true, but there is no section logger.{name}; add it or set {name}_enabled "
                "to false"
            )
    return None


def _call_problem(where: str, dotted: str, kwargs: Mapping[str, Any], base: type) -> str | None:
    """Return why a name is not a subclass of `base` that can be called with a first argument and `kwargs`, or None."""
    module_name, _, class_name = dotted.rpartition(".")
    if not module_name.startswith("torch.optim") and module_name != OWN_OPTIMIZERS:
        return (
            f"{where}.name is {dotted}, but only classes of torch.optim and {OWN_OPTIMIZERS} work; write for instance "
            "torch.optim.AdamW"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return f"{where}.name is {dotted}, but there is no module {module_name}; correct the path"
    classes = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    fitting = [name for name, value in classes.items() if issubclass(value, base) and value is not base]
    if class_name not in fitting:
        near = nearest_key(class_name, fitting)
        hint = f"did you mean {module_name}.{near}?" if near else "correct the name"
        fact = f"is not a kind of {base.__name__}" if class_name in classes else "does not exist"
        return f"{where}.name is {dotted}, which {fact}; {hint}"
    accepted = dict(list(inspect.signature(classes[class_name]).parameters.items())[1:])
    for name in kwargs:
        if name not in accepted:
            near = nearest_key(name, accepted)
            hint = f"did you mean {near}?" if near else f"it takes {', '.join(accepted)}"
            return f"{where}.kwargs.{name} is not an argument of {dotted}; {hint}"
    for name, parameter in accepted.items():
        if parameter.default is parameter.empty and name not in kwargs:
            return f"{where}.kwargs has no {name}, which {dotted} needs; set {where}.kwargs.{name}"
    return None


RULES = rules_in(__name__, RunConfig)
