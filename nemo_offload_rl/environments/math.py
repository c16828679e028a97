"""Mathematical answers, compared in killable processes: as mathematics by the library math-verify, or as DAPO does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_offload_rl.environments.dapo_math import compared_answer
from nemo_offload_rl.environments.grading_pool import GradingPool, graded
from nemo_offload_rl.environments.interfaces import Observation, Response, Score, Unscored
from nemo_offload_rl.environments.outcomes import OnError, Outcome, settled


def verified_answer(response_text: str, reference_answer: str) -> tuple[bool, str | None]:
    """Compare the answer found in a response (LaTeX, a boxed formula or a plain number) with the reference.

    A percentage counts by its value and by its number: 5%, 5 and 0.05 are equal. There is no time limit: sympy may
    think forever about an answer such as a tower of powers.

    Returns:
        Whether they are equal, and the answer, its formula written in one way; None where there is none.
    """
    import math_verify  # heavy (sympy)

    reference, answer = _parsed(f"\\boxed{{{reference_answer}}}"), _parsed(response_text)
    return bool(math_verify.verify(reference, answer, timeout_seconds=0)), str(answer[0]) if answer else None


def _parsed(text: str) -> list[Any]:
    """What math-verify reads: a formula, if it can, and its text.

    Of percentages in LaTeX it reads the text alone (math-verify 0.9.0 with latex2sympy2-extended 1.11.0), so they are
    read once more as plain text.
    """
    import math_verify

    # Its own time limits, which 0 switches off, cannot interrupt C code; the pool kills the process instead.
    found = list(math_verify.parse(text, parsing_timeout=0))
    written = found[-1] if found else None
    if isinstance(written, str) and "%" in written:
        found = [*math_verify.parse(written.replace("\\%", "%"), parsing_timeout=0), *found]
    return found


VERIFIERS: Mapping[str, Callable[[str, str], tuple[bool, str | None]]] = {
    "hf_math_verify": verified_answer,
    "dapo_math_verify": compared_answer,
}
_SAID = {"hf_math_verify": "\\boxed{{{}}}", "dapo_math_verify": "Answer: {}"}
_PLAIN_NUMBER = re.compile(r"-?\d{1,15}")


class MathEnvironment:
    """Reward 1 for an answer equivalent to the reference, else 0; none where grading took too long or failed.

    Args:
        num_workers: Processes that grade; 0 grades in this process, without a time limit.
        timeout_s: Seconds that one response may take.
        verifier: What decides, a name of `VERIFIERS`.
        on_error: The key `env.math.on_error`.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        verifier: str = "hf_math_verify",
        on_error: OnError = None,
    ) -> None:
        self._verify = VERIFIERS[verifier]
        self._said = _SAID[verifier]
        self.compares_text = verifier == "dapo_math_verify"
        self._timeout_s = timeout_s
        self._on_error: OnError = on_error
        self._pool = None
        if num_workers:
            self._pool = GradingPool(self._verify, num_workers=num_workers, timeout_s=timeout_s, warm_up=("1", "1"))

    def step(self, responses: Sequence[Response]) -> Sequence[Score | Observation | Unscored]:
        """See `Environment`.

        Raises:
            UserCodeError: A response could not be graded, and `on_error` is "raise".
        """
        return settled(
            responses,
            self._outcomes,
            on_error=self._on_error,
            name="env.math",
            what="scores",
            timeout_s=self._timeout_s,
        )

    def _outcomes(self, responses: Sequence[Response]) -> list[Outcome]:
        jobs = [(response.text, response.reference_answer) for response in responses]
        answers = [graded(self._verify, job) for job in jobs] if self._pool is None else self._pool.map(jobs)
        return [_score(*answer) if isinstance(answer, tuple) else answer for answer in answers]

    def match_themselves(self, references: Sequence[str]) -> list[bool]:
        """See `ReferenceChecker`."""
        asked = [reference for reference in dict.fromkeys(references) if not _PLAIN_NUMBER.fullmatch(reference)]
        responses = [
            Response(
                prompt_text="",
                text=self._said.format(reference),
                truncated=False,
                reference_answer=reference,
                metadata={},
            )
            for reference in asked
        ]
        outcomes = zip(asked, self._outcomes(responses), strict=True)
        found = {reference: isinstance(outcome, Score) and outcome.correct for reference, outcome in outcomes}
        return [found.get(reference, True) for reference in references]

    def close(self) -> None:
        """End the grading processes; safe to call twice."""
        if self._pool is not None:
            self._pool.close()


def _score(correct: bool, answer: str | None) -> Score:
    return Score(reward=float(correct), correct=correct, answer=answer)
