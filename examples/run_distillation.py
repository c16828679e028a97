"""Distillation: python examples/run_distillation.py --config examples/configs/distillation_math.yaml."""

import nemo_offload_rl
from nemo_offload_rl.utils.cli import ending_process, parse_launch_arguments, set_up_logging


def main() -> None:
    """Read the command line, check the configuration, run."""
    arguments = parse_launch_arguments(
        "Train a student on its own answers to be nearer to a teacher.", "distillation_math.yaml"
    )
    set_up_logging()
    config = nemo_offload_rl.load_distillation_config(arguments.config, arguments.overrides)
    nemo_offload_rl.run_distillation(config)


if __name__ == "__main__":
    with ending_process():
        main()
