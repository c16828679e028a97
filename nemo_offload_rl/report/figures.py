"""Metrics of a run, and the table of the report's figures in the order of the page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_offload_rl.errors import DataError
from nemo_offload_rl.utils.logger import METRICS_FILE

OTHER = "other"
_OF_DRIVER = ("data", "reward", "advantages", "profile")

_BYTE_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_MOVES = ("residency/bytes_out", "residency/bytes_in", "residency/bytes_freed")


@dataclass(frozen=True)
class Lines:
    """A figure of one line for each metric; left out if the run has no finite value of any.

    Attributes:
        title: Unique on the page.
        unit: Unit of the y axis.
        lines: Metrics and their labels.
        shows: Values that the y axis always includes.
        is_share: The y axis is in percent.
        absent_with: A metric of runs that do not have this figure.
    """

    title: str
    unit: str
    lines: Mapping[str, str]
    shows: Sequence[float] = ()
    is_share: bool = False
    absent_with: str | None = None

    def measured(self, metrics: Metrics) -> dict[str, str]:
        """Lines of which the run has finite values; empty if the figure is left out."""
        if self.absent_with is not None and metrics.finite(self.absent_with):
            return {}
        return {name: label for name, label in self.lines.items() if metrics.finite(name)}


@dataclass(frozen=True)
class Layers:
    """Layers of a stacked figure: values by label, one for each of `steps`."""

    steps: Sequence[int]
    unit: str
    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Stack:
    """A figure of parts that sum up to a whole; left out if `layers` finds none."""

    title: str
    layers: Callable[[Metrics], Layers | None]


def phase_layers(metrics: Metrics) -> Layers | None:
    """Seconds of each phase in steps of training; the rest of a step is `other`."""
    steps = [step for step, total in zip(*metrics.series("timing/total_s"), strict=True) if math.isfinite(total)]
    # The order of the latest step: the first one has little more than a validation.
    names = Metrics({step: metrics.by_step[step] for step in reversed(steps)}).names("timing/")
    phases = [name for name in names if name != "timing/total_s" and name.count("/") == 1]
    if not phases or not steps:
        return None
    parts = {name.removeprefix("timing/").removesuffix("_s"): metrics.values_at(name, steps) for name in phases}
    totals = metrics.values_at("timing/total_s", steps)
    rest = [max(0.0, total - sum(part[i] for part in parts.values())) for i, total in enumerate(totals)]
    return Layers(steps, "seconds per step", {**parts, OTHER: rest})


def driver_seconds(layers: Layers) -> list[float]:
    """Seconds of each step in which the driver waits for neither the engine nor a pass of the policy, nor for a save.

    It draws data, scores, computes advantages, traces and keeps books then.
    """
    of_driver = [layers.values[name] for name in (*_OF_DRIVER, OTHER) if name in layers.values]
    return [sum(seconds) for seconds in zip(*of_driver, strict=True)]


def residency_layers(metrics: Metrics) -> Layers | None:
    """Bytes copied in either direction or dropped, each byte once: `bytes_freed` includes those copied first."""
    steps = [step for step, values in metrics.by_step.items() if any(name in values for name in _MOVES)]
    if not bytes_moved(metrics):
        return None
    out, into, freed = (metrics.values_at(name, steps) for name in _MOVES)
    dropped = [max(0.0, all_freed - copied) for all_freed, copied in zip(freed, out, strict=True)]
    layers = {"to the host": out, "to the device": into, "freed without a copy": dropped}
    divisor, unit = byte_unit(max(max(layer) for layer in layers.values()))
    scaled = {label: [value / divisor for value in layer] for label, layer in layers.items()}
    return Layers(steps, f"{unit} per step", scaled)


def bytes_moved(metrics: Metrics) -> float | None:
    """Bytes copied or freed in the whole run; None if the run did not measure them."""
    measured = [name for name in _MOVES if metrics.finite(name)]
    return sum(sum(metrics.finite(name)) for name in measured) if measured else None


def byte_unit(num_bytes: float) -> tuple[int, str]:
    """Size in bytes, and name, of the greatest unit that `num_bytes` fills."""
    return next(((size, unit) for size, unit in _BYTE_UNITS if num_bytes >= size), (1, "bytes"))


_BOTH = ("training", "held out")


def _train_and_validation(name: str) -> dict[str, str]:
    return {f"train/{name}": _BOTH[0], f"validation/{name}": _BOTH[1]}


SECTIONS: Mapping[str, Sequence[Lines | Stack]] = {
    "Learning": (
        Lines("Reward", "mean reward", {"train/reward_mean": _BOTH[0], "validation/reward": _BOTH[1]}),
        # The loss of a policy gradient does not tell how good the policy is.
        Lines("Loss", "loss", _train_and_validation("loss"), absent_with="train/reward_mean"),
        Lines("Accuracy", "correct", _train_and_validation("accuracy"), shows=(0.0,), is_share=True),
        Lines("Token accuracy", "correct tokens", _train_and_validation("token_accuracy"), shows=(0.0,), is_share=True),
        Lines("Reward margin", "chosen minus rejected", _train_and_validation("rewards_margin_mean")),
        Lines(
            "Rewards of the pairs",
            "mean reward",
            {"train/rewards_chosen_mean": "chosen", "train/rewards_rejected_mean": "rejected"},
        ),
    ),
    "Responses": (
        Lines(
            "Response length",
            "tokens",
            {
                "train/mean_response_tokens": "mean, training",
                "validation/mean_response_tokens": "mean, held out",
                "train/max_response_tokens": "longest, training",
                "train/sampled_length_mean": "mean of a whole batch of prompts",
            },
            shows=(0.0,),
        ),
        Lines(
            "Age of what is trained on",
            "steps",
            {
                "train/avg_trajectory_age": "rollouts, mean",
                "train/avg_token_age": "tokens, mean",
                "train/max_token_age": "tokens, oldest",
            },
            shows=(0.0,),
        ),
        Lines(
            "Truncation rate", "cut at the limit", _train_and_validation("truncation_rate"), shows=(0.0,), is_share=True
        ),
    ),
    "Policy update": (
        Lines("Gradient norm", "norm before clipping", {"train/grad_norm": "gradient norm"}, shows=(0.0,)),
        Lines("Entropy", "nats per token", {"train/entropy": "exact", "train/approx_entropy": "estimate"}),
        Lines("Clip fraction", "clipped tokens", {"train/clip_fraction": "clip fraction"}, shows=(0.0,), is_share=True),
        Lines("KL to the reference policy", "nats per token", {"train/kl": "KL"}),
        Lines(
            "token_mult_prob_error",
            "ratio",
            {"train/token_mult_prob_error": "token_mult_prob_error"},
            shows=(1.0, 1.001),
        ),
    ),
    "Speed": (
        Lines(
            "Tokens per second",
            "tokens/s",
            {
                "train/generation_tokens_per_s": "generation",
                "train/logprob_tokens_per_s": "logprobs",
                "train/training_tokens_per_s": "training",
            },
            shows=(0.0,),
        ),
        Lines("MFU of training", "of the GPU's peak", {"train/training_mfu": "MFU"}, shows=(0.0,), is_share=True),
        Stack("Seconds by phase", phase_layers),
    ),
}
RESIDENCY = Stack("Bytes moved and freed", residency_layers)


@dataclass(frozen=True)
class Metrics:
    """Metrics of a run by step.

    Attributes:
        by_step: Values by name for each step, in ascending order; NaN where a value was not finite.
    """

    by_step: Mapping[int, Mapping[str, float]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps at which `name` was measured, and its values."""
        pairs = [(step, values[name]) for step, values in self.by_step.items() if name in values]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def finite(self, name: str) -> list[float]:
        """Finite values of `name`, in the order of the steps."""
        return [value for value in self.series(name)[1] if math.isfinite(value)]

    def values_at(self, name: str, steps: Sequence[int]) -> list[float]:
        """Values at `steps`; 0 where `name` was not measured or not finite."""
        found = [self.by_step[step].get(name, 0.0) for step in steps]
        return [value if math.isfinite(value) else 0.0 for value in found]

    def names(self, prefix: str = "") -> list[str]:
        """Metrics whose name begins with `prefix`, in the order they first appear."""
        found = (name for values in self.by_step.values() for name in values if name.startswith(prefix))
        return list(dict.fromkeys(found))


def read_metrics(run_dir: Path) -> Metrics:
    """Read metrics.jsonl.

    A resumed run goes back to its checkpoint: a step that was written twice has its later values, and steps after it
    that were written before the resume are left out until they are written again.

    Raises:
        DataError: There is no such folder or file, it is empty, or a line in it is broken. The last line may be cut
            short, as a killed run leaves it.
    """
    path = run_dir / METRICS_FILE
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: no such folder; give the run folder, which is logger.log_dir of the run")
    if not path.is_file():
        raise DataError(f"{run_dir}: has no {METRICS_FILE}, so it is no run folder; give logger.log_dir of the run")
    by_step: dict[int, dict[str, float]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step = int(record.pop("step"))
            values = {name: math.nan if value is None else float(value) for name, value in record.items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            if number == len(lines):
                break
            raise DataError(f"{path}: line {number} is no metrics line; delete it") from error
        for later in [known for known in by_step if known > step]:
            del by_step[later]
        by_step.setdefault(step, {}).update(values)
    if not by_step:
        raise DataError(f"{path}: holds no metrics; the run ended before its first step did")
    return Metrics(by_step)
