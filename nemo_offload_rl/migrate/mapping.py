"""Converts a NeMo-RL configuration to ours: recognizes it, applies the rules, fills in the rest."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.nemo_rl import is_nemo_rl
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import EXEMPLARS
from nemo_offload_rl.migrate.draft import CONVERSIONS, DEFAULT_THERE, Draft, at, leaves, matches
from nemo_offload_rl.migrate.report import Outcome, Report
from nemo_offload_rl.migrate.rules import (
    ABSENT,
    FEATURES,
    FILLS,
    FOLLOWS,
    IGNORED,
    RENAMED,
    SAME,
    Ignored,
    Off,
    Renamed,
    Rule,
    Same,
)
from nemo_offload_rl.utils.config import EXEMPLARS as FOLDER
from nemo_offload_rl.utils.config import load_config

# Algorithms that are not available here; NeMo-RL's files for them may inherit a section of one that is.
_OTHER_ALGORITHMS = ("ppo", "rm")
_SECTIONS = (*ALGORITHMS, "loss_fn", "policy", "data", "env", "logger", "cluster", "checkpointing")


@dataclass(frozen=True)
class Migration:
    """A NeMo-RL configuration in our keys.

    Attributes:
        algorithm: One of `ALGORITHMS`.
        config: Nested dictionaries with all of our keys; unusable if the report has missing features.
        report: One row for each key.
    """

    algorithm: str
    config: dict[str, Any]
    report: Report

    def check(self) -> None:
        """Refuse a file that uses features which are not available here.

        Raises:
            ConfigError: One line with each feature and its first key.
        """
        if missing := self.report.missing:
            one = len(missing) == 1
            features, them = ("feature that is", "it") if one else ("features that are", "them")
            raise ConfigError(
                f"this NeMo-RL configuration uses {len(missing)} {features} not available here: "
                f"{'; '.join(map(_told, missing, missing.values()))}; turn {them} off, or leave {them} out"
            )


def _told(feature: str, keys: Sequence[str]) -> str:
    """Name a missing feature and the keys that turn it on, at first only one."""
    if feature == keys[0]:
        return f"the key {feature}"
    more = len(keys) - 1
    others = "" if not more else f" and {more} other key{'s' if more > 1 else ''}"
    before = f"{feature[:-1]}, " if feature.endswith(")") else f"{feature} ("
    return f"{before}{keys[0]}{others})"


_ABSENT = object()


def algorithm_of(config: Mapping[str, Any]) -> str | None:
    """Return the algorithm of a configuration, one of `ALGORITHMS`; None for any other."""
    if any(name in config for name in _OTHER_ALGORITHMS):
        return None
    found = [name for name in ALGORITHMS if name in config]
    return found[0] if len(found) == 1 else None


def migrate_file(path: str | Path) -> Migration:
    """Read a NeMo-RL file with its `defaults:`, relative to itself, and map it.

    Raises:
        ConfigError: The file cannot be read, or is not NeMo-RL's for one of `ALGORITHMS`.
    """
    return migrate(load_config(path), Path(path))


def migrate(config: Mapping[str, Any], path: Path | None = None) -> Migration:
    """Map a resolved NeMo-RL configuration.

    Args:
        config: Nested dictionaries without interpolations.
        path: Its file, for messages and to find its prompt files.

    Raises:
        ConfigError: It is not NeMo-RL's for one of `ALGORITHMS`.
    """
    name = path or "the configuration"
    if (algorithm := algorithm_of(config)) is None:
        raise ConfigError(f"{name} is not a file for one of {', '.join(ALGORITHMS)}; only those are converted")
    if not is_nemo_rl(config):
        raise ConfigError(f"{name} has none of the keys that only NeMo-RL has; use it as it is")
    for section in _SECTIONS:
        if not isinstance(config.get(section, {}), Mapping):
            raise ConfigError(f"{name}: {section} is not a mapping; write the section's keys below it")
    draft = Draft(
        theirs=config,
        ours=copy.deepcopy(_exemplar(algorithm)),
        report=Report(),
        algorithm=algorithm,
        folder=None if path is None else path.parent,
    )
    _leave_out_what_is_off(draft)
    for conversion in CONVERSIONS:
        if algorithm in conversion.algorithms:
            conversion.apply(draft)
    _apply_rules(draft)
    _fill(draft)
    return Migration(algorithm, draft.ours, draft.report)


@cache
def _exemplar(algorithm: str) -> dict[str, Any]:
    return load_config(FOLDER / EXEMPLARS[ALGORITHMS[algorithm].keys])


def _leave_out_what_is_off(draft: Draft) -> None:
    """Ignore sections of backends and features that are off: neither NeMo-RL nor this package reads them."""
    backends = ("policy.dtensor_cfg", "policy.megatron_cfg")
    off = [name for name in backends if draft.has(name) and not draft.get(f"{name}.enabled")]
    if draft.has("policy.generation") and not draft.samples:
        off.append("policy.generation")
    theirs = copy.deepcopy(dict(draft.theirs))
    for section in off:
        node = at(theirs, section)
        for path, _ in leaves(node, section):
            if path != f"{section}.enabled":
                draft.ignore(path, f"{section} is off")
        if isinstance(node, dict):
            for key in [key for key in node if key != "enabled"]:
                del node[key]
    draft.theirs = theirs


def rule_for(path: str) -> Rule | None:
    """Return the rule with the longest matching pattern for a key of NeMo-RL, or None."""
    for rules in (SAME, RENAMED, IGNORED, FEATURES):
        if path in rules:
            return rules[path]
    found: list[tuple[int, Rule]] = []
    for rules in (SAME, RENAMED, IGNORED, FEATURES):
        found += [(len(pattern), rule) for pattern, rule in rules.items() if matches(pattern, path)]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def is_converted(path: str) -> bool:
    """Tell whether a function accounts for a key of NeMo-RL."""
    return any(matches(pattern, path) for conversion in CONVERSIONS for pattern in conversion.keys)


def _apply_rules(draft: Draft) -> None:
    reported = tuple(f"{key}." for key in draft.done)
    for path, value in leaves(draft.theirs):
        if path in draft.done or path.startswith(reported):
            continue
        match rule_for(path):
            case Same():
                draft.keep(path, value)
            case Renamed(to, note) if to == path:
                draft.convert(path, value, note)
            case Renamed(to, note, convert):
                draft.rename(path, to, value if convert is None else convert(draft.number(path, 0)), note)
            case Ignored(reason):
                draft.ignore(path, reason)
            case Off(values, feature):
                _off(draft, path, value, values, feature)
            case None if not is_converted(path):
                draft.missing(path)
            case None:
                pass


def _off(draft: Draft, path: str, value: Any, values: Sequence[Any], feature: str) -> None:
    if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values):
        draft.missing(path, feature.replace("{value}", str(value)))
    elif at(draft.ours, path, _ABSENT) is not _ABSENT:
        draft.keep(path, value)
    else:
        draft.ignore(path, "the feature is off")


def _fill(draft: Draft) -> None:
    """Set keys that only this package has: by a rule, or as in our exemplar."""
    for path, (source, reason) in FOLLOWS.items():
        if path not in draft.written and at(draft.ours, path, _ABSENT) is not _ABSENT:
            draft.fill(path, at(draft.ours, source), reason)
    defaults = {path: (value, DEFAULT_THERE) for path, value in ABSENT.items()}
    for path, (value, reason) in {**defaults, **FILLS}.items():
        if path not in draft.written and at(draft.ours, path, _ABSENT) is not _ABSENT:
            draft.fill(path, value, reason)
    sizes = ("policy.dtensor_cfg.tensor_parallel_size", "policy.dtensor_cfg.context_parallel_size")
    if any(draft.number(size, 1) > 1 for size in sizes):
        draft.fill("policy.dtensor_cfg.torch_compile", False, "layers that are split over devices are not compiled")
    written = tuple(f"{path}." for path in draft.written)
    for path, _ in leaves(draft.ours):
        if path not in draft.written and not path.startswith(written):
            draft.report.add(Outcome.FILLED, "", path, f"as {EXEMPLARS[ALGORITHMS[draft.algorithm].keys]} sets it")
