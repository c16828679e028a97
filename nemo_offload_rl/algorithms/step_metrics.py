"""What every algorithm reports about a step, under the names of docs/reference/metrics.md."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nemo_offload_rl.policy.interfaces import TrainResult
from nemo_offload_rl.residency import TransitionReport, totals

logger = logging.getLogger(__name__)


def update_metrics(result: TrainResult) -> dict[str, float]:
    """Loss, gradient norm, learning rate and what the loss measured, over the step's optimizer steps.

    Means; the extremes of what ends in `_min` and `_max`; the last learning rate. Of updates that were skipped nothing
    is in them, unless all of the step were.
    """
    num_steps = len(result.loss)
    applied = [step for step in range(num_steps) if not (result.is_skipped and result.is_skipped[step])]
    measured = {**result.metrics, "loss": result.loss, "grad_norm": result.grad_norm}
    metrics = {
        name: _reduce(name, [values[step] for step in applied or range(num_steps)]) for name, values in measured.items()
    }
    return metrics | {
        "learning_rate": result.learning_rate[-1],
        "skipped_updates": float(num_steps - len(applied)),
    }


def residency_metrics(reports_by_rank: Sequence[Sequence[TransitionReport]]) -> dict[str, float]:
    """Bytes summed over ranks; seconds of the slowest rank. What stayed on a device unplanned is told as a warning."""
    for rank, reports in enumerate(reports_by_rank):
        for report in reports:
            for leftover in report.leftovers:
                logger.warning("policy worker %d, %s: still on the device: %s", rank, report.target.value, leftover)
    by_rank = [totals(list(reports)) for reports in reports_by_rank]
    return {
        name: max(rank[name] for rank in by_rank) if name.endswith("_s") else sum(rank[name] for rank in by_rank)
        for name in by_rank[0]
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _reduce(name: str, values: Sequence[float]) -> float:
    if name.endswith("_min"):
        return min(values)
    if name.endswith("_max"):
        return max(values)
    return _mean(values)
