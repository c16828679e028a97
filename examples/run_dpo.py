"""DPO: python examples/run_dpo.py --config examples/configs/dpo.yaml dpo.max_num_steps=20."""

from nemo_offload_rl.utils.cli import parse_launch_arguments, run_main, set_up_logging


def main() -> None:
    """Read the command line, check the configuration, run."""
    arguments = parse_launch_arguments(
        "Train a model on pairs of a better and a worse response.", default_config="examples/configs/dpo.yaml"
    )
    set_up_logging()
    from nemo_offload_rl.runs.loading import load_dpo_config

    config = load_dpo_config(arguments.config, arguments.overrides)
    from nemo_offload_rl.runs.supervised import run_dpo

    run_dpo(config)


if __name__ == "__main__":
    run_main(main)
