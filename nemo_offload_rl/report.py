"""Pictures of a run: `python -m nemo_offload_rl.report RUN_DIR`.

1. Read metrics.jsonl of the run folder.
2. Draw reward, held-out accuracy, loss, KL, seconds by phase, bytes moved and GPU memory, each where it was measured,
   as PNG files into RUN_DIR/report/.
3. Write RUN_DIR/report/index.html with the same pictures inside, and print its path.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.errors import DataError
from nemo_offload_rl.report_memory import memory_picture
from nemo_offload_rl.utils.cli import run_main
from nemo_offload_rl.utils.logger import METRICS_FILE, SAMPLES_FOLDER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_BARS = 200
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
_BYTE_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


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

    def names(self, prefix: str) -> list[str]:
        """Metrics whose name begins with `prefix`, in the order they first appear."""
        found = (name for values in self.by_step.values() for name in values if name.startswith(prefix))
        return list(dict.fromkeys(found))


def read_metrics(run_dir: Path) -> Metrics:
    """Read metrics.jsonl; a step that was written twice has its later values.

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
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            if number == len(lines):
                break
            raise DataError(f"{path}: line {number} is no metrics line; delete it") from error
        values = {name: math.nan if value is None else float(value) for name, value in record.items()}
        by_step.setdefault(step, {}).update(values)
    if not by_step:
        raise DataError(f"{path}: holds no metrics; the run ended before its first step did")
    return Metrics({step: by_step[step] for step in sorted(by_step)})


def write_report(run_dir: Path) -> Path:
    """Draw everything that was measured.

    Returns:
        The HTML page.

    Raises:
        DataError: The run has no metrics.
    """
    import jinja2

    metrics = read_metrics(run_dir)
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    pictures = []
    for name, title, draw in _PICTURES:
        png = _picture(metrics, title, draw)
        if png is None:
            continue
        (folder / f"{name}.png").write_bytes(png)
        pictures.append({"title": title, "data": base64.b64encode(png).decode("ascii")})
    memory = memory_picture(run_dir)
    if memory is not None:
        (folder / "memory.png").write_bytes(memory)
        pictures.append({"title": "GPU memory by owner", "data": base64.b64encode(memory).decode("ascii")})
    page = folder / "index.html"
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_PAGE)
    html = template.render(
        title=run_dir.resolve().name,
        figures=summary(metrics),
        pictures=pictures,
        samples=_last_samples(run_dir),
        record=_text_of(run_dir / "run.json"),
        config=_text_of(run_dir / "config.yaml"),
    )
    page.write_text(html, encoding="utf-8")
    return page


def summary(metrics: Metrics) -> list[tuple[str, str]]:
    """The run in a few lines: name and text of each figure that was measured."""
    rows = [("steps", str(max(metrics.by_step)))]
    for name, label in (("validation/accuracy", "held-out accuracy"), ("train/accuracy", "training accuracy")):
        _, values = metrics.series(name)
        if values:
            rows.append((label, f"{values[0]:.1%} to {values[-1]:.1%} (best {max(values):.1%})"))
    _, rewards = metrics.series("train/reward_mean")
    if rewards:
        rows.append(("mean reward", f"{rewards[0]:.3f} to {rewards[-1]:.3f}"))
    _, losses = metrics.series("validation/loss")
    if losses:
        rows.append(("held-out loss", f"{losses[0]:.3f} to {losses[-1]:.3f} (best {min(losses):.3f})"))
    _, errors = metrics.series("train/token_mult_prob_error")
    if errors:
        rows.append(("largest token_mult_prob_error", f"{max(errors):.4f}"))
    _, speeds = metrics.series("train/generation_tokens_per_s")
    if speeds:
        rows.append(("generated tokens per second, median", f"{sorted(speeds)[len(speeds) // 2]:.0f}"))
    _, speeds = metrics.series("train/training_tokens_per_s")
    if speeds:
        rows.append(("trained tokens per second, median", f"{sorted(speeds)[len(speeds) // 2]:.0f}"))
    _, totals = metrics.series("timing/total_s")
    if totals:
        rows.append(("seconds per step, median", f"{sorted(totals)[len(totals) // 2]:.2f}"))
    moved = sum(sum(metrics.series(f"residency/{name}")[1]) for name in ("bytes_out", "bytes_in"))
    if metrics.names("residency/bytes_"):
        divisor, unit = _byte_unit(moved)
        rows.append(("bytes moved by the residency manager", f"{moved / divisor:.2f} {unit}"))
    for name, label in (("exposed_s", "waited for"), ("hidden_s", "hidden behind compute")):
        _, values = metrics.series(f"residency/{name}")
        if values:
            rows.append((f"seconds of copies {label}", f"{sum(values):.2f}"))
    return rows


