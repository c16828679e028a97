"""Counts the files of a folder that load, and the reasons that stop the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.nemo_rl import is_nemo_rl
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.migrate.mapping import Migration, algorithm_of, migrate
from nemo_offload_rl.migrate.policy import is_trained
from nemo_offload_rl.models.families import DTENSOR, MEGATRON
from nemo_offload_rl.utils.config import load_config


@dataclass
class Count:
    """The files of a folder that are for GRPO, SFT, DPO, distillation or evaluation.

    Attributes:
        by_algorithm: Number of files that load and number tried, by algorithm.
        loaded: Files that can be converted and pass every check that needs neither model nor devices.
        trained: Those of `loaded` whose model is known, by name, to be of a family that the backend trains.
        stopped: Files with their missing features, or else the messages of our checks.
        unreadable: Files that cannot be read, with the reason.
        others: Files of other algorithms or other programs.
    """

    by_algorithm: dict[str, list[int]] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    stopped: dict[str, list[str]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def add(self, name: str, migration: Migration) -> None:
        """Count a file that was migrated."""
        numbers = self.by_algorithm.setdefault(migration.algorithm, [0, 0])
        numbers[1] += 1
        if reasons := list(problems(migration)):
            self.stopped[name] = reasons
            return
        numbers[0] += 1
        self.loaded.append(name)
        policy = migration.config.get("policy")
        if policy is None:
            return
        backend = DTENSOR if policy["dtensor_cfg"]["enabled"] else MEGATRON
        if is_trained(policy["model_name"], backend):
            self.trained.append(name)

    @property
    def num_runs(self) -> int:
        """Files that were tried."""
        return len(self.loaded) + len(self.stopped)

    def render(self) -> str:
        """The numbers of files, and for each reason the number of files that it stops, in all and alone."""
        reasons = Counter(reason for reasons in self.stopped.values() for reason in reasons)
        alone = Counter(reasons[0] for reasons in self.stopped.values() if len(reasons) == 1)
        lines = [
            f"{len(self.loaded)} of {self.num_runs} files load: "
            + ", ".join(f"{name} {loaded} of {tried}" for name, (loaded, tried) in sorted(self.by_algorithm.items())),
            f"{len(self.trained)} of them name a model of a family that is trained here",
        ]
        if self.others or self.unreadable:
            lines.append(f"not counted: {len(self.others)} for something else, {len(self.unreadable)} not readable")
        if reasons:
            lines += ["", "files  alone  what stops them"]
        ranked = sorted(reasons, key=lambda reason: (-reasons[reason], -alone[reason], reason))
        lines += [f"{reasons[reason]:5}  {alone[reason]:5}  {reason}" for reason in ranked]
        lines += ["", *(f"{name}: {reason}" for name, reason in self.unreadable.items())] if self.unreadable else []
        return "\n".join(lines)


def count_folder(folder: Path) -> Count:
    """Migrate and check every YAML file below a folder."""
    count = Count()
    for path in sorted(folder.rglob("*.yaml")):
        name = str(path.relative_to(folder))
        try:
            config = load_config(path)
        except ConfigError as error:
            count.unreadable[name] = str(error)
            continue
        if algorithm_of(config) is None or not is_nemo_rl(config):
            count.others.append(name)
        else:
            count.add(name, migrate(config, path))
    return count


def problems(migration: Migration) -> Iterator[str]:
    """Missing features of a migrated configuration, or if there are none, the messages of our own checks."""
    if migration.report.missing:
        yield from migration.report.missing
        return
    try:
        check(migration.algorithm, migration.config)
    except ConfigError as error:
        # Numbers and names differ from file to file, the rule does not.
        yield f"our check: {re.sub(r'\d+', 'N', str(error).partition(';')[0])}"


def check(algorithm: str, config: Mapping[str, Any]) -> None:
    """Every key and every rule between keys, as at the start of a run.

    Raises:
        ConfigError: What is wrong.
    """
    ALGORITHMS[algorithm].check(config)
