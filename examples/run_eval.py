"""Evaluation: python examples/run_eval.py --config examples/configs/eval.yaml generation.model_name=FOLDER."""

from nemo_offload_rl.utils.cli import parse_launch_arguments, run_main, set_up_logging


def main() -> None:
    """Read the command line, check the configuration, evaluate."""
    arguments = parse_launch_arguments(
        "Evaluate a model: pass@k, greedy and sampled.", default_config="examples/configs/eval.yaml"
    )
    set_up_logging()
    from nemo_offload_rl.runs.loading import load_eval_config

    config = load_eval_config(arguments.config, arguments.overrides)
    from nemo_offload_rl.runs.evaluation import run_eval

    run_eval(config)


if __name__ == "__main__":
    run_main(main)
