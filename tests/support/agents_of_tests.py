"""Agents that tests name, in processes of their own too."""

from __future__ import annotations

import os

import openai

from nemo_offload_rl.environments.agents import AgentTask
from nemo_offload_rl.environments.interfaces import Score


class Doubling:
    """Scores without a word."""

    def run(self, task: AgentTask) -> float:
        return 2.0 * float(task.question)


class TwoTurns:
    """Asks for a sum twice, the second time as an answer to the first, and rewards short answers.

    Args:
        hint: What the second turn says.
        aside: In some rollouts, ask something else too, in a conversation beside this one.
    """

    def __init__(self, hint: str = "=", aside: bool = False) -> None:
        self.hint = hint
        self.aside = aside
        self.pid = os.getpid()

    async def run(self, task: AgentTask) -> Score:
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as policy:
            messages, num_tokens = [{"role": "user", "content": task.question}], 0
            for told in (self.hint, None):
                answer = await policy.chat.completions.create(model=task.model, messages=messages)
                text = answer.choices[0].message.content
                num_tokens += answer.usage.completion_tokens
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": told}]
            if self.aside and sum(map(ord, task.base_url)) % 2:
                beside = [{"role": "user", "content": "7+7="}]
                await policy.chat.completions.create(model=task.model, messages=beside)
        right = text.strip() == task.answer
        return Score(reward=float(right) + 1 / num_tokens, correct=right)
