"""Draw docs/images/grpo_gpu_memory.svg, GPU memory over two steps: python benchmarks/plot_grpo_memory.py [RESULT.json].

The result is one of grpo_vs_trl.py; without an argument that of the DTensor backend beside TRL on one H200.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/grpo_vs_trl_same_gpu_dtensor.json"
PICTURE = ROOT / "docs/images/grpo_gpu_memory.svg"
NUM_STEPS = 2
# On a light card of its own, so that pages in light and in dark mode show it alike.
OWNERS = {
    "engine": ("vLLM engine", "#e8a33d"),
    "policy": ("policy (trainer)", "#3b6fc9"),
    "other": ("other", "#8a8f98"),
}
BANDS = {
    "refit": ("refit", "#f7d9d3"),
    "generation": ("generation", "#fdf3dc"),
    "logprobs": ("logprobs", "#d9efe9"),
    "reference_logprobs": ("reference", "#cfe6c9"),
    "training": ("training", "#dfe8fb"),
}
CARD, INK = "#ffffff", "#24292f"


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULT
    samples = json.loads(source.read_text())["sides"]["nemo_offload_rl"]["memory"]
    last_steps = sorted({sample["step"] for sample in samples})[-NUM_STEPS:]
    samples = [sample for sample in samples if sample["step"] in last_steps]
    times = [sample["t_s"] - samples[0]["t_s"] for sample in samples]
    held = [next(iter(sample["gib"].values())) for sample in samples]  # the run has one GPU

    matplotlib.rcParams |= {"font.size": 11, "svg.hashsalt": "nemo_offload_rl", "text.color": INK}
    figure = Figure(figsize=(6.6, 3.7), layout="constrained", facecolor=CARD)
    axes = figure.subplots()
    for phase, group in groupby(range(len(samples)), key=lambda i: samples[i]["phase"]):
        indices = list(group)
        start, end = times[indices[0]], times[min(indices[-1] + 1, len(times) - 1)]
        label, color = BANDS.get(phase, ("", CARD))
        axes.axvspan(start, end, color=color, linewidth=0, zorder=0)
        middle = (start + end) / 2
        if end - start > 3:
            axes.text(middle, 104, label, ha="center", va="center", fontsize=10)
        elif end - start > 1:
            axes.text(middle, 106, label, ha="center", va="top", fontsize=10, rotation=90)
        elif phase == "refit" and start > 3:
            axes.text(start - 0.1, 94, "refit \N{RIGHTWARDS ARROW}", ha="right", va="center", fontsize=10)
    layers = [[gib[owner] for gib in held] for owner in OWNERS]
    names, colors = zip(*OWNERS.values(), strict=True)
    axes.stackplot(times, layers, labels=names, colors=colors, zorder=2)
    axes.set(xlim=(times[0], times[-1]), ylim=(0, 110), xlabel="seconds", ylabel="GiB on the GPU")
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None})
    print(f"steps {last_steps}: {PICTURE.relative_to(ROOT)}, {PICTURE.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
