"""What every algorithm reports about a step, under the names of docs/metrics.md."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nemo_offload_rl.policy.interfaces import TrainResult
from nemo_offload_rl.residency import TransitionReport, totals

logger = logging.getLogger(__name__)


def update_metrics(result: TrainResult) -> dict[str, float]:
    """Loss, gradient norm, learning rate and what the loss measured, over the step's optimizer steps.

    Means; the extremes of what ends in `_min` and `_max`; the last learning rate.
    """
    metrics = {
        "loss": _mean(result.loss),
        "grad_norm": _mean(result.grad_norm),
        "learning_rate": result.learning_rate[-1],
    }
    metrics.update({name: _reduce(name, values) for name, values in result.metrics.items() if name != "loss"})
    return metrics


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
