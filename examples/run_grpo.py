"""GRPO: python examples/run_grpo.py --config examples/configs/grpo_math_1B.yaml grpo.max_num_steps=20."""

import nemo_offload_rl
from nemo_offload_rl.utils.cli import ending_process, parse_launch_arguments, set_up_logging


def main() -> None:
    """Read the command line, check the configuration, run."""
    arguments = parse_launch_arguments("Train a policy with GRPO.", "grpo_math_1B.yaml")
    set_up_logging()
    config = nemo_offload_rl.load_grpo_config(arguments.config, arguments.overrides)
    nemo_offload_rl.run_grpo(config)


if __name__ == "__main__":
    with ending_process():
        main()
