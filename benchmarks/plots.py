"""Draws the figures of the docs from committed results.

    python benchmarks/plots.py

- docs/images/grpo_gpu_memory.svg: GPU memory over two steps, by owner, of `grpo_vs_peers.py`;
- docs/images/grpo_learning.svg: rewards and accuracy of `grpo_learning.py`;
- docs/images/residency_peers.svg: offload and reload of `residency_peers.py`.

Text and lines of a figure have a light color in dark mode; all other colors are for both.
"""

from __future__ import annotations

import io
import json
import statistics
from itertools import groupby
from typing import Any

import matplotlib
from common import ROOT
from matplotlib.figure import Figure

RESULTS, IMAGES = ROOT / "benchmarks/results", ROOT / "docs/images"
NUM_STEPS = 2
OWNERS = {
    "engine": ("vLLM engine", "#e8a33d"),
    "policy": ("policy (trainer)", "#3b6fc9"),
    "other": ("other", "#8a8f98"),
}
BANDS = {
    "refit": ("refit", "#ff725c"),
    "generation": ("generation", "#efb118"),
    "logprobs": ("logprobs", "#6cc5b0"),
    "reference_logprobs": ("reference", "#3ca951"),
    "training": ("training", "#4269d0"),
}
BAND_ALPHA = 0.2
INK, BLUE, GREY = "#010203", "#4269d0", "#9498a0"  # INK becomes the color of text
STYLE = "<style>:root{color:#24292f}@media (prefers-color-scheme:dark){:root{color:#d5dae0}}</style>"
BACKENDS = {"dtensor": BLUE, "megatron": "#efb118"}
PEERS = {
    "nemo_offload_rl": "nemo_offload_rl",
    "torch_memory_saver_retained": "torch_memory_saver,\nretained backup",
    "nemo_rl_2248": "NeMo-RL #2248",
    "verl": "verl",
    "deepspeed": "DeepSpeed",
    "torch_memory_saver": "torch_memory_saver",
    "megatron_core": "megatron-core",
    "nemo_rl_head": "NeMo-RL HEAD",
}


def read(name: str) -> dict[str, Any]:
    """A committed result."""
    return json.loads((RESULTS / name).read_text())


def memory(figure: Figure) -> None:
    """Draw who has the GPU's memory in the last two steps, with the phases as bands."""
    samples = read("grpo_vs_trl_same_gpu_dtensor.json")["sides"]["nemo_offload_rl"]["memory"]
    last_steps = sorted({sample["step"] for sample in samples})[-NUM_STEPS:]
    samples = [sample for sample in samples if sample["step"] in last_steps]
    times = [sample["t_s"] - samples[0]["t_s"] for sample in samples]
    held = [next(iter(sample["gib"].values())) for sample in samples]  # the run has one GPU
    axes = figure.subplots()
    for phase, group in groupby(range(len(samples)), key=lambda i: samples[i]["phase"]):
        indices = list(group)
        start, end = times[indices[0]], times[min(indices[-1] + 1, len(times) - 1)]
        label, color = BANDS.get(phase, ("", "none"))
        axes.axvspan(start, end, color=color, alpha=BAND_ALPHA, linewidth=0, zorder=0)
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
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False)


def learning(figure: Figure) -> None:
    """Draw rewards of the steps above, held-out accuracy below; resident variants are dotted."""
    result = read("grpo_learning.json")
    rewards, accuracy = figure.subplots(2, 1)
    for variant, curves in result["curves"].items():
        backend, is_resident = variant.removesuffix("_resident"), variant.endswith("_resident")
        color, line = (INK, ":") if is_resident else (BACKENDS[backend], "-")
        label = f"{backend}, states resident" if is_resident else backend
        steps = range(1, len(curves["train/reward_mean"]) + 1)
        rewards.plot(steps, curves["train/reward_mean"], label=label, linewidth=1.2, color=color, linestyle=line)
        if not is_resident:
            points = zip(*curves["validation"], strict=True)
            accuracy.plot(*points, marker="o", markersize=3, label=label, color=color, linestyle=line)
    for axis, title in ((rewards, "mean reward"), (accuracy, "held-out accuracy")):
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        axis.legend(frameon=False, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"GRPO on additions, 3.2 M parameters, one {result['machine']['gpu']}", fontsize=11)


def peers(figure: Figure) -> None:
    """Draw the first offload above, a steady cycle below."""
    result = read("residency_peers_1.5B.json")
    by_name = {row["algorithm"]: row for row in result["rows"]}
    rows = {label: by_name[name]["cycles"] for name, label in PEERS.items() if name in by_name}
    first = [cycles[0]["offload_s"] for cycles in rows.values()]
    steady = [statistics.median(c["offload_s"] + c["reload_s"] for c in cycles[1:]) for cycles in rows.values()]
    above, below = figure.subplots(2, 1)
    titles = ("first offload, s", "steady offload and reload, s (log scale)")
    for axis, values, title in zip((above, below), (first, steady), titles, strict=True):
        colors = [BLUE if label.startswith("nemo_offload_rl") else GREY for label in rows]
        axis.barh(list(rows), values, color=colors)
        for index, value in enumerate(values):
            axis.text(value, index, f" {value:.2f}", va="center", fontsize=10)
        axis.set_title(title, fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.invert_yaxis()
    below.set_xscale("log")
    above.set_xlim(right=1.15 * max(first))
    below.set_xlim(right=1.6 * max(steady))
    gib = result["rows"][0]["state_bytes"] / 2**30
    link = "one H200, link {d2h:.0f}/{h2d:.0f} GB/s".format(**result["link_gb_per_s"])
    figure.suptitle(f"{gib:.1f} GiB of Adam state (1.5 B parameters), {link}")


def main() -> None:
    """Draw all of them."""
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    matplotlib.rcParams |= {"svg.hashsalt": "nemo_offload_rl", **dict.fromkeys(inked, INK)}
    for draw, name, size in (
        (memory, "grpo_gpu_memory.svg", (6.6, 3.7)),
        (learning, "grpo_learning.svg", (6.6, 5.4)),
        (peers, "residency_peers.svg", (6.6, 7.4)),
    ):
        figure, text = Figure(figsize=size, layout="constrained"), io.StringIO()
        with matplotlib.rc_context({"font.size": 11}):
            draw(figure)
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        inked_svg = text.getvalue().replace(INK, "currentColor").replace("<defs>", f"{STYLE}<defs>", 1)
        (IMAGES / name).write_text(inked_svg)


if __name__ == "__main__":
    main()
