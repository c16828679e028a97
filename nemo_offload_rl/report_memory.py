"""GPU memory over time, by owner, with the phases of a step as bands: a picture for the report page."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE

_STEPS_SHOWN = 3
_OWNER_COLORS = {"engine": "#efb118", "policy": "#4269d0", "other": "#9498a0"}
_PHASE_COLORS = ("#e8eefc", "#fdf3dc", "#ffe4de", "#e3f4f0", "#e3f1e5", "#ffeaf3", "#f0e4fc")


@dataclass(frozen=True)
class MemorySample:
    """GiB by owner on one GPU at one moment of a run."""

    t_s: float
    step: int
    phase: str
    gib: dict[str, float]


def read_samples(run_dir: Path) -> list[MemorySample]:
    """Samples of the GPU that was fullest; empty where none were taken. A line that was cut short is left out."""
    path = run_dir / MEMORY_FILE
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
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


def last_steps(samples: Sequence[MemorySample], num_steps: int = _STEPS_SHOWN) -> list[MemorySample]:
    """Samples of the last steps: a longer run would only be a blur."""
    shown = sorted({sample.step for sample in samples})[-num_steps:]
    return [sample for sample in samples if sample.step in shown]


def memory_picture(run_dir: Path) -> bytes | None:
    """A PNG of the last steps, or None where no memory was sampled."""
    samples = last_steps(read_samples(run_dir))
    if len(samples) < 2:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8, 3.9), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    times = [sample.t_s - samples[0].t_s for sample in samples]
    owners = [owner for owner in (*_OWNER_COLORS, *samples[0].gib) if owner in samples[0].gib]
    owners = list(dict.fromkeys(owners))
    layers = [[sample.gib[owner] for sample in samples] for owner in owners]
    bands: dict[str, str] = {}
    for phase, group in groupby(range(len(samples)), key=lambda i: samples[i].phase):
        indices = list(group)
        color = bands.setdefault(phase, _PHASE_COLORS[len(bands) % len(_PHASE_COLORS)])
        end = min(indices[-1] + 1, len(times) - 1)
        axes.axvspan(times[indices[0]], times[end], color=color, zorder=0, linewidth=0)
    axes.stackplot(times, layers, labels=owners, colors=[_OWNER_COLORS.get(owner, "#ff725c") for owner in owners])
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(bottom=0)
    axes.set_title("GPU memory by owner", loc="left")
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")
    axes.spines[["top", "right"]].set_visible(False)
    phases = [Patch(color=color, label=phase) for phase, color in bands.items()]
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(handles=[*handles, *phases], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
