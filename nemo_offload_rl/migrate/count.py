"""Counts the files of a folder that load, and the reasons that stop the others."""

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
        trained: Those of `loaded` whose model, by its name, is of a family that the backend trains.
        stopped: Files that do not load, with missing features or the message of our check.
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
        """Count a migrated file."""
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
        """Number of files that were tried."""
        return len(self.loaded) + len(self.stopped)

    def render(self) -> str:
        """Render numbers of files, and for each reason how many files it stops, and how many it stops alone."""
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
    """Yield the missing features of a migrated configuration; without any, the message of our own check."""
    if migration.report.missing:
        yield from migration.report.missing
        return
    try:
        check(migration.algorithm, migration.config)
    except ConfigError as error:
        # Numbers differ from file to file, the rule does not.
        yield f"our check: {re.sub(r'\d+', 'N', str(error).partition(';')[0])}"


def check(algorithm: str, config: Mapping[str, Any]) -> None:
    """Check every key and the rules between keys, as a run does at its start.

    Raises:
        ConfigError: One of them is broken.
    """
    ALGORITHMS[algorithm].check(config)
