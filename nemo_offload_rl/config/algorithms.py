"""Table of algorithms: the keys of each, the rules between them, and their conversion to a run's configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config.convert import (
    to_distillation_config,
    to_dpo_config,
    to_eval_config,
    to_grpo_config,
    to_sft_config,
    with_cpu_cache,
)
from nemo_offload_rl.config.rules import DISTILLATION_RULES, DPO_RULES, GRPO_RULES, SFT_RULES, check_rules
from nemo_offload_rl.config.rules.base import RuleSet
from nemo_offload_rl.config.rules.evaluation import EVAL_RULES
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.keys.master import (
    DistillationMasterConfig,
    DpoMasterConfig,
    EvalMasterConfig,
    GrpoMasterConfig,
    SftMasterConfig,
)


@dataclass(frozen=True)
class Algorithm:
    """One kind of run.

    Attributes:
        name: Its section in a YAML file and the end of its launch script's name.
        keys: The class with all of its keys.
        rules: Rules between keys.
        convert: Makes a run's configuration from checked keys and the plain dictionaries that they come from.
        trains: The run updates a policy.
    """

    name: str
    keys: type[Any]
    rules: RuleSet[Any]
    convert: Callable[[Any, Mapping[str, Any]], Any]
    trains: bool = True

    def check(self, resolved: Mapping[str, Any]) -> Any:
        """Check every key by itself, then the rules between keys.

        Args:
            resolved: Plain dictionaries: the file with its defaults and overrides.

        Returns:
            An object of the class `keys`.

        Raises:
            ConfigError: One line that says what is wrong and what to change.
        """
        cfg = with_cpu_cache(validate_keys(resolved, self.keys))
        check_rules(cfg, self.rules)
        return cfg


ALGORITHMS: Mapping[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("grpo", GrpoMasterConfig, GRPO_RULES, to_grpo_config),
        Algorithm("distillation", DistillationMasterConfig, DISTILLATION_RULES, to_distillation_config),
        Algorithm("sft", SftMasterConfig, SFT_RULES, to_sft_config),
        Algorithm("dpo", DpoMasterConfig, DPO_RULES, to_dpo_config),
        Algorithm("eval", EvalMasterConfig, EVAL_RULES, to_eval_config, trains=False),
    )
}
