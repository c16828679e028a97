"""Checks of a run before Ray starts: of this machine, and of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console

from nemo_offload_rl.algorithms.metric_names import data_set_problem
from nemo_offload_rl.distributed.preflight import check_start
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import RunConfig
from nemo_offload_rl.keys.run import ClusterConfig, LoggerConfig
from nemo_offload_rl.utils.progress import RunProgress


def begin(
    cluster: ClusterConfig, *, num_more: int = 0, starts_ray: bool = True, console: Console | None = None
) -> None:
    """Check this machine, and then say that tokenizer and data are read, which may take minutes.

    Args:
        cluster: The run's cluster settings.
        num_more: Devices of engines that share none with the policy.
        starts_ray: The run will start or join Ray.
        console: Shows the line; None for standard output.

    Raises:
        ConfigError: Ray or the workers could not start.
    """
    if starts_ray:
        check_start(cluster, num_more)
    RunProgress(0, console=console).note("reading tokenizer and data")


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


def check_profile_steps(logger: LoggerConfig, last_step: int) -> None:
    """Check that the run has the steps that are to be traced; those before a resumed run's first are left out."""
    wrong = [step for step in logger.profile_steps if not 1 <= step <= last_step]
    if wrong:
        raise ConfigError(
            f"logger.profile_steps names step {wrong[0]}, but the run has steps 1 to {last_step}; name some of these"
        )
