"""The page of a plan: one HTML file with GPU memory by phase and owner, main memory, and seconds of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.report.page import Part, Section, render_page
from nemo_offload_rl.report.plot import COLORS, Drawn, svg
from nemo_offload_rl.report.template import BODY, SCRIPT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

type Bars = Mapping[str, Mapping[str, float]]
"""Heights by label, of each bar by its name."""

_NAMES = {"OPTIM_STEP": "update", "LP_INFERENCE": "logprobs", "TEACHER_INFERENCE": "teacher"}  # of phases
# Owners have the same color in every plan.
_OWNERS = ("params", "grads", "optimizer", "passes", "engine", "contexts", "reference", "refit buffers", "teacher")
_MOST_UPRIGHT = 5  # names of bars that have room in a row


def plan_page(title: str, path: str, plan: Mapping[str, Any], text: str) -> str:
    """Draw a plan as one HTML file with everything inside.

    Args:
        title: Title and heading.
        path: Path of the configuration.
        plan: The plan as `python -m nemo_offload_rl.plan --json` prints it.
        text: The plan as text.
    """
    memory: Bars = {_NAMES.get(name) or str(name).lower(): phase["gib"] for name, phase in plan["phases"].items()}
    moved = {
        name: {"to the GPU": stage["gb_in"], "to the host": stage["gb_out"]} for name, stage in plan["stages"].items()
    }
    figures = [
        ("GPU memory at the peak of each phase", _bars("GPU memory", memory, "GiB", ("the GPU", plan["gpu_gib"]))),
        ("Copies in a step, of one GPU", _bars("Copies", moved, "GB")),
        ("Main memory of a host", _bars("Main memory", {"": plan["host_gib"]}, "GiB", _host_limit(plan))),
    ]
    seconds = {name: stage.get("seconds", 0.0) for name, stage in plan["stages"].items()}
    total_s = sum(seconds.values())
    colors = dict(zip(seconds, COLORS, strict=False))
    length = f"{plan['sequences']} sequences of {plan['tokens_of_a_sequence']} tokens"
    return render_page(
        BODY,
        title=title,
        folder=path,
        rows=[*_rows(plan, memory)],
        band=[Part(name, s, 100 * s / total_s, colors[name]) for name, s in seconds.items() if s],
        band_of=f"Seconds of a step of {length}",
        sections=[
            *([Section("It does not fit", rows=[(it, "") for it in plan["problems"]])] if plan["problems"] else []),
            *_changes(plan),
            Section("Memory and copies", figures),
        ],
        script=SCRIPT,
        details=[("All of the plan", text)],
        records="As text",
    )


def _rows(plan: Mapping[str, Any], memory: Bars) -> Iterator[tuple[str, str]]:
    fullest = max(memory, key=lambda name: sum(memory[name].values()))
    used_gib, host_gib = sum(memory[fullest].values()), sum(plan["host_gib"].values())
    host_limit = f" of {plan['usable_host_gib']:.1f}" if plan["usable_host_gib"] is not None else ""
    yield "fits", "yes" if plan["fits"] else "no"
    passes = "" if plan["counts_passes"] else ", without passes"
    yield f"fullest GPU ({plan['gpu']}), in {fullest}{passes}", f"{used_gib:.1f} of {plan['gpu_gib']:.1f} GiB"
    yield "main memory of a host", f"{host_gib:.1f}{host_limit} GiB"
    if plan["step_s"] is not None:
        exposed_s = sum(stage["exposed_s"] for stage in plan["stages"].values())
        yield "a step", f"{plan['step_s']:.1f} s"
        yield "of this, copies that nothing hides", f"{exposed_s:.1f} s"


def _host_limit(plan: Mapping[str, Any]) -> tuple[str, float] | None:
    return None if plan["usable_host_gib"] is None else ("usable", plan["usable_host_gib"])


def _changes(plan: Mapping[str, Any]) -> Iterator[Section]:
    """Yield a section with the ways out, and one with the fastest values, if they were searched for."""
    for title, trials in (
        ("Changes that make it fit", plan.get("changes", ())),
        ("The fastest that fits", [plan["fastest"]] if plan.get("fastest") else ()),
    ):
        rows = [(" ".join(trial["overrides"]), _seconds(trial)) for trial in trials]
        if rows:
            yield Section(title, rows=rows)


def _seconds(trial: Mapping[str, Any]) -> str:
    return "" if trial["step_s"] is None else f"{trial['step_s']:.1f} s a step"


def _bars(title: str, bars: Bars, unit: str, limit: tuple[str, float] | None = None) -> str:
    """Draw an SVG element with one stacked bar for each name, and a line at a limit with its name."""
    labels = list(dict.fromkeys(label for bar in bars.values() for label in bar))
    places = list(range(len(bars)))

    def draw_on(axes: Axes) -> Sequence[Drawn]:
        below = [0.0] * len(bars)
        drawn: list[Drawn] = []
        for number, label in enumerate(labels):
            color = COLORS[(_OWNERS.index(label) if label in _OWNERS else number) % len(COLORS)]
            heights = [bar.get(label, 0.0) for bar in bars.values()]
            axes.bar(places, heights, bottom=below, color=color, label=label, width=0.7)
            below = [low + height for low, height in zip(below, heights, strict=True)]
            drawn.append(Drawn(label, color, places, heights, list(bars), f" {unit}"))
        if limit is not None:
            axes.axhline(limit[1], color="#e5484d", linewidth=1, linestyle="--", label=limit[0])
        tilted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(bars) > _MOST_UPRIGHT else {}
        axes.set_xticks(places, list(bars), **tilted)
        if len(bars) == 1:
            axes.set_xlim(-1, 1)
            axes.tick_params(axis="x", length=0)
        axes.set_ylabel(unit)
        return drawn

    return svg(title, draw_on)
