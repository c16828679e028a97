"""Draw docs/images/residency_peers.png and residency_megatron.png from the committed results.

python benchmarks/plot_residency.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def draw(rows: Mapping[str, Sequence[dict[str, float]]], title: str, target: str) -> None:
    """Two panels, the first offload and a steady cycle; `rows` has each way's cycles by its label."""
    first = [cycles[0]["offload_s"] for cycles in rows.values()]
    steady = [statistics.median(c["offload_s"] + c["reload_s"] for c in cycles[1:]) for cycles in rows.values()]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, values, what in (
        (axes[0], first, "first offload, s"),
        (axes[1], steady, "steady offload and reload, s (log scale)"),
    ):
        colors = ["#4269d0" if label.startswith("nemo_offload_rl") else "#9498a0" for label in rows]
        axis.barh(list(rows), values, color=colors)
        for index, value in enumerate(values):
            axis.text(value, index, f" {value:.2f}", va="center", fontsize=8)
        axis.set_title(what, fontsize=10)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].invert_yaxis()
    axes[1].set_xscale("log")
    axes[0].set_xlim(right=1.15 * max(first))
    figure.suptitle(title, y=1.0)
    figure.tight_layout()
    path = ROOT / "docs/images" / target
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def read(name: str) -> tuple[dict[str, Any], str]:
    """A result, and its link in words."""
    result = json.loads((ROOT / "benchmarks/results" / name).read_text())
    return result, "one H200, link {d2h:.0f}/{h2d:.0f} GB/s".format(**result["link_gb_per_s"])


def main() -> None:
    """Peers' algorithms on Adam's states, and megatron-core's own way with its distributed optimizer."""
    result, link = read("residency_peers_1.5B.json")
    by_name = {row["algorithm"]: row for row in result["rows"]}
    rows = {label: by_name[name]["cycles"] for name, label in LABELS.items() if name in by_name}
    gib = result["rows"][0]["state_bytes"] / 2**30
    draw(rows, f"{gib:.1f} GiB of Adam state (1.5 B parameters), {link}", "residency_peers.png")

    result, link = read("residency_megatron.json")
    rows = {row["variant"].replace(", ", ",\n"): row["cycles"] for row in result["rows"]}
    draw(rows, f"Megatron's distributed optimizer, parameters, gradients (1.5 B), {link}", "residency_megatron.png")


if __name__ == "__main__":
    main()
