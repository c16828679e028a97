"""Rules between keys, all checked before Ray starts; one named function each."""

from __future__ import annotations

from nemo_offload_rl.config.rules import algorithm, availability, cluster, rollouts, training
from nemo_offload_rl.config.rules.base import Rule
from nemo_offload_rl.config.schema import GrpoMasterConfig
from nemo_offload_rl.config.validate import join_problems
from nemo_offload_rl.errors import ConfigError

AVAILABILITY_RULES: tuple[Rule, ...] = availability.RULES
RULES: tuple[Rule, ...] = (*cluster.RULES, *rollouts.RULES, *algorithm.RULES, *training.RULES)


def check_rules(cfg: GrpoMasterConfig) -> None:
    """Run every rule; those on what is not available hide the others, which would only follow from it.

    Raises:
        ConfigError: One line with up to three broken rules.
    """
    for rules in (AVAILABILITY_RULES, RULES):
        messages = [message for rule in rules if (message := rule(cfg)) is not None]
        if messages:
            raise ConfigError(join_problems(messages))
