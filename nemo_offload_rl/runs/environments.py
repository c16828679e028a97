"""The environments of a run with rollouts: built-in ones by name, a user's own by `target`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_offload_rl.data.records import Answer, Prompt, Splits, accepted
from nemo_offload_rl.environments.agents import AgentEnvironment, is_agent
from nemo_offload_rl.environments.custom import SCORING_TIMEOUT_S, custom_environment
from nemo_offload_rl.environments.interfaces import Environment, ReferenceChecker
from nemo_offload_rl.environments.math import ArithmeticEnvironment, MathEnvironment, RetryEnvironment
from nemo_offload_rl.errors import ConfigError, DataError, UserCodeError
from nemo_offload_rl.keys.data import BUILT_IN, EnvConfig
from nemo_offload_rl.targets import UserCode

type CodeOfEnvironments = Mapping[str, Sequence[UserCode]]
"""The code of each of the user's environments, by name."""

logger = logging.getLogger(__name__)

AGENT_TIMEOUT_S = 600.0
_SPELLINGS = re.compile(r"%|^\s*-?\d+\.0*\s*$")  # percentages, and whole numbers with a decimal point


def load_code(
    settings: Mapping[str, EnvConfig], given: Mapping[str, Any] | None = None, *, has_endpoint: bool = False
) -> dict[str, Sequence[UserCode]]:
    """Import the code that `env.*.target` names.

    Args:
        settings: The keys `env.*`.
        given: Rewards, lists of rewards or environments from Python code, by name, which replace the targets.
        has_endpoint: Whether the engines serve agents over HTTP.

    Raises:
        UserCodeError: An import failed.
        ConfigError: An environment is neither built in nor a user's, or is an agent without an endpoint.
    """
    code: dict[str, Sequence[UserCode]] = {}
    if not isinstance(given, Mapping | None):
        raise UserCodeError(f"environments is a {type(given).__name__}; give a dictionary from the NAME of env.NAME")
    for name, value in (given or {}).items():
        if name not in settings:
            raise ConfigError(
                f"environments has {name}, but the configuration has no env.{name}; add it, with "
                f"+env.{name}.num_workers=2"
            )
        values = value if isinstance(value, list | tuple) else [value]
        weights = settings[name].weights
        if weights is not None and len(weights) != len(values):
            raise ConfigError(
                f"env.{name}.weights has {len(weights)} numbers, but environments[{name!r}] has {len(values)} "
                "functions; write one weight for each"
            )
        code[name] = [UserCode(f"environments[{name!r}]", one) for one in values]
    for name, section in settings.items():
        if name in code:
            if is_agent(code[name]):
                _check_agent(name, section, has_endpoint=has_endpoint)
        elif section.target is not None:
            targets = (section.target,) if isinstance(section.target, str) else section.target
            code[name] = [UserCode.named(f"env.{name}.target", target, section.kwargs) for target in targets]
            if is_agent(code[name]):
                _check_agent(name, section, has_endpoint=has_endpoint)
        elif name not in BUILT_IN:
            raise ConfigError(
                f"env.{name} is not an environment of this package ({', '.join(BUILT_IN)}); set env.{name}.target to "
                "your own code, or correct the name"
            )
    return code


