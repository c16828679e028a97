"""Rules between keys, all checked before Ray starts; one named function each."""

from __future__ import annotations

from nemo_offload_rl.backends.dtensor import rules as dtensor
from nemo_offload_rl.backends.megatron import rules as megatron
from nemo_offload_rl.config.rules import (
    algorithm,
    availability,
    cluster,
    distillation,
    memory,
    model,
    phases,
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

_AVAILABILITY: tuple[Rule[RunConfig], ...] = (
    *availability.RULES,
    *megatron.AVAILABILITY,
)
_TRAINING_RULES: tuple[Rule[RunConfig], ...] = (
    *cluster.RULES,
    *model.RULES,
    *training.RULES,
    *dtensor.RULES,
    *megatron.RULES,
    *memory.RULES,
    *phases.RULES,
)

_ROLLOUT_RULES: tuple[Rule[RolloutMasterConfig], ...] = (
    *cluster.ROLLOUT_RULES,
    *rollouts.RULES,
    *model.ROLLOUT_RULES,
)
_ROLLOUT_MEMORY_RULES: tuple[Rule[RolloutMasterConfig], ...] = (*memory.ROLLOUT_RULES, *phases.ROLLOUT_RULES)

GRPO_RULES: RuleSet[GrpoMasterConfig] = RuleSet(
    _AVAILABILITY,
    (*_ROLLOUT_RULES, *algorithm.RULES, *_TRAINING_RULES, *_ROLLOUT_MEMORY_RULES),
)
DISTILLATION_RULES: RuleSet[DistillationMasterConfig] = RuleSet(
    _AVAILABILITY, (*_ROLLOUT_RULES, *distillation.RULES, *_TRAINING_RULES, *_ROLLOUT_MEMORY_RULES)
)
SFT_RULES: RuleSet[SftMasterConfig] = RuleSet(
    _AVAILABILITY, (*_TRAINING_RULES, *supervised.RULES, *supervised.SFT_RULES)
)
DPO_RULES: RuleSet[DpoMasterConfig] = RuleSet(
    _AVAILABILITY, (*_TRAINING_RULES, *supervised.RULES, *supervised.DPO_RULES)
)


def check_rules[Config](cfg: Config, rules: RuleSet[Config]) -> None:
    """Run every rule; those on what is not available hide the others, which would only follow from it.

    Raises:
        ConfigError: One line with up to three broken rules.
    """
    for stage in (rules.availability, rules.rules):
        messages = [message for rule in stage if (message := rule(cfg)) is not None]
        if messages:
            raise ConfigError(join_problems(messages))
