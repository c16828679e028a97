"""GRPO: python examples/run_grpo.py --config examples/configs/grpo_math_1B.yaml grpo.max_num_steps=20."""

from functools import partial

from nemo_offload_rl.runs.loading import launch
from nemo_offload_rl.utils.cli import run_main

main = partial(launch, "grpo", "Train a policy with GRPO.", "examples/configs/grpo_math_1B.yaml")

if __name__ == "__main__":
    run_main(main)
