"""SFT: python examples/run_sft.py --config examples/configs/sft.yaml sft.max_num_steps=20."""

import nemo_offload_rl
from nemo_offload_rl.utils.cli import ending_process, parse_launch_arguments, set_up_logging


def main() -> None:
    """Read the command line, check the configuration, run."""
    arguments = parse_launch_arguments("Fine-tune a model on conversations.", "sft.yaml")
    set_up_logging()
    config = nemo_offload_rl.load_sft_config(arguments.config, arguments.overrides)
    nemo_offload_rl.run_sft(config)


if __name__ == "__main__":
    with ending_process():
        main()
