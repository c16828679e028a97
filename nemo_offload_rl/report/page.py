"""The page of a report: one HTML file with everything inside, for light and dark mode, for phones and desktops."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from nemo_offload_rl.report.figures import (
    RESIDENCY,
    SECTIONS,
    Lines,
    Metrics,
    Stack,
    byte_unit,
    bytes_moved,
    driver_seconds,
    phase_layers,
    read_metrics,
)
from nemo_offload_rl.report.plot import draw, draw_memory, layer_colors, memory_samples, planned_peaks, svg
from nemo_offload_rl.report.template import BODY, HEAD, SCRIPT, STYLE
from nemo_offload_rl.utils.logger import SAMPLES_FOLDER

_STEPS_NAMED = 5


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: Its heading.
        figures: Title and SVG element of each.
        rows: Name and text of each figure of its table.
        note: A sentence instead of figures.
    """

    title: str
    figures: Sequence[tuple[str, str]] = ()
    rows: Sequence[tuple[str, str]] = ()
    note: str = ""


def write_report(run_dir: Path) -> Path:
    """Draw everything that was measured.

    Returns:
        The HTML page, RUN_DIR/report/index.html.

    Raises:
        DataError: The run has no metrics.
    """
    metrics = read_metrics(run_dir)
    html = render_page(
        BODY,
        title=title_of(run_dir),
        folder=str(run_dir.resolve()),
        rows=summary(metrics),
        band=band(metrics),
        band_of="Seconds of a step, on average after the first" if len(metrics.by_step) > 2 else "Seconds of a step",
        sections=sections(run_dir, metrics),
        script=SCRIPT,
        details=[
            ("Validation samples", _last_samples(run_dir)),
            ("Run record", _text_of(run_dir / "run.json")),
            ("Resolved configuration", _text_of(run_dir / "config.yaml")),
        ],
    )
    page = run_dir / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text(html, encoding="utf-8")
    return page


def render_page(body: str, *, title: str, style: str = "", **values: Any) -> str:
    """A page of HTML with everything inside.

    Args:
        body: Template of Jinja with the contents below the title.
        title: Title and heading.
        style: CSS after that of every page.
        values: Variables of the template.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(f"{HEAD}{body}</body>\n</html>\n")
    return template.render(title=title, style=f"{STYLE}\n{style}", **values)


def title_of(run_dir: Path) -> str:
    """Model, data and date of the run as far as its records have them; the folder's name if they have none."""
    try:
        config = yaml.safe_load(_text_of(run_dir / "config.yaml")) or {}
        record = json.loads(_text_of(run_dir / "run.json") or "{}")
    except (yaml.YAMLError, ValueError):
        return run_dir.resolve().name
    model = Path(_value(config, "policy", "model_name")).name
    data = _value(config, "data", "train")
    data = ", ".join(dict.fromkeys(_data_name(part) for part in data.get("datasets") or [data])) if data else ""
    about = " on ".join(part for part in (model, data) if part)
    return ", ".join(part for part in (about, _value(record, "started")[:10]) if part) or run_dir.resolve().name


def _value(records: Any, *path: str) -> Any:
    """What stands at a path of nested mappings; "" if nothing does."""
    for key in path:
        records = records.get(key) if isinstance(records, Mapping) else None
    return records or ""


def _data_name(train: Mapping[str, Any]) -> str:
    """Name of a file or a data set of the hub, else that of the kind of data."""
    return Path(str(train.get("path") or train.get("dataset_name") or "")).name


@dataclass(frozen=True)
class Part:
    """A part of an average step: seconds, their share of the step in percent, and its color in the figure."""

    label: str
    seconds: float
    percent: float
    color: str


def band(metrics: Metrics) -> list[Part]:
    """What the time of a step goes to: means over all steps but the first, which compiles."""
    layers = phase_layers(metrics)
    if layers is None:
        return []
    first = 1 if len(layers.steps) > 1 else 0
    colors = layer_colors(layers)
    seconds = {label: fmean(layers.values[label][first:]) for label in colors}
    total = sum(seconds.values())
    return [Part(label, part, 100 * part / total, colors[label]) for label, part in seconds.items() if part > 0]


