r"""DAPO's rule for mathematical answers: the line after the last `Answer:`, compared as text once it is normalized.

As in DAPO's own code (arXiv 2503.14476; verl/utils/reward_score/math_dapo.py), whose normalization is Minerva's
(arXiv 2206.14858, appendix D.1; lm-evaluation-harness, minerva_math). NeMo-RL calls it `dapo_math_verify`.
"""

from __future__ import annotations

import re

_READ_CHARACTERS = 300  # of the end of a response
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
# In this order: what is removed first may make up a later one.
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


def compared_answer(response_text: str, reference_answer: str) -> tuple[bool, str | None]:
    """Whether the response's last `Answer:` line says what the reference does, and what it says; None for no line."""
    answers = _ANSWER.findall(response_text[-_READ_CHARACTERS:])
    if not answers:
        return False, None
    answer = normalized(answers[-1])
    return answer == normalized(reference_answer), answer


def normalized(answer: str) -> str:
    """What follows the last `=`, without units, filler words, and the ways to write the same in LaTeX."""
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
