"""The metrics of a run, read from its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_offload_rl.errors import DataError
from nemo_offload_rl.utils.logger import METRICS_FILE


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
