"""Runs GRPO as a notebook does: after an interrupt it runs again, in the same process, for one more step.

`python tests/support/interrupted_grpo.py ARGUMENTS`: those of examples/run_grpo.py.
"""

from __future__ import annotations

from pathlib import Path

import nemo_offload_rl
from nemo_offload_rl.utils.cli import ending_process, parse_launch_arguments, set_up_logging


def main() -> None:
    """Run until the interrupt, run one more step, and end as the interrupted run would have."""
    arguments = parse_launch_arguments("Interrupted GRPO.")
    set_up_logging()
    config = nemo_offload_rl.load_grpo_config(arguments.config, arguments.overrides)
    try:
        nemo_offload_rl.run_grpo(config)
    except KeyboardInterrupt:
        folder = Path(config.checkpointing.checkpoint_dir)
        step = max(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))
        again = [*arguments.overrides, f"grpo.max_num_steps={step + 1}"]
        result = nemo_offload_rl.run_grpo(nemo_offload_rl.load_grpo_config(arguments.config, again))
        assert (result.step, result.checkpoint) == (step + 1, folder / f"step_{step + 1}"), result
        assert result.metrics["train/num_tokens"] > 0, result
        raise


if __name__ == "__main__":
    with ending_process():
        main()
