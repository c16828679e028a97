"""DPO: python examples/run_dpo.py --config examples/configs/dpo.yaml dpo.max_num_steps=20."""

import nemo_offload_rl
from nemo_offload_rl.utils.cli import ending_process, parse_launch_arguments, set_up_logging


def main() -> None:
    """Read the command line, check the configuration, run."""
    arguments = parse_launch_arguments("Train a model on pairs of a better and a worse response.", "dpo.yaml")
    set_up_logging()
    config = nemo_offload_rl.load_dpo_config(arguments.config, arguments.overrides)
    nemo_offload_rl.run_dpo(config)


if __name__ == "__main__":
    with ending_process():
        main()
