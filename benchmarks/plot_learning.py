"""Draw docs/images/grpo_learning.png from the committed results: python benchmarks/plot_learning.py."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
COLORS = {"dtensor": "#4269d0", "megatron": "#efb118"}
RESIDENT = "_resident"


def main() -> None:
    """Rewards of the steps on the left, held-out accuracy on the right; resident variants dashed over their twins."""
    result = json.loads((ROOT / "benchmarks/results/grpo_learning.json").read_text())
    figure, (rewards, accuracy) = plt.subplots(1, 2, figsize=(10, 3.6))
    for variant, curves in result["curves"].items():
        backend, is_resident = variant.removesuffix(RESIDENT), variant.endswith(RESIDENT)
        how = {"color": "#222222" if is_resident else COLORS[backend], "linestyle": ":" if is_resident else "-"}
        label = f"{backend}, states resident" if is_resident else backend
        steps = range(1, len(curves["train/reward_mean"]) + 1)
        rewards.plot(steps, curves["train/reward_mean"], label=label, linewidth=1.2, **how)
        if not is_resident:
            accuracy.plot(*zip(*curves["validation"], strict=True), marker="o", markersize=3, label=label, **how)
    for axis, title in ((rewards, "mean reward"), (accuracy, "held-out accuracy")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"GRPO on additions, 3.2 M parameters, one {result['machine']['gpu']}", fontsize=11)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/images/grpo_learning.png", dpi=110)


if __name__ == "__main__":
    main()
