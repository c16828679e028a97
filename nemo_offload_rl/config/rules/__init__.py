"""Rules between keys, all checked before Ray starts; one named function each."""

from __future__ import annotations

from nemo_offload_rl.config.rules import (
    activations,
    adapters,
    algorithm,
    availability,
    cluster,
    megatron,
    megatron_optimizer,
    memory,
    model,
    rollouts,
    supervised,
    training,
)
from nemo_offload_rl.config.rules.base import Rule, RuleSet
from nemo_offload_rl.config.schema import DpoMasterConfig, GrpoMasterConfig, RunConfig, SftMasterConfig
from nemo_offload_rl.config.validate import join_problems
from nemo_offload_rl.errors import ConfigError

_TRAINING_RULES: tuple[Rule[RunConfig], ...] = (
    *cluster.RULES,
    *model.RULES,
    *training.RULES,
    *megatron.RULES,
    *megatron_optimizer.RULES,
    *activations.RULES,
    *memory.RULES,
    *adapters.RULES,
)

GRPO_RULES: RuleSet[GrpoMasterConfig] = RuleSet(
    (*availability.RULES, *availability.GRPO_RULES),
    (*cluster.GRPO_RULES, *rollouts.RULES, *model.GRPO_RULES, *algorithm.RULES, *_TRAINING_RULES, *memory.GRPO_RULES),
)
SFT_RULES: RuleSet[SftMasterConfig] = RuleSet(
    availability.RULES, (*_TRAINING_RULES, *supervised.RULES, *supervised.SFT_RULES)
)
DPO_RULES: RuleSet[DpoMasterConfig] = RuleSet(
    availability.RULES, (*_TRAINING_RULES, *supervised.RULES, *supervised.DPO_RULES)
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
