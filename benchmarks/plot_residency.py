"""Draw docs/images/residency_peers.png from the committed results.

python benchmarks/plot_residency.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
LABELS = {
    "nemo_offload_rl": "nemo_offload_rl",
    "torch_memory_saver_retained": "torch_memory_saver,\nretained backup",
    "nemo_rl_2248": "NeMo-RL #2248",
    "verl": "verl",
    "deepspeed": "DeepSpeed",
    "torch_memory_saver": "torch_memory_saver",
    "megatron_core": "megatron-core",
    "nemo_rl_head": "NeMo-RL HEAD",
}


def main() -> None:
    """Two panels: the first offload and a steady cycle."""
    result = json.loads((ROOT / "benchmarks/results/residency_peers_1.5B.json").read_text())
    rows = {row["algorithm"]: row for row in result["rows"]}
    names = [name for name in LABELS if name in rows]
    first = [rows[name]["cycles"][0]["offload_s"] for name in names]
    steady = [statistics.median(c["offload_s"] + c["reload_s"] for c in rows[name]["cycles"][1:]) for name in names]
    gib = rows[names[0]]["state_bytes"] / 2**30
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, values, title in (
        (axes[0], first, "first offload, s"),
        (axes[1], steady, "steady offload and reload, s (log scale)"),
    ):
        colors = ["#4269d0" if name == "nemo_offload_rl" else "#9498a0" for name in names]
        axis.barh([LABELS[name] for name in names], values, color=colors)
        for index, value in enumerate(values):
            axis.text(value, index, f" {value:.2f}", va="center", fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].invert_yaxis()
    axes[1].set_xscale("log")
    axes[0].set_xlim(right=1.15 * max(first))
    link = result["link_gb_per_s"]
    figure.suptitle(
        f"{gib:.1f} GiB of Adam state (1.5 B parameters), one H200, link {link['d2h']:.0f}/{link['h2d']:.0f} GB/s",
        y=1.0,
    )
    figure.tight_layout()
    target = ROOT / "docs/images/residency_peers.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
