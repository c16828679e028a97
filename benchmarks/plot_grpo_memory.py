"""Draw the GPU memory of grpo_vs_trl.py, our side: python benchmarks/plot_grpo_memory.py RESULT.json PICTURE.png."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from nemo_offload_rl.report_memory import memory_picture
from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    samples = json.loads(source.read_text())["sides"]["nemo_offload_rl"]["memory"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MEMORY_FILE).write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        picture = memory_picture(Path(folder))
    if picture is None:
        sys.exit(f"{source} has no samples of memory")
    target.write_bytes(picture)


if __name__ == "__main__":
    main()
