"""Evaluation: python examples/run_eval.py --config examples/configs/eval.yaml generation.model_name=FOLDER."""

from functools import partial

from nemo_offload_rl.runs.loading import launch
from nemo_offload_rl.utils.cli import run_main

main = partial(launch, "eval", "Evaluate a model: pass@k, greedy and sampled.", "examples/configs/eval.yaml")

if __name__ == "__main__":
    run_main(main)
