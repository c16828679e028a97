"""Loads the YAML file of a run: reads it, applies overrides, checks every key and rule, and converts it.

A file of NeMo-RL is translated to this package's keys first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_offload_rl.config.algorithms import Algorithm
    from nemo_offload_rl.config.rules.base import RuleSet
    from nemo_offload_rl.keys.master import DistillationConfig, DpoConfig, EvalConfig, GrpoConfig, RunConfig, SftConfig
    from nemo_offload_rl.memory.account import Account

logger = logging.getLogger(__name__)

type Source = str | Path | Mapping[str, Any]
type Changes = Sequence[str] | Mapping[str, Any]

# Imports are inside the functions so that `--help` of a launch script does not wait for torch.


def load_grpo_config(source: Source, overrides: Changes = ()) -> GrpoConfig:
    """Load, check and convert the configuration of a GRPO run.

    Args:
        source: A YAML file; or the name of a configuration that the package brings, such as `grpo_math_1B.yaml`, where
            no file has that name; or a dictionary with the sections of a file, whose `defaults` names files to start
            from in the same way.
        overrides: Hydra overrides, applied in order; or a dictionary from dotted keys to values, each of which replaces
            the whole value of its key.

    Raises:
        ConfigError: The configuration is wrong; its one line says how to correct it.
    """
    return _load("grpo", source, overrides)


def load_distillation_config(source: Source, overrides: Changes = ()) -> DistillationConfig:
    """Load the configuration of on-policy distillation; arguments and errors as in `load_grpo_config`."""
    return _load("distillation", source, overrides)


def load_sft_config(source: Source, overrides: Changes = ()) -> SftConfig:
    """Load the configuration of an SFT run; arguments and errors as in `load_grpo_config`."""
    return _load("sft", source, overrides)


def load_dpo_config(source: Source, overrides: Changes = ()) -> DpoConfig:
    """Load the configuration of a DPO run; arguments and errors as in `load_grpo_config`."""
    return _load("dpo", source, overrides)


def load_eval_config(source: Source, overrides: Changes = ()) -> EvalConfig:
    """Load the configuration of an evaluation; arguments and errors as in `load_grpo_config`."""
    return _load("eval", source, overrides)


def load_for_planning(
    path: str | Path, overrides: Sequence[str], account_of: Callable[[RunConfig], Account]
) -> tuple[RunConfig, RuleSet[Any]]:
    """Load a run's keys, each checked on its own, and its unchecked rules.

    Args:
        path: A YAML file of a run that trains; its sections determine the algorithm.
        overrides: Hydra overrides, applied in order.
        account_of: Counts the memory of a run on the machine of the plan, to choose sizes that are `auto`.

    Raises:
        ConfigError: The configuration is wrong; its one line says how to correct it.
    """
    from nemo_offload_rl.config.algorithms import ALGORITHMS
    from nemo_offload_rl.config.validate import validate_keys
    from nemo_offload_rl.utils.config import load_unresolved

    kinds = [algorithm for algorithm in ALGORITHMS.values() if algorithm.trains]
    sections = load_unresolved(path)
    algorithm = next((algorithm for algorithm in kinds if algorithm.name in sections), None)
    if algorithm is None:
        names = ", ".join(algorithm.name for algorithm in kinds)
        raise ConfigError(f"{path} has no section {names}; give the configuration of a run that trains")
    resolved = _with_sizes(algorithm, path, overrides, account_of)
    return validate_keys(resolved, algorithm.keys), algorithm.rules


def _load(name: str, source: Source, overrides: Changes) -> Any:
    from nemo_offload_rl.config.algorithms import ALGORITHMS

    algorithm = ALGORITHMS[name]
    resolved = _with_sizes(algorithm, source, overrides, _account_here)
    return algorithm.convert(algorithm.check(resolved), resolved)


def _account_here(cfg: RunConfig) -> Account:
    from nemo_offload_rl.memory.account import Account
    from nemo_offload_rl.memory.machine import Machine

    return Account(cfg, Machine.here(cfg.cluster))


def _with_sizes(
    algorithm: Algorithm, source: Source, overrides: Changes, account_of: Callable[[RunConfig], Account]
) -> Mapping[str, Any]:
    """Do the work of `_resolve`, and choose the batch sizes that are `auto`."""
    from nemo_offload_rl.config.validate import validate_keys

    automatic: list[str] = []
    resolved = _resolve(algorithm, source, overrides, automatic)
    if not automatic:
        return resolved
    from nemo_offload_rl.memory.micro_batches import choose_batch_sizes

    sizes = choose_batch_sizes(account_of(validate_keys(resolved, algorithm.keys)), automatic)
    for key, size in sizes.items():
        logger.info("policy.%s is auto: %d", key, size)
    return _resolve(algorithm, source, overrides, automatic, sizes)


def _resolve(
    algorithm: Algorithm,
    source: Source,
    overrides: Changes,
    automatic: list[str],
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Mapping[str, Any]:
    """Read a file or a dictionary with defaults and overrides, in this package's keys, with whole paths.

    Args:
        algorithm: The kind of run.
        source: The file or the dictionary.
        overrides: Changes of its keys.
        automatic: Gets the keys of `policy` that are `auto`.
        sizes: Their values; 1 for those that it leaves out.
    """
    from nemo_offload_rl.config.algorithms import ALGORITHMS
    from nemo_offload_rl.config.keys import takes_text
    from nemo_offload_rl.config.nemo_rl import is_nemo_rl
    from nemo_offload_rl.config.validate import missing_key_message
    from nemo_offload_rl.keys.policy import AUTO, AUTO_KEYS
    from nemo_offload_rl.targets import with_whole_paths
    from nemo_offload_rl.utils.config import is_text_at, load_config

    def replace_auto(config: DictConfig) -> None:
        policy = config.get("policy")
        automatic[:] = [key for key in AUTO_KEYS if is_text_at(policy, key, AUTO)]
        for key in automatic:
            config["policy"][key] = sizes.get(key, 1)

    path = "the dictionary" if isinstance(source, Mapping) else source
    missing, is_text = partial(missing_key_message, algorithm.keys), partial(takes_text, algorithm.keys)
    raw = load_config(source, overrides, missing, _filling(algorithm.name), is_text, replace_auto)
    if is_nemo_rl(raw):
        from nemo_offload_rl.migrate import migrate

        migration = migrate(raw, Path(path))
        logger.info("%s is NeMo-RL's; what becomes of its keys:\n%s", path, migration.report.render())
        migration.check()
        raw = migration.config
    others = [name for name in ALGORITHMS if name in raw and name != algorithm.name]
    if others and algorithm.name not in raw:
        raise ConfigError(
            f"{path} configures {others[0]}, not {algorithm.name}; start it with examples/run_{others[0]}.py, or give "
            f"the configuration of a run of {algorithm.name}"
        )
    return with_whole_paths(_with_home(raw), Path(path).parent)


@cache
def _filling(name: str) -> Callable[[dict[str, Any]], None]:
    """Return the function that sets the keys of an algorithm which a file of this package leaves out."""
    from nemo_offload_rl.config.algorithms import ALGORITHMS
    from nemo_offload_rl.config.nemo_rl import is_nemo_rl
    from nemo_offload_rl.keys.section import fill_defaults

    def fill(keys: dict[str, Any]) -> None:
        if name in keys and not is_nemo_rl(keys):
            fill_defaults(ALGORITHMS[name].keys, keys)

    return fill


def _with_home(node: Any) -> Any:
    """Replace `~/` at the beginning of paths by the home folder, since other processes may have another home."""
    from nemo_offload_rl.keys.section import FromEnvironment

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
