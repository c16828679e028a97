"""Evaluation: python examples/run_eval.py --config examples/configs/eval.yaml generation.model_name=FOLDER."""

import nemo_offload_rl
from nemo_offload_rl.utils.cli import ending_process, parse_launch_arguments, set_up_logging


def main() -> None:
    """Read the command line, check the configuration, run."""
    arguments = parse_launch_arguments("Evaluate a model: pass@k, greedy and sampled.", "eval.yaml")
    set_up_logging()
    config = nemo_offload_rl.load_eval_config(arguments.config, arguments.overrides)
    nemo_offload_rl.run_eval(config)


if __name__ == "__main__":
    with ending_process():
        main()
