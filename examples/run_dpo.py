"""DPO: python examples/run_dpo.py --config examples/configs/dpo.yaml dpo.max_num_steps=20."""

from functools import partial

from nemo_offload_rl.runs.loading import launch
from nemo_offload_rl.utils.cli import run_main

main = partial(launch, "dpo", "Train a model on pairs of a better and a worse response.", "examples/configs/dpo.yaml")

if __name__ == "__main__":
    run_main(main)
