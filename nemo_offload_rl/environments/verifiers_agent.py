"""Runs environments of the package `verifiers` (0.2) unchanged: they converse and score, the engine keeps the tokens.

https://github.com/PrimeIntellect-ai/verifiers. Install it with this package's extra `agents`.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from nemo_offload_rl.environments.agents import AgentTask
from nemo_offload_rl.environments.interfaces import Score
from nemo_offload_rl.errors import ConfigError

# Errors that the policy caused by saying nothing that verifiers can use; the rollout is scored.
_OF_THE_POLICY = ("EmptyModelResponseError", "OverlongPromptError")


class VerifiersAgent:
    """Drives rollouts of one environment.

    Args:
        environment: Name of an installed environment, for `verifiers.load_environment`.
        arguments: Arguments of its `load_environment`.
        correct_from: The reward from which a rollout counts as correct.

    Raises:
        ConfigError: The package is not installed, or the environment cannot be loaded.
    """

    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None, correct_from: float = 1.0) -> None:
        try:
            verifiers: Any = import_module("verifiers")  # optional: type checkers may not find it
        except ImportError as error:
            raise ConfigError(
                f"the package verifiers cannot be imported ({error}); install this package with its extra `agents`"
            ) from error
        try:
            self._environment = verifiers.load_environment(environment, **(arguments or {}))
        except (ValueError, RuntimeError, TypeError) as error:
            raise ConfigError(f"verifiers cannot load the environment {environment}: {error}") from error
        self._correct_from = correct_from

    async def run(self, task: AgentTask) -> Any:
        """Run one rollout and return its score; None if the environment gave no reward.

        A column `example_id` selects a row of the environment's own data set. Without it, the row's question is the
        user's message, and its answer goes to the rubric.
        """
        from openai import AsyncOpenAI

        clients: Any = import_module("verifiers.clients")
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, timeout=None) as client:
            output = await self._environment.run_rollout(
                self._input(task), clients.OpenAIChatCompletionsClient(client), task.model, sampling_args={}
            )
        error = output.get("error")
        if error is not None and not any(name in str(error) for name in _OF_THE_POLICY):
            raise RuntimeError(f"verifiers: {error}")
        reward = output.get("reward")
        return None if reward is None else Score(reward=reward, correct=reward >= self._correct_from)

    def _input(self, task: AgentTask) -> Any:
        number = task.metadata.get("example_id")
        if number is not None:
            return dict(self._environment.get_dataset()[int(number)])
        prompt = [dict(message) for message in task.messages]
        system = self._environment.system_prompt
        if system and prompt[0]["role"] != "system":
            prompt.insert(0, {"role": "system", "content": system})
        return {"prompt": prompt, "answer": task.answer, "info": dict(task.metadata), "example_id": 0}
