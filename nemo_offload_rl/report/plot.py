"""Figures as SVG for the page, with the page's text color in light and dark mode; GPU memory by owner among them.

An element has what is drawn in `data-values` too, for the script of the page, which shows values under the cursor.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
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
COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")
_REST_COLOR = "#9498a0"
_MAX_MARKERS = 40
_MAX_PARTS = 60  # means of neighbouring steps where a run has more of them
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


@dataclass(frozen=True)
class Drawn:
    """One line or layer of a figure, as it was drawn.

    Attributes:
        label: Its name in the legend.
        color: Its color.
        x: Places on the x axis.
        y: One value for each.
        names: What each place is called, if not by its number.
        unit: Follows a value.
    """

    label: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    names: Sequence[str] | None = None
    unit: str = ""


def draw(figure: Lines | Stack, metrics: Metrics) -> str | None:
    """An SVG element, or None if the run has nothing to draw."""
    if isinstance(figure, Stack):
        layers = figure.layers(metrics)
        return None if layers is None else svg(figure.title, lambda axes: _draw_stack(axes, layers, metrics))
    if not figure.measured(metrics):
        return None
    return svg(figure.title, lambda axes: _draw_lines(axes, figure, metrics))


def svg(title: str, draw_on: Callable[[Axes], Sequence[Drawn]]) -> str:
    """An SVG element for a page of HTML.

    Args:
        title: Unique on the page, so that ids of elements are too.
        draw_on: Draws on the axes and returns what it drew; artists with a label appear in the legend.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        drawn = draw_on(axes)
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
    values = html.escape(json.dumps(_values(axes, drawn), separators=(",", ":")))
    return f'{start} data-values="{values}">{rest}'.replace(_INK, "currentColor")


def _values(axes: Axes, drawn: Sequence[Drawn]) -> dict[str, Any]:
    """What the script of the page needs to find values by the place of the cursor.

    `span` is where the axes begin and end, as shares of the figure's width, and `limits` are their ends.
    """
    box = axes.get_position()
    return {
        "x": axes.get_xlabel(),
        "span": [round(box.x0, 4), round(box.x1, 4)],
        "limits": [round(limit, 3) for limit in axes.get_xlim()],
        "lines": [
            {
                "label": line.label,
                "color": line.color,
                "unit": line.unit,
                "x": [round(x, 3) for x in line.x],
                "y": [float(f"{y:.4g}") if math.isfinite(y) else None for y in line.y],
                **({} if line.names is None else {"names": line.names}),
            }
            for line in drawn
        ],
    }


