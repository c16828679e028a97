"""Rules between keys, all checked before Ray starts; one named function each."""

from collections.abc import Iterable
from typing import cast

from nemo_offload_rl.backends.dtensor import rules as dtensor
from nemo_offload_rl.backends.megatron import rules as megatron
from nemo_offload_rl.config.rules import (
    algorithm,
    cluster,
    memory,
    model,
    rollouts,
    supervised,
    training,
)
from nemo_offload_rl.config.rules.base import RuleSet
from nemo_offload_rl.config.validate import join_problems
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import (
    DistillationMasterConfig,
    DpoMasterConfig,
    GrpoMasterConfig,
    RolloutMasterConfig,
    Rule,
    RunConfig,
    SftMasterConfig,
)
from nemo_offload_rl.memory.account import Account
from nemo_offload_rl.memory.machine import Machine

_AVAILABILITY: tuple[Rule[RunConfig], ...] = (*cluster.AVAILABILITY, *megatron.AVAILABILITY)
_TRAINING_RULES: tuple[Rule[RunConfig], ...] = (
    *cluster.RULES,
    *model.RULES,
    *training.RULES,
    *dtensor.RULES,
    *megatron.RULES,
)
_ROLLOUT_RULES: tuple[Rule[RolloutMasterConfig], ...] = (
    *cluster.ROLLOUT_RULES,
    *rollouts.RULES,
    *model.ROLLOUT_RULES,
    *memory.ROLLOUT_RULES,
)

GRPO_RULES: RuleSet[GrpoMasterConfig] = RuleSet(
    _AVAILABILITY, (*_ROLLOUT_RULES, *algorithm.RULES, *_TRAINING_RULES), memory.RULES
)
DISTILLATION_RULES: RuleSet[DistillationMasterConfig] = RuleSet(
    _AVAILABILITY, (*_ROLLOUT_RULES, *algorithm.DISTILLATION_RULES, *_TRAINING_RULES), memory.RULES
)
SFT_RULES: RuleSet[SftMasterConfig] = RuleSet(_AVAILABILITY, (*_TRAINING_RULES, *supervised.RULES), memory.RULES)
DPO_RULES: RuleSet[DpoMasterConfig] = RuleSet(
    _AVAILABILITY, (*_TRAINING_RULES, *supervised.RULES, *supervised.DPO_RULES), memory.RULES
)


def check_rules[Config](cfg: Config, rules: RuleSet[Config]) -> None:
    """Check every rule; if a backend or device is missing, only that is told, since other rules break because of it.

    Raises:
        ConfigError: One line with up to three broken rules.
    """
    if messages := broken(rules.availability, cfg):
        raise ConfigError(join_problems(messages))
    messages = broken(rules.rules, cfg)
    if rules.memory:
        run = cast("RunConfig", cfg)
        messages += broken(rules.memory, Account(run, Machine.here(run.cluster)))
    if messages:
        raise ConfigError(join_problems(messages))


def broken[Checked](rules: Iterable[Rule[Checked]], checked: Checked) -> list[str]:
    """List the messages of broken rules, in the order of the rules."""
    return [message for rule in rules if (message := rule(checked)) is not None]
