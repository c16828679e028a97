"""Distillation: python examples/run_distillation.py --config examples/configs/distillation_math.yaml."""

from functools import partial

from nemo_offload_rl.runs.loading import launch
from nemo_offload_rl.utils.cli import run_main

main = partial(
    launch,
    "distillation",
    "Train a student on its own answers to be nearer to a teacher.",
    "examples/configs/distillation_math.yaml",
)

if __name__ == "__main__":
    run_main(main)