# ---------------------------------------------------------------- pictures


def _picture(metrics: Metrics, title: str, draw: Any) -> bytes | None:
    """A PNG, or None when there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if not draw(axes, metrics):
        return None
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_line(axes: Axes, metrics: Metrics, name: str, ylabel: str, marker: str | None = None) -> bool:
    steps, values = metrics.series(name)
    if not steps:
        return False
    axes.plot(steps, values, color=_COLORS[0], marker=marker or ("o" if len(steps) < 3 else None), linewidth=1.8)
    axes.set_ylabel(ylabel)
    return True


def _draw_loss(axes: Axes, metrics: Metrics) -> bool:
    """Of SFT and DPO; a policy gradient's says nothing about how well the policy does."""
    if metrics.series("train/reward_mean")[0] or not _draw_line(axes, metrics, "train/loss", "loss"):
        return False
    axes.lines[0].set_label("training")
    steps, values = metrics.series("validation/loss")
    if steps:
        axes.plot(steps, values, color=_COLORS[2], marker="o", linewidth=1.8, label="held out")
        axes.legend(frameon=False)
    return True


def _draw_margin(axes: Axes, metrics: Metrics) -> bool:
    return _draw_line(axes, metrics, "train/rewards_margin_mean", "better minus worse")


def _draw_reward(axes: Axes, metrics: Metrics) -> bool:
    return _draw_line(axes, metrics, "train/reward_mean", "mean reward")


def _draw_accuracy(axes: Axes, metrics: Metrics) -> bool:
    from matplotlib.ticker import PercentFormatter

    drawn = _draw_line(axes, metrics, "validation/accuracy", "correct", marker="o")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    return drawn


def _draw_kl(axes: Axes, metrics: Metrics) -> bool:
    return _draw_line(axes, metrics, "train/kl", "nats per token")


def _draw_phases(axes: Axes, metrics: Metrics) -> bool:
    names = [name for name in metrics.names("timing/") if name != "timing/total_s" and name.count("/") == 1]
    steps, totals = metrics.series("timing/total_s")
    if not names or not steps:
        return False
    layers = {name.removeprefix("timing/").removesuffix("_s"): _values_at(metrics, name, steps) for name in names}
    rest = [max(0.0, total - sum(layer[i] for layer in layers.values())) for i, total in enumerate(totals)]
    _stack(axes, steps, {**layers, "other": rest})
    axes.set_ylabel("seconds")
    return True


def _draw_residency(axes: Axes, metrics: Metrics) -> bool:
    measured = metrics.names("residency/bytes_")
    steps = [step for step, values in metrics.by_step.items() if any(name in values for name in measured)]
    if not steps:
        return False
    layers = residency_layers(metrics, steps)
    divisor, unit = _byte_unit(max(max(layer) for layer in layers.values()))
    _stack(axes, steps, {label: [value / divisor for value in layer] for label, layer in layers.items()})
    axes.set_ylabel(f"{unit} per step")
    return True


