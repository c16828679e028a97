"""Environments that drive rollouts themselves: agents, which talk to the policy as to any model behind OpenAI's API.

An agent is an object with a method `run(task) -> float`, sync or async. It makes any number of calls to
`task.base_url`, and returns the reward; the engine records prompts, tokens and masks.
"""

import asyncio
import inspect
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from nemo_offload_rl.data.records import Answer, Message
from nemo_offload_rl.environments.grading_pool import Failed, GradingPool, MadeOnce, TimedOut
from nemo_offload_rl.environments.outcomes import OnError, Outcome, plain_score
from nemo_offload_rl.targets import UserCode, told
from nemo_offload_rl.utils.threads import in_thread

_CHATTY = ("httpx", "httpx2")  # HTTP clients that write a line for every call
_SLACK_S = 10.0  # extra time of a worker beyond the limit of its rollouts


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """One rollout of an agent.

    Attributes:
        base_url: URL of an API like OpenAI's for this rollout alone; conversations there are trained on.
        api_key: Key of the API.
        model: The model's name in the API.
        question: The row's prompt without prompt files, since agents write their messages themselves. For a prompt of
            messages, the text of the user's last one.
        answer: The reference answer; a list if the row has several.
        metadata: The row's other columns.
        messages: The row's prompt as messages: one user message if the row has text.
    """

    base_url: str
    api_key: str
    model: str
    question: str
    answer: Answer
    metadata: Mapping[str, Any]
    messages: Sequence[Message]


def is_agent(parts: Sequence[UserCode]) -> bool:
    """Tell whether a user's code is an agent: one class or object with a method `run` and without `step`."""
    return len(parts) == 1 and hasattr(parts[0].value, "run") and not hasattr(parts[0].value, "step")


@dataclass(kw_only=True)
class AgentRuns(MadeOnce):
    """Runs many rollouts of an agent at once, in this process; `timeout_s` limits each."""

    timeout_s: float

    def __call__(self, tasks: Sequence[AgentTask]) -> list[Outcome]:
        """Run the tasks and return their outcomes; without tasks, only make the agent."""
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        hosts = {urlsplit(task.base_url).hostname or "" for task in tasks}
        _reach_directly({"localhost", "127.0.0.1", "::1", *hosts})  # clients may read `no_proxy` when they are made
        self.made()
        if not tasks:
            return []
        # In its own thread, because a notebook's main thread already runs an event loop.
        return in_thread(asyncio.run, self._together(tasks)).result()

    async def _together(self, tasks: Sequence[AgentTask]) -> list[Outcome]:
        return list(await asyncio.gather(*map(self._one, tasks)))

    async def _one(self, task: AgentTask) -> Outcome:
        run = self.made().run
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                if inspect.iscoroutinefunction(run):
                    value = await run(task)
                else:
                    value = await asyncio.wrap_future(in_thread(run, task))
        except Exception as error:  # an agent may raise anything
            return TimedOut() if limit.expired() else Failed(told(error))
        try:
            return plain_score(value)
        except ValueError as error:
            return Failed(f"run returned {value!r:.80}; {error}")


class AgentEnvironment:
    """Environment of one agent; spreads its rollouts over processes.

    Args:
        part: The agent, or its class.
        num_workers: Processes; 0 runs all rollouts in this process.
        timeout_s: Seconds for one rollout.
        name: For messages: `env.NAME`.
        on_error: The key `env.NAME.on_error`, which the caller of `run` follows; None skips all failures.

    Raises:
        UserCodeError: The agent cannot be made, or its `run` does not take a task.
    """

    def __init__(
        self, part: UserCode, *, num_workers: int, timeout_s: float, name: str, on_error: OnError = None
    ) -> None:
        is_class = inspect.isclass(part.value)
        if is_class:
            part.check_positional(())
        UserCode(f"{part.label}.run", part.value.run).check_positional(("self", "task") if is_class else ("task",))
        self._runs = AgentRuns(part=part, timeout_s=timeout_s)
        self.name = name
        self.timeout_s = timeout_s
        self.on_error: OnError = on_error
        self._num_workers = num_workers
        self._pool: GradingPool | None = None
        if num_workers:
            limit_s = timeout_s + _SLACK_S
            self._pool = GradingPool(self._runs, num_workers=num_workers, timeout_s=limit_s, warm_up=([],), waits=True)
        else:
            self._runs([])

    def run(self, tasks: Sequence[AgentTask]) -> list[Outcome]:
        """Run the tasks and return the score or failure of each rollout."""
        if self._pool is None:
            return self._runs(tasks)
        shares = [tasks[worker :: self._num_workers] for worker in range(min(self._num_workers, len(tasks)))]
        outcomes: list[Any] = [None] * len(tasks)
        for worker, answer in enumerate(self._pool.map([(list(share),) for share in shares])):
            share = answer if isinstance(answer, list) else [answer] * len(shares[worker])
            outcomes[worker :: self._num_workers] = share
        return outcomes

    def close(self) -> None:
        """End worker processes; safe to call twice."""
        if self._pool is not None:
            self._pool.close()
        else:
            self._runs.close()


def _reach_directly(hosts: Collection[str]) -> None:
    """Make this process's HTTP clients bypass any proxy for the engines' hosts, which it may not reach."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    known = [name.strip() for name in listed.split(",") if name.strip()]
    added = sorted(set(hosts) - {*known, ""})
    if added and "*" not in known:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*known, *added])
