"""Runs the Python of docs/guides/python.md, policy and engine in this process; by a test as a process of its own."""

from __future__ import annotations

import re
from pathlib import Path

from one_process_grpo import local_workers

from nemo_offload_rl.runs import rollouts as grpo_setup

PAGE = Path(__file__).parents[2] / "docs/guides/python.md"

if __name__ == "__main__":
    grpo_setup.grpo_workers = local_workers
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(PAGE), "exec"))
