"""Arithmetic: the answer is one integer, compared exactly."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_offload_rl.environments.interfaces import Response, Score


class ArithmeticEnvironment:
    """Reward 1 for the right integer, else 0, also for a response that was cut before it ended.

    The answer is what stands after the last `=` of the response, or all of it where there is none, so a response may
    show its working first.
    """

    def step(self, responses: Sequence[Response]) -> list[Score]:
        """One score for each response, in their order."""
        return [self._score(response) for response in responses]

    compares_text = True

    def match_themselves(self, references: Sequence[str]) -> list[bool]:
        """See `ReferenceChecker`."""
        return ["=" not in reference for reference in references]

    def close(self) -> None:
        """Nothing to end."""

    @staticmethod
    def _score(response: Response) -> Score:
        answer = response.text.rpartition("=")[2].strip()
        correct = not response.truncated and answer == response.reference_answer.strip()
        return Score(reward=float(correct), correct=correct, answer=answer)
