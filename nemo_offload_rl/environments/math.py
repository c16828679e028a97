"""Mathematical answers, compared in killable processes: as mathematics by the library math-verify, or as DAPO does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nemo_offload_rl.environments.dapo_math import compared_answer
from nemo_offload_rl.environments.grading_pool import GradingPool, graded
from nemo_offload_rl.environments.interfaces import Observation, Response, Score, Unscored
from nemo_offload_rl.environments.outcomes import OnError, Outcome, settled


def verified_answer(response_text: str, reference_answer: str) -> tuple[bool, str | None]:
    """Whether the answer found in the response (LaTeX, a boxed formula or a plain number) equals the reference.

    Beside it that answer, as a formula is written in one way; None where there is none.

    It has no time limit of its own: sympy may think forever about an answer such as a tower of powers.
    """
    import math_verify  # heavy (sympy)

    # math-verify's own time limits, which 0 switches off, cannot interrupt C code; the pool kills the process instead.
    reference = math_verify.parse(f"\\boxed{{{reference_answer}}}", parsing_timeout=0)
    answer = math_verify.parse(response_text, parsing_timeout=0)
    return bool(math_verify.verify(reference, answer, timeout_seconds=0)), str(answer[0]) if answer else None


VERIFIERS: Mapping[str, Callable[[str, str], tuple[bool, str | None]]] = {
    "hf_math_verify": verified_answer,
    "dapo_math_verify": compared_answer,
}


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

    def close(self) -> None:
        """End the grading processes; safe to call twice."""
        if self._pool is not None:
            self._pool.close()


def _score(correct: bool, answer: str | None) -> Score:
    return Score(reward=float(correct), correct=correct, answer=answer)
