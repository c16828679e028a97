"""Sets of rules, rules on the data of all runs, and checks shared by several rules."""

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_offload_rl.keys.data import ArithmeticConfig, DataSource, MixtureConfig, MixtureKeys
from nemo_offload_rl.keys.master import DpoMasterConfig, RolloutMasterConfig, Rule, RunConfig, SftMasterConfig, rules_in
from nemo_offload_rl.memory.account import Account

type AnyRun = RolloutMasterConfig | SftMasterConfig | DpoMasterConfig


@dataclass(frozen=True)
class RuleSet[Config]:
    """The rules of one kind of run.

    Attributes:
        availability: Rules on unavailable features; they go first and hide the others.
        rules: Rules between keys.
        memory: Rules on the run's use of its machine; none for a run that trains nothing.
    """

    availability: tuple[Rule[Config], ...]
    rules: tuple[Rule[Config], ...]
    memory: tuple[Rule[Account], ...] = ()

    def __iter__(self) -> Iterator[Rule[Config] | Rule[Account]]:
        return iter((*self.availability, *self.rules, *self.memory))


def data_parallel_size(cfg: RunConfig) -> int:
    """Count the policy workers that get different data."""
    return cfg.cluster.world_size // cfg.policy.backend.model_parallel.ranks_per_copy


def sources(section: DataSource | MixtureConfig | None, where: str) -> Iterator[tuple[str, DataSource]]:
    """Yield each data set of `data.train` or `data.validation`, also within a mixture, with its dotted place."""
    if section is None:
        return
    if isinstance(section, MixtureKeys):
        for index, source in enumerate(section.datasets):
            yield f"{where}.datasets.{index}", source
    else:
        yield where, section


def holds_validation_rows(train: DataSource | MixtureConfig) -> bool:
    """Tell whether the training data, or a data set of a mixture, holds out rows for validation."""
    return any(_kept(source)[1] > 0 for _, source in sources(train, ""))


def _kept(source: DataSource) -> tuple[str, float]:
    """Return the key that says how much a data set holds out for validation, and its value."""
    if isinstance(source, ArithmeticConfig):
        return "holdout", source.holdout
    return "split_validation_size", source.split_validation_size


def validation_has_rows(cfg: AnyRun) -> str | None:
    """A run that validates has rows to validate on."""
    data, (algorithm, section) = cfg.data, cfg.algorithm
    if not section.validates or data.validation is not None or holds_validation_rows(data.train):
        return None
    keys = [f"{place}.{_kept(source)[0]}" for place, source in sources(data.train, "data.train")]
    return (
        f"data.validation is null and {' and '.join(keys[:2])}{' and others' if keys[2:] else ''} "
        f"{'is' if len(keys) == 1 else 'are'} 0, so there is nothing to validate on; set one of them, or "
        f"{algorithm}.val_period=0 {algorithm}.val_at_start=false {algorithm}.val_at_end=false"
    )


def validation_sets_are_used_whole(cfg: AnyRun) -> str | None:
    """A validation set holds out no rows: all of them are validated."""
    for place, source in sources(cfg.data.validation, "data.validation"):
        if isinstance(source, ArithmeticConfig):
            if source.holdout > 0:
                continue
            return (
                f"{place}.holdout is 0, but validation uses only the held-out problems of arithmetic, which training "
                f"never sees; set {place}.holdout to their number"
            )
        if source.split_validation_size > 0:
            return (
                f"{place}.split_validation_size is {source.split_validation_size}, but all rows of data.validation "
                f"are for validation; set {place}.split_validation_size to 0"
            )
    return None


def mixtures_have_their_weights(cfg: AnyRun) -> str | None:
    """A mixture has one weight for each data set."""
    for where, source in (("train", cfg.data.train), ("validation", cfg.data.validation)):
        if not isinstance(source, MixtureKeys):
            continue
        num_sets = len(source.datasets)
        num_weights = num_sets if source.weights is None else len(source.weights)
        if not num_sets:
            return f"data.{where}.datasets is empty, so there is nothing to mix; name at least one data set"
        if num_weights != num_sets:
            return (
                f"data.{where}.weights has {num_weights} numbers, but data.{where}.datasets has {num_sets} data sets; "
                "write one weight for each"
            )
    return None


DATA_RULES = rules_in(__name__, AnyRun)
