"""A run of distillation in one process, as `one_process_grpo.py`; arguments as of examples/run_distillation.py."""

from __future__ import annotations

from one_process_grpo import run_in_this_process
from run_distillation import main

if __name__ == "__main__":
    run_in_this_process(main)
