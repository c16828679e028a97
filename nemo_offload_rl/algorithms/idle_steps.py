"""Steps with nothing to learn from: all advantages are 0, as where all responses to each prompt get the same reward."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

WARNED_AFTER = 3


class IdleSteps:
    """Counts such steps in a row. Warns after `WARNED_AFTER` of them, and whenever they have doubled since."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._warned_at = WARNED_AFTER

    def count(self, metrics: Mapping[str, float]) -> None:
        """Take note of a step by its `train` metrics."""
        if metrics["advantage_min"] != 0 or metrics["advantage_max"] != 0:
            self._in_a_row, self._warned_at = 0, WARNED_AFTER
            return
        self._in_a_row += 1
        if self._in_a_row == self._warned_at:
            self._warned_at *= 2
            logger.warning(
                "nothing to learn from in the last %d steps: all advantages are 0 (rewards from %g to %g, %.0f %% of "
                "responses cut off). %s",
                self._in_a_row,
                metrics["reward_min"],
                metrics["reward_max"],
                100 * metrics["truncation_rate"],
                _advice(metrics),
            )


def _advice(metrics: Mapping[str, float]) -> str:
    if metrics["truncation_rate"] > 0.5:
        return "Raise policy.generation.max_new_tokens, so that responses can end."
    if metrics["reward_min"] < metrics["reward_max"]:
        return (
            "All responses to a prompt got the same reward: raise grpo.num_generations_per_prompt, or set "
            "grpo.use_dynamic_sampling=true."
        )
    return (
        "Every response got the same reward. Look at responses and expected answers (grpo.log_rollouts=true): does the "
        "environment find the answers, and are the prompts neither too hard nor too easy?"
    )
