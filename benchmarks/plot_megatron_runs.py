"""Draw docs/images/activation_offload.png and optimizer_residency.png from the committed results.

python benchmarks/plot_megatron_runs.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
PICTURES = ("activation_offload", "optimizer_residency")
# The first whose words are all in a variant's name.
COLORS = {
    ("recompute", "offload"): "#a463f2",
    ("recompute",): "#9498a0",
    ("offload",): "#4269d0",
    ("states",): "#4269d0",
    ("CPU",): "#efb118",
    (): "#222222",
}


def color(variant: str) -> str:
    """That of a variant's kind."""
    return next(found for words, found in COLORS.items() if all(word in variant for word in words))


def draw(name: str) -> None:
    """One panel for each length: peak memory against throughput, each variant a numbered point."""
    result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    lengths = sorted({int(length) for row in result["rows"] for length in row.get("lengths", {})})
    figure, axes = plt.subplots(1, len(lengths), figsize=(3 + 4.5 * len(lengths), 4), squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=True):
        rows = {row["variant"]: row.get("lengths", {}).get(str(length), {"error": ""}) for row in result["rows"]}
        points = {
            variant: (found["peak_gib"], found["tokens_per_s"] / 1000)
            for variant, found in rows.items()
            if "error" not in found
        }
        for variant, (x, y) in points.items():
            axis.scatter([x], [y], color=color(variant), s=28)
            number = str(1 + list(rows).index(variant))
            axis.annotate(number, (x, y), fontsize=8, xytext=(5, -3), textcoords="offset points")
        axis.set_title(f"{length // 1024}k tokens a micro-batch", fontsize=10)
        axis.set_xlabel("peak GPU memory of a step, GiB")
        axis.set_ylabel("1000 tokens / s")
        axis.margins(x=0.1, y=0.1)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Megatron backend, {result['shape']} Qwen3 shape, one {result['machine']['gpu']}", fontsize=11)
    names = [f"{number}  {row['variant']}" for number, row in enumerate(result["rows"], 1)]
    text_from = 0.78 if len(lengths) > 1 else 0.66
    figure.text(text_from, 0.5, "\n".join(names), fontsize=8, va="center", linespacing=1.6)
    figure.tight_layout(rect=(0, 0, text_from - 0.01, 1))
    target = ROOT / f"docs/images/{name}.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=110)


def main() -> None:
    """All pictures."""
    for name in PICTURES:
        draw(name)


if __name__ == "__main__":
    main()
