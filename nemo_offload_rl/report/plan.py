"""The page of a plan: one HTML file with GPU memory by phase and owner, main memory, and seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.report.page import Part, Section, render_page
from nemo_offload_rl.report.plot import COLORS, Drawn, svg
from nemo_offload_rl.report.template import BODY, SCRIPT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

type Bars = Mapping[str, Mapping[str, float]]
"""Heights by label, of each bar by its name."""


def plan_page(title: str, path: str, plan: Mapping[str, Any], text: str) -> str:
    """Draw a plan as one HTML file with everything inside.

    Args:
        title: Title and heading.
        path: Path of the configuration.
        plan: The plan as `python -m nemo_offload_rl.plan --json` prints it.
        text: The plan as text.
    """
    memory = {name: phase["gib"] for name, phase in plan["phases"].items()}
    moved = {
        name: {"to the GPU": stage["gb_in"], "to the host": stage["gb_out"]} for name, stage in plan["stages"].items()
    }
    rows = [("fits", "yes" if plan["fits"] else "no"), ("GPU", f"{plan['gpu']}, {plan['gpu_gib']:.1f} GiB")]
    rows += [("main memory, " + owner, f"{gib:.1f} GiB") for owner, gib in plan["host_gib"].items()]
    figures = [
        ("GPU memory at the peak of each phase", _bars("GPU memory", memory, "GiB", plan["gpu_gib"])),
        ("Copies of a step between one GPU and the host", _bars("Copies", moved, "GB")),
    ]
    seconds = {name: stage.get("seconds", 0.0) for name, stage in plan["stages"].items()}
    total_s = sum(seconds.values())
    colors = dict(zip(seconds, COLORS, strict=False))
    return render_page(
        BODY,
        title=title,
        folder=path,
        rows=rows,
        band=[Part(name, s, 100 * s / total_s, colors[name]) for name, s in seconds.items() if s],
        band_of="Seconds of a step",
        sections=[Section("Memory and copies", figures, note="\n".join(plan["problems"]))],
        script=SCRIPT,
        details=[("Plan", text)],
    )


def _bars(title: str, bars: Bars, unit: str, limit: float | None = None) -> str:
    """An SVG element with one stacked bar for each name."""
    labels = list(dict.fromkeys(label for bar in bars.values() for label in bar))
    places = list(range(len(bars)))

    def draw_on(axes: Axes) -> Sequence[Drawn]:
        below = [0.0] * len(bars)
        drawn: list[Drawn] = []
        for label, color in zip(labels, COLORS * (1 + len(labels) // len(COLORS)), strict=False):
            heights = [bar.get(label, 0.0) for bar in bars.values()]
            axes.bar(places, heights, bottom=below, color=color, label=label, width=0.7)
            below = [low + height for low, height in zip(below, heights, strict=True)]
            drawn.append(Drawn(label, color, places, heights, list(bars), f" {unit}"))
        if limit is not None:
            axes.axhline(limit, color="#e5484d", linewidth=1, linestyle="--", label="GPU")
        axes.set_xticks(places, [name.lower().replace("_", "\n") for name in bars])
        axes.set_ylabel(unit)
        return drawn

    return svg(title, draw_on)
