"""Environments by name: a key of `env` in the YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_offload_rl.data.settings import EnvSettings
from nemo_offload_rl.environments.arithmetic import ArithmeticEnvironment
from nemo_offload_rl.environments.interfaces import Environment
from nemo_offload_rl.environments.math import MathEnvironment
from nemo_offload_rl.errors import ConfigError

MATH_TIMEOUT_S = 10.0  # for one response


def _make_arithmetic(settings: EnvSettings) -> Environment:
    return ArithmeticEnvironment()  # so cheap that processes would cost more than they do


def _make_math(settings: EnvSettings) -> Environment:
    return MathEnvironment(num_workers=settings.num_workers, timeout_s=MATH_TIMEOUT_S)


ENVIRONMENTS: Mapping[str, Callable[[EnvSettings], Environment]] = {
    "arithmetic": _make_arithmetic,
    "math": _make_math,
}


def make_environments(settings: Mapping[str, EnvSettings]) -> dict[str, Environment]:
    """Every environment that the configuration names; the caller closes them.

    Raises:
        ConfigError: There is no environment of that name.
    """
    for name in settings:
        if name not in ENVIRONMENTS:
            raise ConfigError(f"environment {name!r} is unknown; the keys of env can be: {', '.join(ENVIRONMENTS)}")
    return {name: ENVIRONMENTS[name](entry) for name, entry in settings.items()}
