"""The configuration border: YAML and overrides in, frozen dataclasses out.

1. `utils.config.load_config` reads, inherits, overrides and resolves. A file of NeMo-RL's becomes ours (`migrate`).
2. `validate.validate_keys` checks every key by itself (pydantic, unknown keys forbidden) and makes the sections.
3. `rules.check_rules` checks what keys demand of each other.
4. `convert` adds what workers and engines read that is not one key as it stands.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_offload_rl.config.convert import DistillationConfig, DpoConfig, EvalConfig, GrpoConfig, SftConfig
    from nemo_offload_rl.config.rules.base import RuleSet
    from nemo_offload_rl.config.schema import RunConfig
    from nemo_offload_rl.policy.rules import Rule

logger = logging.getLogger(__name__)

# Imports are inside the functions so that `--help` of a launch script does not wait for torch.


def load_grpo_config(path: str | Path, overrides: Sequence[str] = ()) -> GrpoConfig:
    """Load, check and convert the configuration of a GRPO run.

    Args:
        path: A YAML file such as examples/configs/grpo_math_1B.yaml.
        overrides: Hydra overrides, applied in order.

    Raises:
        ConfigError: One line that says what is wrong and what to change.
    """
    from nemo_offload_rl.config.convert import to_grpo_config
    from nemo_offload_rl.config.rules import GRPO_RULES, check_rules
    from nemo_offload_rl.config.schema import GrpoMasterConfig
    from nemo_offload_rl.config.validate import validate_keys

    resolved = _load(path, overrides, "grpo", GrpoMasterConfig)
    cfg = validate_keys(resolved, GrpoMasterConfig)
    check_rules(cfg, GRPO_RULES)
    return to_grpo_config(cfg, resolved)


def load_distillation_config(path: str | Path, overrides: Sequence[str] = ()) -> DistillationConfig:
    """Load, check and convert the configuration of on-policy distillation; arguments and errors as above."""
    from nemo_offload_rl.config.convert import to_distillation_config
    from nemo_offload_rl.config.rules import DISTILLATION_RULES, check_rules
    from nemo_offload_rl.config.schema import DistillationMasterConfig
    from nemo_offload_rl.config.validate import validate_keys

    resolved = _load(path, overrides, "distillation", DistillationMasterConfig)
    cfg = validate_keys(resolved, DistillationMasterConfig)
    check_rules(cfg, DISTILLATION_RULES)
    return to_distillation_config(cfg, resolved)


def load_sft_config(path: str | Path, overrides: Sequence[str] = ()) -> SftConfig:
    """Load, check and convert the configuration of an SFT run; arguments and errors as above."""
    from nemo_offload_rl.config.convert import to_sft_config
    from nemo_offload_rl.config.rules import SFT_RULES, check_rules
    from nemo_offload_rl.config.schema import SftMasterConfig
    from nemo_offload_rl.config.validate import validate_keys

    resolved = _load(path, overrides, "sft", SftMasterConfig)
    cfg = validate_keys(resolved, SftMasterConfig)
    check_rules(cfg, SFT_RULES)
    return to_sft_config(cfg, resolved)


def load_dpo_config(path: str | Path, overrides: Sequence[str] = ()) -> DpoConfig:
    """Load, check and convert the configuration of a DPO run; arguments and errors as above."""
    from nemo_offload_rl.config.convert import to_dpo_config
    from nemo_offload_rl.config.rules import DPO_RULES, check_rules
    from nemo_offload_rl.config.schema import DpoMasterConfig
    from nemo_offload_rl.config.validate import validate_keys

    resolved = _load(path, overrides, "dpo", DpoMasterConfig)
    cfg = validate_keys(resolved, DpoMasterConfig)
    check_rules(cfg, DPO_RULES)
    return to_dpo_config(cfg, resolved)


def load_for_planning(path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, tuple[Rule[Any], ...]]:
    """A run's checked keys, and the rules between them apart from those on what this machine has.

    Args:
        path: Of a run that trains; the file says of which kind.
        overrides: Hydra overrides, applied in order.

    Raises:
        ConfigError: One line that says what is wrong and what to change.
    """
    from nemo_offload_rl.config import rules, schema
    from nemo_offload_rl.config.validate import validate_keys
    from nemo_offload_rl.utils.config import load_unresolved

    kinds: dict[str, tuple[type, RuleSet[Any]]] = {
        "grpo": (schema.GrpoMasterConfig, rules.GRPO_RULES),
        "distillation": (schema.DistillationMasterConfig, rules.DISTILLATION_RULES),
        "sft": (schema.SftMasterConfig, rules.SFT_RULES),
        "dpo": (schema.DpoMasterConfig, rules.DPO_RULES),
    }
    sections = load_unresolved(path)
    name = next((name for name in kinds if name in sections), None)
    if name is None:
        raise ConfigError(f"{path} has no section {', '.join(kinds)}; give the configuration of a run that trains")
    master, rule_set = kinds[name]
    return validate_keys(_load(path, overrides, name, master), master), rule_set.rules


def load_eval_config(path: str | Path, overrides: Sequence[str] = ()) -> EvalConfig:
    """Load, check and convert the configuration of an evaluation; arguments and errors as above."""
    from nemo_offload_rl.config.convert import to_eval_config
    from nemo_offload_rl.config.rules import check_rules
    from nemo_offload_rl.config.rules.evaluation import EVAL_RULES
    from nemo_offload_rl.config.schema import EvalMasterConfig
    from nemo_offload_rl.config.validate import validate_keys

    resolved = _load(path, overrides, "eval", EvalMasterConfig)
    cfg = validate_keys(resolved, EvalMasterConfig)
    check_rules(cfg, EVAL_RULES)
    return to_eval_config(cfg, resolved)


def _load(path: str | Path, overrides: Sequence[str], algorithm: str, schema: type) -> Mapping[str, Any]:
    from nemo_offload_rl.config.validate import missing_key_message
    from nemo_offload_rl.migrate import is_nemo_rl, migrate
    from nemo_offload_rl.targets import with_whole_paths
    from nemo_offload_rl.utils.config import load_config

    raw = load_config(path, overrides, partial(missing_key_message, schema))
    if is_nemo_rl(raw):
        migration = migrate(raw, Path(path))
        logger.info("%s is NeMo-RL's; what becomes of its keys:\n%s", path, migration.report.render())
        migration.check()
        raw = migration.config
    others = [name for name in ("grpo", "distillation", "sft", "dpo", "eval") if name in raw and name != algorithm]
    if others and algorithm not in raw:
        raise ConfigError(
            f"{path} configures {others[0]}, not {algorithm}; start it with examples/run_{others[0]}.py, or give the "
            f"configuration of a run of {algorithm}"
        )
    return with_whole_paths(_with_home(raw), Path(path).parent)


def _with_home(node: Any) -> Any:
    """Paths that begin with `~/` in full: what reads them, in whatever process, need not know of it."""
    from nemo_offload_rl.schema import FromEnvironment

    match node:
        case Mapping():
            return {key: _with_home(value) for key, value in node.items()}
        case list():
            return [_with_home(value) for value in node]
        case FromEnvironment() if node.startswith("~/"):
            return FromEnvironment(str(Path(node).expanduser()), node.written)
        case str() if node.startswith("~/"):
            return str(Path(node).expanduser())
        case _:
            return node
