"""Runs the Python of a page of the guides, policy and engine in this process; by a test as a process of its own.

`documented_script.py PAGE ARGUMENTS`: the blocks of PAGE, one after the other, without those for TRL. ARGUMENTS are in
their `sys.argv`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from one_process_grpo import local_workers

from nemo_offload_rl.runs import rollouts as grpo_setup

GUIDES = Path(__file__).parents[2] / "docs/guides"

if __name__ == "__main__":
    grpo_setup.grpo_workers = local_workers
    page = GUIDES / sys.argv.pop(1)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile("\n".join(block for block in blocks if "from trl" not in block), str(page), "exec"))
