"""Distillation: python examples/run_distillation.py --config examples/configs/distillation_math.yaml."""

from nemo_offload_rl.utils.cli import parse_launch_arguments, run_main, set_up_logging


def main() -> None:
    """Read the command line, check the configuration, run."""
    arguments = parse_launch_arguments(
        "Train a student on its own answers to be nearer to a teacher.",
        default_config="examples/configs/distillation_math.yaml",
    )
    set_up_logging()
    from nemo_offload_rl.runs.loading import load_distillation_config

    config = load_distillation_config(arguments.config, arguments.overrides)
    from nemo_offload_rl.runs.distillation import run_distillation

    run_distillation(config)


if __name__ == "__main__":
    run_main(main)