def _step_axis(axes: Axes, metrics: Metrics) -> None:
    """Show the same range of steps in every figure of a run."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(min(metrics.by_step) - 0.5, max(metrics.by_step) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel("step")
    axes.grid(axis="y", alpha=0.2)
    axes.set_axisbelow(True)


def _draw_lines(axes: Axes, figure: Lines, metrics: Metrics) -> list[Drawn]:
    from matplotlib.ticker import PercentFormatter

    _step_axis(axes, metrics)
    missing: set[int] = set()
    drawn: list[Drawn] = []
    for name, label in figure.measured(metrics).items():
        steps, values = metrics.series(name)
        lost = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
        missing.update(lost)
        color = COLORS[list(figure.lines).index(name)]
        names = None
        if len(steps) > _MAX_POINTS:
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8, rasterized=True)
            names = _names(steps, _MAX_MEANS)
            steps, values = _means(steps, values)
        factor, unit = (100, "%") if figure.is_share else (1, "")
        drawn.append(Drawn(label, color, steps, [factor * value for value in values], names, unit))
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
    return drawn


def _means(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most `_MAX_MEANS` points: middle steps of parts of the line, and means of their finite values or NaN."""
    parts = _slices(len(steps), _MAX_MEANS)
    finite = [[value for value in values[part] if math.isfinite(value)] for part in parts]
    middles = [steps[part][len(steps[part]) // 2] for part in parts]
    return middles, [fmean(found) if found else math.nan for found in finite]


def _draw_stack(axes: Axes, layers: Layers, metrics: Metrics) -> list[Drawn]:
    _step_axis(axes, metrics)
    parts = _slices(len(layers.steps), _MAX_PARTS)
    steps = [layers.steps[part] for part in parts]
    names = _names(layers.steps, _MAX_PARTS)
    middles = [(part[0] + part[-1]) / 2 for part in steps]
    edges = [edge for part in steps for edge in (part[0] - 0.5, part[-1] + 0.5)]
    drawn = [
        Drawn(label, color, middles, [fmean(layers.values[label][part]) for part in parts], names)
        for label, color in layer_colors(layers).items()
    ]
    # Each height is there at both edges of its steps, so that the layers are bands without gaps.
    heights = [[height for height in layer.y for _ in range(2)] for layer in drawn]
    if drawn:
        axes.stackplot(edges, heights, labels=[layer.label for layer in drawn], colors=[layer.color for layer in drawn])
    axes.set_ylabel(layers.unit)
    return drawn


def layer_colors(layers: Layers) -> dict[str, str]:
    """Color of each layer that is not 0 everywhere."""
    colors = iter(COLORS * (1 + len(layers.values) // len(COLORS)))
    drawn = [label for label, values in layers.values.items() if any(values)]
    return {label: _REST_COLOR if label == OTHER else next(colors) for label in drawn}


def _names(steps: Sequence[int], most: int) -> list[str] | None:
    """Names of at most `most` parts of the steps; None if each part is one step."""
    parts = [steps[part] for part in _slices(len(steps), most)]
    return [f"{part[0]} to {part[-1]}" for part in parts] if len(parts) < len(steps) else None


def _slices(count: int, most: int) -> list[slice]:
    """At most `most` neighbouring slices of about the same size that cover `count` items."""
    size = math.ceil(count / most)
    return [slice(start, start + size) for start in range(0, count, size)]


_STEPS_SHOWN = 3
_OWNER_COLORS = {"engine": "#efb118", "policy": "#4269d0", "other": "#9498a0"}
_OTHER_COLOR = "#ff725c"
_PHASE_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2")
_BAND_ALPHA = 0.2  # on light and dark pages
_PLANNED_COLOR = "#e5484d"
# Phases of the plan that are inside a timed phase.
_PLANNED = {
    "generation": ("generation",),
    "logprobs": ("lp_inference",),
    "reference_logprobs": ("lp_inference",),
    "refit": ("refit",),
    "teacher": ("teacher_inference",),
    "training": ("training", "optim_step"),
}


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


def planned_peaks(metrics: Metrics) -> dict[str, float]:
    """Return the planned peak of a GPU in GiB by timed phase, as logged last; empty if the run logged none."""
    logged = {name: value for values in metrics.by_step.values() for name, value in values.items()}
    peaks: dict[str, float] = {}
    for phase, parts in _PLANNED.items():
        if values := [logged[name] for part in parts if (name := f"plan/{part}_gib") in logged]:
            peaks[phase] = max(values)
    return peaks


def draw_memory(axes: Axes, samples: Sequence[MemorySample], planned: Mapping[str, float]) -> list[Drawn]:
    """Draw GiB by owner over time, on bands of the phases, and the peaks that were planned.

    Args:
        axes: Empty; artists with a label appear in the legend.
        samples: Two or more.
        planned: Result of `planned_peaks`.
    """
    times = [sample.t_s - samples[0].t_s for sample in samples]
    measured = {owner for sample in samples for owner in sample.gib}
    owners = [*(owner for owner in _OWNER_COLORS if owner in measured), *sorted(measured - _OWNER_COLORS.keys())]
    layers = [[sample.gib.get(owner, 0.0) for sample in samples] for owner in owners]
    colors = [_OWNER_COLORS.get(owner, _OTHER_COLOR) for owner in owners]
    axes.stackplot(times, layers, labels=owners, colors=colors)
    bands: dict[str, str] = {}
    for phase, group in groupby(range(len(samples)), key=lambda i: samples[i].phase):
        indices = list(group)
        label = None if phase in bands else phase
        color = bands.setdefault(phase, _PHASE_COLORS[len(bands) % len(_PHASE_COLORS)])
        end = min(indices[-1] + 1, len(times) - 1)
        axes.axvspan(times[indices[0]], times[end], color=color, alpha=_BAND_ALPHA, zorder=0, linewidth=0, label=label)
    peaks = [planned.get(sample.phase, math.nan) for sample in samples]
    known = [index for index, peak in enumerate(peaks) if math.isfinite(peak)]
    if known:
        axes.plot(times, peaks, color=_PLANNED_COLOR, linestyle="--", drawstyle="steps-post", label="planned peak")
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")
    names = [f"{time:.1f}, {sample.phase}" for time, sample in zip(times, samples, strict=True)]
    drawn = [Drawn(*part, names=names) for part in zip(owners, colors, [times] * len(owners), layers, strict=True)]
    if known:
        x, y = [times[index] for index in known], [peaks[index] for index in known]
        drawn.append(Drawn("planned peak", _PLANNED_COLOR, x, y, [names[index] for index in known]))
    return drawn
