"""SFT: python examples/run_sft.py --config examples/configs/sft.yaml sft.max_num_steps=20."""

from nemo_offload_rl.utils.cli import parse_launch_arguments, run_main, set_up_logging


def main() -> None:
    """Read the command line, check the configuration, run."""
    arguments = parse_launch_arguments(
        "Fine-tune a model on conversations.", default_config="examples/configs/sft.yaml"
    )
    set_up_logging()
    from nemo_offload_rl.runs.loading import load_sft_config

    config = load_sft_config(arguments.config, arguments.overrides)
    from nemo_offload_rl.runs.supervised import run_sft

    run_sft(config)


if __name__ == "__main__":
    run_main(main)