def residency_layers(metrics: Metrics, steps: Sequence[int]) -> dict[str, list[float]]:
    """Bytes of `steps` by what happened to them, each byte once: `bytes_freed` has those that were copied first too."""
    out, into, freed = (_values_at(metrics, f"residency/bytes_{name}", steps) for name in ("out", "in", "freed"))
    dropped = [max(0.0, all_freed - copied) for all_freed, copied in zip(freed, out, strict=True)]
    return {"to the host": out, "to the device": into, "freed without a copy": dropped}


def _stack(axes: Axes, steps: Sequence[int], layers: Mapping[str, Sequence[float]]) -> None:
    """Bars on top of each other; areas where there would be too many bars."""
    colors = [_COLORS[i % len(_COLORS)] for i in range(len(layers))]
    if len(steps) > _MAX_BARS:
        axes.stackplot(steps, *layers.values(), labels=list(layers), colors=colors)
    else:
        bottom = [0.0] * len(steps)
        for (label, layer), color in zip(layers.items(), colors, strict=True):
            axes.bar(steps, layer, bottom=bottom, label=label, color=color, width=0.85)
            bottom = [low + value for low, value in zip(bottom, layer, strict=True)]
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)


def _values_at(metrics: Metrics, name: str, steps: Sequence[int]) -> list[float]:
    """Values at `steps`; 0 where `name` was not measured or not finite."""
    found = [metrics.by_step[step].get(name, 0.0) for step in steps]
    return [value if math.isfinite(value) else 0.0 for value in found]


def _byte_unit(num_bytes: float) -> tuple[int, str]:
    return next(((size, unit) for size, unit in _BYTE_UNITS if num_bytes >= size), (1, "bytes"))


_PICTURES = (
    ("accuracy", "Held-out accuracy", _draw_accuracy),
    ("loss", "Loss", _draw_loss),
    ("margin", "Reward margin of the pairs", _draw_margin),
    ("reward", "Reward of the rollouts", _draw_reward),
    ("kl", "KL to the reference policy", _draw_kl),
    ("phases", "Seconds by phase", _draw_phases),
    ("residency", "Bytes moved and freed by the residency manager", _draw_residency),
)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1e23; }
table { border-collapse: collapse; margin: 1rem 0; }
td { padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid #e3e5e8; }
td + td { text-align: right; font-variant-numeric: tabular-nums; }
img { width: 100%; height: auto; margin: .8rem 0; }
pre { background: #f5f6f8; padding: 1rem; overflow-x: auto; font-size: .85rem; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<table>
{% for name, text in figures %}<tr><td>{{ name }}</td><td>{{ text }}</td></tr>
{% endfor %}</table>
{% for picture in pictures %}<img src="data:image/png;base64,{{ picture.data }}" alt="{{ picture.title }} by step">
{% endfor %}{% if samples %}<details><summary>Validation samples</summary><pre>{{ samples }}</pre></details>
{% endif %}{% if record %}<details><summary>Run record</summary><pre>{{ record }}</pre></details>
{% endif %}{% if config %}<details><summary>Resolved configuration</summary><pre>{{ config }}</pre></details>
{% endif %}</body>
</html>
"""


def _last_samples(run_dir: Path) -> str:
    """What the latest validation showed, with its step."""
    paths = {int(path.stem.removeprefix("step_")): path for path in (run_dir / SAMPLES_FOLDER).glob("step_*.txt")}
    return f"step {max(paths)}\n{_text_of(paths[max(paths)])}" if paths else ""


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m nemo_offload_rl.report`."""
    parser = argparse.ArgumentParser(prog="nemo_offload_rl.report", description="Draw the metrics of a run.")
    parser.add_argument("run_dir", type=Path, help="run folder: logger.log_dir of the run")
    page = write_report(parser.parse_args(argv).run_dir)
    sys.stdout.write(f"{page}\n")
    return 0


if __name__ == "__main__":
    run_main(main)
