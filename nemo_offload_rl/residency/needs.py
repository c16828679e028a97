"""Kinds of passes, and the device memory that a pass needs for its number of tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum


class PassKind(StrEnum):
    """Kind of a pass. Each has its own need: a pass without backward tells nothing about one with backward."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    LOGPROBS = "logprobs"
    REFERENCE = "reference logprobs"
    TEACHER = "teacher"


@dataclass(frozen=True)
class PassNeed:
    """Device memory that one pass takes in addition to the state groups that are there before and after it.

    Gradients that stay after a training pass are state and not part of the need.

    Attributes:
        fixed_bytes: Bytes that do not depend on tokens. Negative for a moment before all gradients are there.
        bytes_per_token: Bytes of each token of the largest micro-batch.
        other_moments: Needs at other moments of the pass; the largest counts.
    """

    fixed_bytes: int
    bytes_per_token: float
    other_moments: tuple[PassNeed, ...] = ()

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a pass with micro-batches of up to so many tokens, at least 0."""
        own_bytes = self.fixed_bytes + int(self.bytes_per_token * num_tokens)
        return max(0, own_bytes, *(moment.num_bytes(num_tokens) for moment in self.other_moments))

    def most_tokens(self, num_bytes: int) -> int:
        """Return the tokens of the largest micro-batch that these bytes suffice for; 0 if they do for none.

        `sys.maxsize` if tokens need nothing.
        """
        left_bytes = num_bytes - self.fixed_bytes
        own_tokens = sys.maxsize if self.bytes_per_token <= 0 else int(left_bytes / self.bytes_per_token)
        own_tokens = own_tokens if left_bytes >= 0 else 0
        return min(own_tokens, *(moment.most_tokens(num_bytes) for moment in self.other_moments), sys.maxsize)
