"""SFT: python examples/run_sft.py --config examples/configs/sft.yaml sft.max_num_steps=20."""

from functools import partial

from nemo_offload_rl.runs.loading import launch
from nemo_offload_rl.utils.cli import run_main

main = partial(launch, "sft", "Fine-tune a model on conversations.", "examples/configs/sft.yaml")

if __name__ == "__main__":
    run_main(main)
