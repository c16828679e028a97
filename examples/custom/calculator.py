"""An environment with a tool: a response that calls the calculator gets its result, and the next is the answer.

The policy writes `<python>12 * 34</python>`. The code runs in a process that can only compute (`run_python`). A
response without a call is scored: 1 where what stands after its last `=` is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nemo_offload_rl import Observation, Response, Score, run_python


class Calculator:
    """See the file.

    Args:
        call: Regular expression of a call; its first group is the code.
        timeout_s: Seconds that the code may take.
    """

    def __init__(self, call: str = r"<python>(.*?)</python>", timeout_s: float = 2.0) -> None:
        self._call = re.compile(call, re.DOTALL)
        self._timeout_s = timeout_s

    def step(self, responses: Sequence[Response]) -> list[Score | Observation]:
        """A result for each response that calls the tool and may go on, a score for any other."""
        return [self._one(response) for response in responses]

    def _one(self, response: Response) -> Score | Observation:
        call = self._call.search(response.text)
        if call is not None and response.may_go_on:
            return Observation(run_python(call[1], timeout_s=self._timeout_s).output.strip())
        is_right = response.text.rpartition("=")[2].strip() == response.reference_answer
        return Score(reward=float(is_right), correct=is_right)
