"""Scores mathematical answers: as mathematics (library math-verify), as text (DAPO's rule) or as integers."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_offload_rl.data.records import Answer, accepted
from nemo_offload_rl.environments.grading_pool import GradingPool, graded
from nemo_offload_rl.environments.interfaces import Environment, Observation, Response, Score, Unscored
from nemo_offload_rl.environments.outcomes import OnError, Outcome, settled

# math-verify warns in each worker process that it has no time limit; the pool has one.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).addFilter(lambda record: "Timeout is disabled" not in record.getMessage())


def verified_answer(response_text: str, reference_answer: Answer) -> tuple[bool, str | None]:
    """Compare the answer found in a response (LaTeX, a boxed formula or a plain number) with each right one.

    A percentage matches its value and its number: 5%, 5 and 0.05 are equal. There is no time limit: sympy may compute
    forever on an answer such as a tower of powers.

    Returns:
        True if it equals one of them, and the answer as one formula (None if there is none).
    """
    answer = _parsed(response_text)
    is_right = any(_equal(_parsed(f"\\boxed{{{one}}}"), answer) for one in accepted(reference_answer))
    return is_right, str(answer[0]) if answer else None


def same_answers(first_text: str, second_text: str) -> bool:
    """Tell whether two responses give equal answers, such as 1/2 and 0.5. There is no time limit.

    math-verify compares an assignment such as x=5 with 5 in one direction only, so either one counts.
    """
    first, second = _parsed(first_text), _parsed(second_text)
    return _equal(first, second) or _equal(second, first)


def _equal(reference: list[Any], answer: list[Any]) -> bool:
    import math_verify  # heavy (sympy)

    return bool(math_verify.verify(reference, answer, timeout_seconds=0))


def _parsed(text: str) -> list[Any]:
    """Return the formula, if math-verify can read one, and its text.

    math-verify 0.9.0 with latex2sympy2-extended 1.11.0 reads only the text of percentages in LaTeX, so they are parsed
    again as plain text.
    """
    import math_verify

    # 0 turns off math-verify's time limits, which cannot interrupt C code; the pool kills the process instead.
    found = list(math_verify.parse(text, parsing_timeout=0))
    written = found[-1] if found else None
    if isinstance(written, str) and "%" in written:
        found = [*math_verify.parse(written.replace("\\%", "%"), parsing_timeout=0), *found]
    return found


# -- DAPO's rule -------------------------------------------------------------------------------------------------------

# As in DAPO's own code (arXiv 2503.14476; verl/utils/reward_score/math_dapo.py), whose normalization is Minerva's
# (arXiv 2206.14858, appendix D.1; lm-evaluation-harness, minerva_math).
_READ_CHARACTERS = 300  # at the end of a response
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
# The order matters: a removal may create a later entry.
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
_REWRITTEN = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    *((rf"(\\{command}\{{)(.*?)(\}})", r"\2") for command in ("text", "textbf", "overline")),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


def compared_answer(response_text: str, reference_answer: Answer) -> tuple[bool, str | None]:
    """Compare the response's last `Answer:` line with each right one; also return it, or None without such a line."""
    answers = _ANSWER.findall(response_text[-_READ_CHARACTERS:])
    if not answers:
        return False, None
    answer = normalized(answers[-1])
    return answer in map(normalized, accepted(reference_answer)), answer