def summary(metrics: Metrics) -> list[tuple[str, str]]:
    """The run in a few lines: name and text of each value that was measured."""
    rows = [("last step", str(max(metrics.by_step)))]
    for row in _ROWS:
        values = metrics.finite(row.metric)
        if values:
            rows.append((row.label, row.text(values)))
    layers = phase_layers(metrics)
    if layers is not None:
        first = 1 if len(layers.steps) > 1 else 0
        driver_s = median(driver_seconds(layers)[first:])
        step_s = median(metrics.values_at("timing/total_s", layers.steps[first:]))
        share = f", {driver_s / step_s:.1%} of a step" if step_s else ""
        rows.append(("driver outside engine and passes, median", f"{driver_s:.2f} s{share}"))
    for name in metrics.names():
        steps = [step for step, value in zip(*metrics.series(name), strict=True) if not math.isfinite(value)]
        if steps:
            named = ", ".join(str(step) for step in steps[:_STEPS_NAMED])
            more = f" and {len(steps) - _STEPS_NAMED} more" if len(steps) > _STEPS_NAMED else ""
            rows.append((f"{name} is not finite", f"step {named}{more}"))
    return rows


def sections(run_dir: Path, metrics: Metrics) -> list[Section]:
    """The sections of the page that are not empty; residency is the last."""
    found = [Section(title, _drawn(figures, metrics)) for title, figures in SECTIONS.items()]
    samples = memory_samples(run_dir)
    if samples:
        title, planned = "GPU memory by owner", planned_peaks(metrics)
        found.append(Section("Memory", [(title, svg(title, lambda axes: draw_memory(axes, samples, planned)))]))
    moved = bytes_moved(metrics)
    if moved == 0:
        found.append(Section("Residency", note="Nothing moved: no byte was copied or freed between device and host."))
    elif moved is not None:
        found.append(Section("Residency", _drawn([RESIDENCY], metrics), residency_rows(metrics)))
    return [section for section in found if section.figures or section.note]


def residency_rows(metrics: Metrics) -> list[tuple[str, str]]:
    """Bytes that the residency manager copied in the whole run, and seconds of copies, waited for or hidden."""
    copied = sum(sum(metrics.finite(f"residency/{name}")) for name in ("bytes_out", "bytes_in"))
    divisor, unit = byte_unit(copied)
    rows = [("bytes copied", f"{copied / divisor:.2f} {unit}")]
    for name, label in (("exposed_s", "waited for"), ("hidden_s", "hidden behind compute")):
        values = metrics.finite(f"residency/{name}")
        if values:
            rows.append((f"seconds of copies {label}", f"{sum(values):.2f}"))
    return rows


def _drawn(figures: Sequence[Lines | Stack], metrics: Metrics) -> list[tuple[str, str]]:
    drawn = ((figure.title, draw(figure, metrics)) for figure in figures)
    return [(title, element) for title, element in drawn if element is not None]


@dataclass(frozen=True)
class _Row:
    metric: str
    label: str
    text: Callable[[Sequence[float]], str]


def _first_to_last(form: str, best: Callable[[Sequence[float]], float] | None = None) -> Callable[..., str]:
    def text(values: Sequence[float]) -> str:
        if len(values) == 1:
            return f"{values[0]:{form}}"
        change = f"{values[0]:{form}} to {values[-1]:{form}}"
        return change if best is None else f"{change} (best {best(values):{form}})"

    return text


def _median(form: str) -> Callable[[Sequence[float]], str]:
    return lambda values: f"{median(values):{form}}"


_ROWS = (
    _Row("validation/accuracy", "held-out accuracy", _first_to_last(".1%", max)),
    _Row("train/accuracy", "training accuracy", _first_to_last(".1%", max)),
    _Row("train/reward_mean", "mean reward", _first_to_last(".3f")),
    _Row("validation/loss", "held-out loss", _first_to_last(".3f", min)),
    _Row("validation/token_accuracy", "held-out token accuracy", _first_to_last(".1%", max)),
    _Row("train/rewards_margin_mean", "reward margin", _first_to_last(".3f")),
    _Row("train/token_mult_prob_error", "largest token_mult_prob_error", lambda values: f"{max(values):.4f}"),
    _Row("train/generation_tokens_per_s", "generated tokens per second, median", _median(".0f")),
    _Row("train/training_tokens_per_s", "trained tokens per second, median", _median(".0f")),
    _Row("train/training_mfu", "MFU of training, median", _median(".1%")),
    _Row("timing/total_s", "seconds per step, median", _median(".2f")),
)


def _last_samples(run_dir: Path) -> str:
    """Samples of the latest validation, with its step."""
    paths = {int(path.stem.removeprefix("step_")): path for path in (run_dir / SAMPLES_FOLDER).glob("step_*.txt")}
    return f"step {max(paths)}\n{_text_of(paths[max(paths)])}" if paths else ""


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
