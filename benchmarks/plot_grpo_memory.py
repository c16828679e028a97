"""Draw `memory_every_3_s` of a result of grpo_gpu.py: python benchmarks/plot_grpo_memory.py RESULT.json PICTURE.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    samples = json.loads(source.read_text())["memory_every_3_s"]
    times = [sample["t_s"] for sample in samples]
    owners = {"engine": "#efb118", "policy": "#4269d0"}
    figure = Figure(figsize=(8, 3.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    layers = [[sample[f"{owner}_mib"] / 1024 for sample in samples] for owner in owners]
    axes.stackplot(times, layers, labels=list(owners), colors=list(owners.values()), step="post")
    axes.set_xlim(70, times[-1])
    axes.set_xlabel("seconds since the launch")
    axes.set_ylabel("GiB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(target)


if __name__ == "__main__":
    main()