def normalized(answer: str) -> str:
    """Return the text after the last `=`, without units, filler words and variants of LaTeX."""
    text = answer.split("=")[-1]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    for pattern, replacement in _REWRITTEN:
        text = re.sub(pattern, replacement, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


# -- environments ------------------------------------------------------------------------------------------------------

VERIFIERS: Mapping[str, Callable[[str, Answer], tuple[bool, str | None]]] = {
    "hf_math_verify": verified_answer,
    "dapo_math_verify": compared_answer,
}
_SAID = {"hf_math_verify": "\\boxed{{{}}}", "dapo_math_verify": "Answer: {}"}
_PLAIN_NUMBER = re.compile(r"-?\d{1,15}")


class MathEnvironment:
    """An `Environment` and `ReferenceChecker`: reward 1 for an answer equivalent to the reference, else 0.

    A response has no score if its grading timed out or failed.

    Args:
        num_workers: Processes that grade; 0 grades in this process, without a time limit.
        timeout_s: Seconds that one response may take.
        verifier: A name of `VERIFIERS`.
        on_error: The key `env.math.on_error`.
    """

    def __init__(
        self, *, num_workers: int, timeout_s: float, verifier: str = "hf_math_verify", on_error: OnError = None
    ) -> None:
        self._verify = VERIFIERS[verifier]
        self._said = _SAID[verifier]
        self.compares_text = verifier == "dapo_math_verify"
        self._timeout_s = timeout_s
        self._on_error: OnError = on_error
        self._pool = None
        if num_workers:
            warm_up = (self._verify, "1", "1")
            self._pool = GradingPool(_called, num_workers=num_workers, timeout_s=timeout_s, warm_up=warm_up)

    @property
    def overlaps(self) -> bool:
        """Whether several threads may call `step` at the same time."""
        return self._pool is not None

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
        answers = self._map([(self._verify, response.text, response.reference_answer) for response in responses])
        return [_score(*answer) if isinstance(answer, tuple) else answer for answer in answers]

    def same_answers(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Tell for pairs of responses whether their answers are equal; False where that cannot be told in time."""
        if self.compares_text:
            return [compared_answer(first, "")[1] == compared_answer(second, "")[1] for first, second in pairs]
        return [outcome is True for outcome in self._map([(same_answers, *pair) for pair in pairs])]

    def _map(self, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [graded(_called, job) for job in jobs] if self._pool is None else self._pool.map(jobs)

    def match_themselves(self, references: Sequence[str]) -> list[bool]:
        asked = [reference for reference in dict.fromkeys(references) if not _PLAIN_NUMBER.fullmatch(reference)]
        responses = [
            Response(prompt_text="", text=self._said.format(one), truncated=False, reference_answer=one, metadata={})
            for one in asked
        ]
        outcomes = zip(asked, self._outcomes(responses), strict=True)
        found = {reference: isinstance(outcome, Score) and outcome.correct for reference, outcome in outcomes}
        return [found.get(reference, True) for reference in references]

    def close(self) -> None:
        """End the grading processes; safe to call twice."""
        if self._pool is not None:
            self._pool.close()


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class ArithmeticEnvironment:
    """An `Environment` and `ReferenceChecker`: reward 1 for the right integer after the last `=`, else 0.

    Without `=`, the whole response is the answer. A truncated response gets 0.
    """

    compares_text = True
    overlaps = True

    def step(self, responses: Sequence[Response]) -> list[Score]:
        return [self._scored(response) for response in responses]

    def match_themselves(self, references: Sequence[str]) -> list[bool]:
        return ["=" not in reference for reference in references]

    def close(self) -> None:
        """Do nothing."""

    @staticmethod
    def _scored(response: Response) -> Score:
        answer = response.text.rpartition("=")[2].strip()
        right = [one.strip() for one in accepted(response.reference_answer)]
        return _score(not response.truncated and answer in right, answer)


class RetryEnvironment:
    """Sends a message after each wrong answer of another environment while the policy has turns left.

    Args:
        environment: Environment that scores, and ends a rollout with a right answer.
        message: The text that follows a wrong answer.
    """

    def __init__(self, environment: Environment, message: str) -> None:
        self.environment = environment
        self.overlaps: bool = getattr(environment, "overlaps", False)
        self._message = message

    def step(self, responses: Sequence[Response]) -> Sequence[Score | Observation | Unscored]:
        outcomes = self.environment.step(responses)
        return [
            Observation(self._message, otherwise=outcome)
            if response.may_go_on and isinstance(outcome, Score) and not outcome.correct
            else outcome
            for response, outcome in zip(responses, outcomes, strict=True)
        ]

    def close(self) -> None:
        self.environment.close()


def _score(correct: bool, answer: str | None) -> Score:
    return Score(reward=float(correct), correct=correct, answer=answer)
