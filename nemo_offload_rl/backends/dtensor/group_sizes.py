"""Chooses how many micro-batches pass through a model's parts together, from the memory that earlier groups needed."""

from dataclasses import dataclass, field

from nemo_offload_rl.residency import PassingParts
from nemo_offload_rl.residency.needs import LearnedNeed


@dataclass
class _Kind:
    """Passes with or without gradients.

    Attributes:
        num_kept: Number of hidden states kept for each micro-batch.
        most_bytes: Limit of a group's kept bytes; None until memory has run out.
        need: Memory of a group in addition to the kept bytes, by the tokens of its largest micro-batch.
    """

    num_kept: int
    most_bytes: int | None = None
    need: LearnedNeed = field(default_factory=LearnedNeed)


class GroupSizes:
    """Sizes of groups of micro-batches, and the choice of parts that stay on the device for the update.

    Args:
        passing: Moves the parts.
        largest_bytes: Bytes of the largest part's parameters.
        num_kept_reading: Number of hidden states that a pass without gradients keeps for each micro-batch.
        num_kept_training: The same for a training pass.

    Attributes:
        num_together: Micro-batches of the present group; 0 before the first group of a pass.
    """

    def __init__(
        self, passing: PassingParts, largest_bytes: int, *, num_kept_reading: int, num_kept_training: int
    ) -> None:
        self.num_together = 0
        self._passing = passing
        self._largest_bytes = largest_bytes
        self._reading, self._training = _Kind(num_kept_reading), _Kind(num_kept_training)
        self._kind = self._reading  # of the present pass
        self._kept_bytes = 0  # of the present group
        self._added_bytes = self._added_tokens = self._num_added = 0  # since the group began
        self._limit_bytes = 0  # of the present group's kept bytes
        self._begun_bytes = 0  # allocated on the device when the present group began
        self._tokens = 0  # of the largest micro-batch of the pass
        self._num_keeping_nothing = 0  # number of next training passes that keep no parts for the update
        self._next_pause = 1  # training passes that keep no parts after memory runs out again
        self._may_keep = False  # the present pass may keep parts for the update
        self._has_kept = False  # the present pass has kept a part

    def begin(self, tokens: int, *, trains: bool) -> None:
        """Begin a pass over micro-batches of up to `tokens` tokens."""
        self._kind = self._training if trains else self._reading
        self._tokens = tokens
        self.num_together = 0
        self._has_kept = False
        if trains:
            self._may_keep = self._num_keeping_nothing == 0
            self._num_keeping_nothing = max(0, self._num_keeping_nothing - 1)

    def begin_group(self) -> None:
        """Begin a group, before it takes memory."""
        free_bytes = self._passing.free_bytes()
        self._begun_bytes = self._passing.allocated_bytes()
        self._passing.restart_peak()
        if self._kind.need.is_known:
            work_bytes = self._kind.need.expected_with_margin(self._tokens)
        else:
            # A pass takes at most 16 bytes for each of a part's parameters (the cast copy, gradients, the next part).
            # One layer, or the logits, of a micro-batch get half of the rest; that may be too little.
            work_bytes = free_bytes - (free_bytes - 4 * self._largest_bytes) // 2
        self._limit_bytes = free_bytes - work_bytes
        if self._kind.most_bytes is not None:
            self._limit_bytes = min(self._limit_bytes, self._kind.most_bytes)
        self._added_bytes = self._added_tokens = self._num_added = 0

    def has_room(self, num_tokens: int) -> bool:
        """Tell whether the group can take a micro-batch of `num_tokens` tokens; the first always has room."""
        if not self._num_added:
            return True
        added_bytes = self._added_bytes
        return added_bytes + added_bytes * num_tokens // self._added_tokens <= self._limit_bytes

    def add(self, num_tokens: int, hidden_bytes: int, others_bytes: int) -> None:
        """Count an embedded micro-batch: bytes of one of its hidden states, and of the layers' other arguments."""
        self._added_bytes += self._kind.num_kept * hidden_bytes + others_bytes
        self._added_tokens += num_tokens
        self._num_added += 1
        self._kept_bytes, self.num_together = self._added_bytes, self._num_added

    def learn(self) -> None:
        """Record the memory that the present group needed, which limits the size of the next groups.

        Each further micro-batch raises the peak by at most its kept hidden states, wherever in the pass the peak is.
        """
        peak_bytes = self._passing.restart_peak()
        if peak_bytes and not self._has_kept:
            self._kind.need.include(peak_bytes - self._begun_bytes - self._kept_bytes, self._tokens)

    def keeps(self, index: int) -> bool:
        """Keep a part for the update if the rest of the training pass has room; return whether it was kept."""
        if not self._may_keep:
            return False
        self.learn()
        need = self._training.need
        if not need.is_known or not self._passing.keep(index, need.expected_with_margin(self._tokens)):
            return False
        self._has_kept = True
        return True

    def shrink(self) -> bool:
        """After memory has run out, stop keeping parts for the update or, if none were kept, halve the group size.

        Parts are kept again after a pause, which doubles each time.

        Returns:
            False if no parts were kept and the group had one micro-batch.
        """
        if self._has_kept:
            self._has_kept = False
            self._num_keeping_nothing = 1 + self._next_pause  # the repeated pass included
            self._next_pause *= 2
            return True
        had_several = self.num_together > 1
        if self.num_together:
            # Group sizes are estimated from the first micro-batches, so a group may exceed the limit already.
            kind = self._kind
            most_bytes = self._kept_bytes if kind.most_bytes is None else min(self._kept_bytes, kind.most_bytes)
            kind.most_bytes = most_bytes // 2
        self.num_together = 0  # the next pass may fail before it has a group to divide
        return had_several
