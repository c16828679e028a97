"""GPU memory over time, by owner, with the phases of a step as bands: a figure of the report page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEPS_SHOWN = 3
_OWNER_COLORS = {"engine": "#efb118", "policy": "#4269d0", "other": "#9498a0"}
_OTHER_COLOR = "#ff725c"
_PHASE_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2")
_BAND_ALPHA = 0.2  # on light and dark pages


@dataclass(frozen=True)
class MemorySample:
    """GiB by owner on one GPU at one moment of a run."""

    t_s: float
    step: int
    phase: str
    gib: dict[str, float]


def read_samples(run_dir: Path) -> list[MemorySample]:
    """Samples of the GPU that was fullest, without broken lines and those before the last resume; empty for none.

    A resumed run counts its seconds from 0 again.
    """
    path = run_dir / MEMORY_FILE
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if records and record["t_s"] < records[-1]["t_s"]:
            records.clear()
        records.append(record)
    highest: dict[str, float] = {}
    for record in records:
        for uuid, gib in record["gib"].items():
            highest[uuid] = max(sum(gib.values()), highest.get(uuid, 0.0))
    if not highest:
        return []
    fullest = max(highest, key=lambda uuid: highest[uuid])
    return [
        MemorySample(record["t_s"], record["step"], record["phase"], record["gib"][fullest])
        for record in records
        if fullest in record["gib"]
    ]


def memory_samples(run_dir: Path) -> list[MemorySample]:
    """Samples of the last steps, since more would be a blur; empty if there are too few to draw."""
    samples = read_samples(run_dir)
    shown = sorted({sample.step for sample in samples})[-_STEPS_SHOWN:]
    samples = [sample for sample in samples if sample.step in shown]
    return samples if len(samples) > 1 else []


def draw_memory(axes: Axes, samples: Sequence[MemorySample]) -> None:
    """GiB by owner over time, on bands of the phases.

    Args:
        axes: Empty; artists with a label appear in the legend.
        samples: Two or more.
    """
    times = [sample.t_s - samples[0].t_s for sample in samples]
    measured = {owner for sample in samples for owner in sample.gib}
    owners = [*(owner for owner in _OWNER_COLORS if owner in measured), *sorted(measured - _OWNER_COLORS.keys())]
    layers = [[sample.gib.get(owner, 0.0) for sample in samples] for owner in owners]
    axes.stackplot(times, layers, labels=owners, colors=[_OWNER_COLORS.get(owner, _OTHER_COLOR) for owner in owners])
    bands: dict[str, str] = {}
    for phase, group in groupby(range(len(samples)), key=lambda i: samples[i].phase):
        indices = list(group)
        label = None if phase in bands else phase
        color = bands.setdefault(phase, _PHASE_COLORS[len(bands) % len(_PHASE_COLORS)])
        end = min(indices[-1] + 1, len(times) - 1)
        axes.axvspan(times[indices[0]], times[end], color=color, alpha=_BAND_ALPHA, zorder=0, linewidth=0, label=label)
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")
