"""An environment as authors write them for the package `verifiers`; nothing in it knows of this project."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


class Repeating(vf.MultiTurnEnv):
    """Says the question again after every answer."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: object) -> vf.Messages:
        return [vf.UserMessage(content=f"Again: {state['answer']}")]


def length_of_answers(completion: vf.Messages) -> float:
    """Characters of all that the policy said."""
    return float(sum(len(message.content or "") for message in completion if message.role == "assistant"))


def load_environment(num_turns: int = 1) -> vf.Environment:
    """Of one turn the package's own."""
    rows = [{"question": "Who is there?", "answer": "me"}, {"question": "And where?", "answer": "here"}]
    rubric = vf.Rubric(funcs=[length_of_answers])
    arguments = {"dataset": Dataset.from_list(rows), "rubric": rubric, "system_prompt": "Be brief."}
    if num_turns == 1:
        return vf.SingleTurnEnv(**arguments)
    return Repeating(max_turns=num_turns, **arguments)
