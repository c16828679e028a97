"""Checks of a run that need its data, before Ray starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nemo_offload_rl.algorithms.metric_names import data_set_problem
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import RunConfig


def check_data_sets(config: RunConfig, data_sets: Mapping[str, Iterable[str]]) -> None:
    """Check that there are rows to validate on, and that the metric that ranks checkpoints is of a data set.

    Args:
        config: The run's configuration.
        data_sets: Names of the data sets under `train` and `val`; none where there are no rows.

    Raises:
        ConfigError: One of the two is not so.
    """
    name, section = config.algorithm
    if section.validates and not data_sets["val"]:
        raise ConfigError(
            f"{name}.val_period, val_at_start or val_at_end asks for validation, but no row of the data is left for "
            f"it; set data.validation or a larger split_validation_size, or turn validation off: {name}.val_period=0 "
            f"{name}.val_at_start=false {name}.val_at_end=false"
        )
    if config.checkpointing.enabled:
        problem = data_set_problem(config.checkpointing.metric_name, data_sets)
        if problem is not None:
            raise ConfigError(problem)
