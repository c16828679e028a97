"""GRPO: python examples/run_grpo.py --config examples/configs/grpo_math_1B.yaml grpo.max_num_steps=20."""

from nemo_offload_rl.utils.cli import parse_launch_arguments, run_main, set_up_logging


def main() -> None:
    """Read the command line, check the configuration, run."""
    arguments = parse_launch_arguments("Train a policy with GRPO.", default_config="examples/configs/grpo_math_1B.yaml")
    set_up_logging()
    from nemo_offload_rl.runs.loading import load_grpo_config

    config = load_grpo_config(arguments.config, arguments.overrides)
    from nemo_offload_rl.runs.rollouts import run_grpo

    run_grpo(config)


if __name__ == "__main__":
    run_main(main)
