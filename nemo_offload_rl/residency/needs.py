"""Kinds of passes, and the device memory that a pass needs for its number of tokens: estimated, then measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

RESERVE_BYTES = 1 << 30
MARGIN = 1.1  # later batches may be somewhat larger than those seen


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
        fixed_bytes: Bytes that do not depend on tokens; negative at a moment before all gradients are there.
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

    def plus(self, num_bytes: int) -> PassNeed:
        """Return the need of a pass that takes so many bytes more at every moment."""
        moments = tuple(moment.plus(num_bytes) for moment in self.other_moments)
        return PassNeed(self.fixed_bytes + num_bytes, self.bytes_per_token, moments)


class LearnedNeed:
    """Device memory that passes of one kind need in addition to state: an estimate, corrected by measurements.

    Args:
        estimate: Need as estimated before the run; None if there is none.

    Attributes:
        most_bytes: Most bytes that were measured; 0 before the first measurement.
        most_kept_bytes: Most bytes that passes had when their phase ended, with those that the allocator kept for them.
        most_tokens: Tokens of the largest pass that was measured.
        num_passes: Passes that were measured.
    """

    def __init__(self, estimate: PassNeed | None = None) -> None:
        self.most_bytes = self.most_kept_bytes = self.most_tokens = self.num_passes = 0
        self._estimate = estimate
        self._is_measured = False

    @property
    def is_known(self) -> bool:
        """Tell whether a pass was measured or estimated."""
        return self._is_measured or self._estimate is not None

    def include(self, num_bytes: int, num_tokens: int) -> None:
        """Record a measured pass."""
        self._is_measured = True
        self.most_bytes, self.most_tokens = max(self.most_bytes, num_bytes), max(self.most_tokens, num_tokens)

    def include_kept(self, num_bytes: int) -> None:
        """Record what passes had when their phase ended."""
        self.most_kept_bytes = max(self.most_kept_bytes, num_bytes)

    def bytes_to_leave(self, num_tokens: int) -> int:
        """Bytes that state must leave to a pass: those expected and a tenth, or those that the allocator keeps for it.

        What the allocator keeps has served whole passes, so it needs no margin.
        """
        return max(int(MARGIN * self.expected_bytes(num_tokens)), self.most_kept_bytes)

    def expected_bytes(self, num_tokens: int) -> int:
        """Bytes of a pass with micro-batches of up to so many tokens.

        At least those that were measured. Beyond the largest measured pass they grow as the estimate does, or without
        one in proportion to the tokens.
        """
        estimate, seen = self._estimate, self.most_tokens
        if not self._is_measured:
            return estimate.num_bytes(num_tokens) if estimate is not None else 0
        if num_tokens <= seen or not seen:
            return self.most_bytes
        if estimate is not None and (seen_bytes := estimate.num_bytes(seen)):
            return self.most_bytes * estimate.num_bytes(num_tokens) // seen_bytes
        return self.most_bytes * num_tokens // seen

    def expected_with_margin(self, num_tokens: int) -> int:
        """Bytes to keep free for a pass: those expected, a tenth, and a reserve."""
        return int(MARGIN * self.expected_bytes(num_tokens)) + RESERVE_BYTES
