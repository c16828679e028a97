"""Figures as SVG for the page, with the page's text color in light and dark mode; GPU memory by owner among them."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.report.figures import OTHER, Layers, Lines, Metrics, Stack
from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (4.6, 2.7)  # about the width of a phone, at which text keeps its size
_LEGEND_COLUMNS = 3
_LEGEND_ROW_INCHES = 0.18
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")
_REST_COLOR = "#9498a0"
_MAX_MARKERS = 40
_MAX_BARS = 60  # means of neighbouring steps where a run has more of them
_MAX_POINTS = 500  # of a longer line the means are drawn, on top of the line as a faint image
_MAX_MEANS = 100
_INK = "#010203"  # becomes currentColor, the page's color of text
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "grid.color": _INK,
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


def draw(figure: Lines | Stack, metrics: Metrics) -> str | None:
    """An SVG element, or None if the run has nothing to draw."""
    if isinstance(figure, Stack):
        layers = figure.layers(metrics)
        return None if layers is None else svg(figure.title, lambda axes: _draw_stack(axes, layers, metrics))
    if not figure.measured(metrics):
        return None
    return svg(figure.title, lambda axes: _draw_lines(axes, figure, metrics))


def svg(title: str, draw_on: Callable[[Axes], None]) -> str:
    """An SVG element for a page of HTML.

    Args:
        title: Unique on the page, so that ids of elements are too.
        draw_on: Draws on the axes; artists with a label appear in the legend.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        draw_on(axes)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            width, height = _SIZE_INCHES
            figure.set_size_inches(width, height + _LEGEND_ROW_INCHES * math.ceil(len(handles) / _LEGEND_COLUMNS))
            figure.legend(handles, labels, loc="outside upper left", ncols=_LEGEND_COLUMNS, handlelength=1.2)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, dpi=150)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # HTML needs no namespaces, and the page's width decides the size.
    start, rest = text.split(">", maxsplit=1)
    start = re.sub(r'\s(?:xmlns(?::\w+)?|width|height|version)="[^"]*"', "", start)
    return f"{start}>{rest}".replace(_INK, "currentColor")


def _step_axis(axes: Axes, metrics: Metrics) -> None:
    """Show the same range of steps in every figure of a run."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(min(metrics.by_step) - 0.5, max(metrics.by_step) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel("step")
    axes.grid(axis="y", alpha=0.2)
    axes.set_axisbelow(True)


def _draw_lines(axes: Axes, figure: Lines, metrics: Metrics) -> None:
    from matplotlib.ticker import PercentFormatter

    _step_axis(axes, metrics)
    missing: set[int] = set()
    for name, label in figure.measured(metrics).items():
        steps, values = metrics.series(name)
        lost = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
        missing.update(lost)
        color = _COLORS[list(figure.lines).index(name)]
        if len(steps) > _MAX_POINTS:
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8, rasterized=True)
            steps, values = _means(steps, values)
        axes.plot(
            steps,
            values,
            color=color,
            label=label if len(figure.lines) > 1 else None,
            linewidth=1.5,
            marker="o" if lost or len(steps) <= _MAX_MARKERS else None,
            markersize=3 if len(steps) > 3 else 5,
        )
    axes.set_ylabel(figure.unit)
    if figure.shows:
        low, high = axes.dataLim.intervaly
        bottom, top = min(low, *figure.shows), max(high, *figure.shows)
        margin = 0.05 * (top - bottom)
        axes.set_ylim(bottom - margin if low < min(figure.shows) else bottom, top + margin if margin else None)
    if figure.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    if missing:
        at_bottom = axes.get_xaxis_transform()
        crosses = {"color": "#e5484d", "linestyle": "", "marker": "x", "markersize": 5, "clip_on": False}
        axes.plot(sorted(missing), [0.0] * len(missing), transform=at_bottom, label="not finite", **crosses)


def _means(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most `_MAX_MEANS` points: middle steps of parts of the line, and means of their finite values or NaN."""
    parts = _slices(len(steps), _MAX_MEANS)
    finite = [[value for value in values[part] if math.isfinite(value)] for part in parts]
    middles = [steps[part][len(steps[part]) // 2] for part in parts]
    return middles, [fmean(found) if found else math.nan for found in finite]


def _draw_stack(axes: Axes, layers: Layers, metrics: Metrics) -> None:
    _step_axis(axes, metrics)
    bars = _slices(len(layers.steps), _MAX_BARS)
    left = [layers.steps[bar][0] - 0.5 for bar in bars]
    width = [0.85 * (layers.steps[bar][-1] + 0.5 - edge) for bar, edge in zip(bars, left, strict=True)]
    bottom = [0.0] * len(bars)
    colors = iter(_COLORS * (1 + len(layers.values) // len(_COLORS)))
    for label, values in layers.values.items():
        if not any(values):
            continue
        heights = [fmean(values[bar]) for bar in bars]
        color = _REST_COLOR if label == OTHER else next(colors)
        axes.bar(left, heights, width, bottom, align="edge", label=label, color=color)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel(layers.unit)


def _slices(count: int, most: int) -> list[slice]:
    """At most `most` neighbouring slices of about the same size that cover `count` items."""
    size = math.ceil(count / most)
    return [slice(start, start + size) for start in range(0, count, size)]


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