@contextmanager
def open_environments(
    settings: Mapping[str, EnvConfig], code: CodeOfEnvironments, prompts: Splits[Prompt], *, needs_answers: bool = True
) -> Iterator[dict[str, Environment | AgentEnvironment]]:
    """Make the environments, by name, for the `with` block.

    Args:
        settings: The keys `env.*`.
        code: From `load_code`.
        prompts: All prompts of the run; a user's reward may ask for the columns of their rows.
        needs_answers: Refuse data sets without answers, and do not only warn; distillation can do without.

    Raises:
        UserCodeError: A user's environment cannot be made, or asks for an argument that it does not get.
        DataError: A data set has no answer that a response could equal.
    """
    environments: dict[str, Environment | AgentEnvironment] = {}
    try:
        for name, section in settings.items():
            if name in code and is_agent(code[name]):
                (part,), timeout_s = code[name], section.timeout_s or AGENT_TIMEOUT_S
                environments[name] = AgentEnvironment(
                    part,
                    num_workers=section.num_workers,
                    timeout_s=timeout_s,
                    name=f"env.{name}",
                    on_error=section.on_error,
                )
                continue
            if name in code:
                environment = custom_environment(
                    name,
                    code[name],
                    weights=section.weights,
                    columns=_columns(name, prompts),
                    num_workers=section.num_workers,
                    timeout_s=section.timeout_s,
                    on_error=section.on_error,
                )
            elif name == "arithmetic":
                environment = ArithmeticEnvironment()
            else:
                environment = MathEnvironment(
                    num_workers=section.num_workers,
                    timeout_s=section.timeout_s or SCORING_TIMEOUT_S,
                    verifier=section.math_verify_impl,
                    on_error=section.on_error,
                )
            message = section.retry_message
            environments[name] = environment if message is None else RetryEnvironment(environment, message)
            if isinstance(environment, ArithmeticEnvironment | MathEnvironment):
                _check_references(name, environment, prompts, needs_answers=needs_answers)
        yield environments
    finally:
        for environment in environments.values():
            environment.close()


def _check_agent(name: str, section: EnvConfig, *, has_endpoint: bool) -> None:
    key = f"env.{name}"
    if not has_endpoint:
        raise ConfigError(
            f"{key}.target is an agent (it has a method run), which needs the engines' HTTP server; set "
            "policy.generation.vllm_cfg.expose_http_server and async_engine to true"
        )
    given = "retry_message" if section.retry_message is not None else "weights" if section.weights is not None else None
    if given is not None:
        raise ConfigError(
            f"{key}.{given} is set, but {key}.target is an agent, and agents do not use it; set it to null"
        )


def _check_references(
    name: str, environment: ReferenceChecker, prompts: Splits[Prompt], *, needs_answers: bool
) -> None:
    """Check each answer of the data against itself; warn of answers that no response can match, by data set."""
    by_set: dict[str, list[Answer]] = {}
    for prompt in (*prompts.train, *prompts.validation):
        if prompt.env_name == name:
            by_set.setdefault(prompt.data_set, []).append(prompt.reference_answer)
    for data_set, references in by_set.items():
        texts = list(dict.fromkeys(text for reference in references for text in accepted(reference)))
        matching = {text for text, is_right in zip(texts, environment.match_themselves(texts), strict=True) if is_right}
        blank = [one for one in references if not any(text.strip() for text in accepted(one))]
        lost = [one for one in references if one not in blank and matching.isdisjoint(accepted(one))]
        if len(blank) + len(lost) == len(references) and (needs_answers or lost):
            raise DataError(
                f"data set {data_set}: env.{name} would judge every response wrong, because not one of "
                f"{len(references)} answers equals itself, such as {references[0]!r:.80}; name the field with the "
                "answers (output_key), or set env_name to another environment"
            )
        texts = [one for one in references if environment.compares_text and any(map(_SPELLINGS.search, accepted(one)))]
        for found, fact in (
            (blank, "are blank, so no response to these prompts can be right"),
            (lost, "do not equal themselves, so no response to these prompts can be right"),
            (texts, "are compared as text, so the same number in another spelling is wrong"),
        ):
            if found:
                logger.warning(
                    "data set %s: %d of %d answers for env.%s %s, such as %.80r",
                    data_set, len(found), len(references), name, fact, found[0],
                )  # fmt: skip


def _columns(name: str, prompts: Splits[Prompt]) -> set[str]:
    """Return the columns that all rows of an environment have."""
    rows = [prompt.metadata for prompt in (*prompts.train, *prompts.validation) if prompt.env_name == name]
    return set(rows[0]).intersection(*rows[1:]) if rows else set()
