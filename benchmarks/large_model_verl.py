"""verl's GRPO on the work of `large_model_8b.yaml`: seconds a step, or what ends it.

    python benchmarks/large_model_verl.py --json large_model_verl.json

All parameters of a random Qwen3 shape are trained on one GPU, 64 responses of 512 tokens, with KL to a reference,
gradient checkpointing, micro-batches of 8 responses and vLLM colocated, FSDP2 with float32 parameters and AdamW, which
is what nemo_offload_rl computes. Variants are verl's own ways to offload: `around phases` loads parameters and the
optimizer whole for each phase (`param_offload`, `optimizer_offload`); `on the host` leaves both there, fetches
parameters layer by layer and updates on the CPU (`offload_policy`). The reference is in bfloat16 on the host. Each
variant is a process of its own, with `--timeout-s` for it.

Needs a GPU and verl 0.9.1. `--print-config` shows the configuration that verl makes of it, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "demo"))
from large_model_trl import peer_parser

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
VARIANTS: dict[str, Sequence[str]] = {
    "around phases": (
        f"{ACTOR}.fsdp_config.param_offload=True",
        f"{ACTOR}.fsdp_config.optimizer_offload=True",
        f"{REF}.fsdp_config.param_offload=True",
    ),
    "on the host": (f"{ACTOR}.fsdp_config.offload_policy=True", f"{REF}.fsdp_config.offload_policy=True"),
}
SECONDS = ("step", "gen", "old_log_prob", "ref", "update_actor", "update_weights")
# verl's agent loop looks these up in the tokenizer of a Qwen3 model; no response needs them.
LOOKED_UP = ["\n", "<|im_end|>"]


def compute_score(data_source: str, solution_str: str, ground_truth: str, **others: object) -> float:
    """The reward of `large_model.py`, as verl calls it."""
    return float(bool(solution_str.strip()))


def prepare(folder: Path, arguments: argparse.Namespace) -> None:
    """Model, tokenizer and prompts."""
    import pandas
    from host_memory import make_model
    from transformers import AutoTokenizer

    make_model(folder / "model", arguments.shape, "cpu" if arguments.print_config else "cuda")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens(LOOKED_UP)
    tokenizer.save_pretrained(folder / "model")
    sums = [(10 + i % 90, 10 + i * 7 % 90) for i in range(arguments.prompts * (arguments.steps + 1))]
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"{left}+{right}="}],
            "reward_model": {"style": "rule", "ground_truth": str(left + right)},
        }
        for left, right in sums
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")


def overrides(folder: Path, arguments: argparse.Namespace, variant: str) -> list[str]:
    """Of verl's configuration."""
    prompts, tokens, share = arguments.prompts, arguments.tokens, arguments.engine_share
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'train.parquet'}",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=16",
        f"data.max_response_length={tokens}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.model.use_remove_padding=False",  # rows are equally long
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        *(f"{part}.strategy=fsdp2" for part in (ACTOR, f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config")),
        f"{ACTOR}.fsdp_config.model_dtype=fp32",
        f"{ACTOR}.fsdp_config.dtype=bfloat16",
        f"{REF}.fsdp_config.model_dtype=bf16",
        f"{ACTOR}.ppo_mini_batch_size={prompts}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={arguments.micro_batch}",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.01",
        f"{ACTOR}.optim.lr=1e-6",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={arguments.micro_batch}",
        f"{REF}.log_prob_micro_batch_size_per_gpu={arguments.micro_batch}",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.n={arguments.group}",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.ignore_eos=True",
        f"{ROLLOUT}.gpu_memory_utilization={share}",
        f"{ROLLOUT}.free_cache_engine=True",
        f"{ROLLOUT}.max_model_len={16 + tokens}",
        f"{ROLLOUT}.max_num_seqs={prompts * arguments.group}",
        f"{ROLLOUT}.agent.num_workers=4",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=compute_score",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={arguments.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"hydra.run.dir={folder / 'hydra'}",
        "reward.num_workers=4",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=4",
        "ray_kwargs.ray_init.num_cpus=24",  # of its actors, which mostly wait
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=8000000000",
        *VARIANTS[variant],
    ]


def medians(metrics: Path) -> dict[str, float]:
    """Seconds by phase without the first step, or of it where there is no other."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps: list[Mapping[str, float]] = [json.loads(line).get("data", {}) for line in lines]
    found = {name: [step[f"timing_s/{name}"] for step in steps if f"timing_s/{name}" in step] for name in SECONDS}
    return {name: statistics.median(values[1:] or values) for name, values in found.items() if values}


def run_variant(folder: Path, arguments: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Seconds by phase, the most memory of GPU and host, and the last lines where it ended early."""
    from grpo_vs_trl import PeakMemory
    from host_memory import Watch

    metrics, log = folder / f"{variant}.jsonl", folder / f"{variant}.log"
    environment = os.environ | {
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "HF_HUB_OFFLINE": "1",
        "RAY_memory_monitor_refresh_ms": "0",  # such machines grow their memory on use, and show too little before
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(folder, arguments, variant)]
    if arguments.print_config:
        subprocess.run([*command, "--cfg", "job", "--resolve"], env=environment, check=True)
        return {}
    peak, watch = PeakMemory(), Watch()
    watch.owners = {os.getpid(): "verl"}
    peak.start()
    watch.start()
    with log.open("w") as file:
        try:
            status = subprocess.run(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=arguments.timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    watch.stop()
    result: dict[str, Any] = {"median_s": medians(metrics), "gpu_peak_gib": peak.stop(), "host_peak_bytes": watch.peak}
    if status:
        result |= {"status": status, "last_lines": log.read_text().splitlines()[-60:]}
    return result


def main() -> None:
    parser = peer_parser(__doc__, list(VARIANTS), 300.0)
    parser.add_argument("--dir", type=Path, help="folder of the model and the runs; a temporary one without it")
    parser.add_argument("--print-config", action="store_true")
    arguments = parser.parse_args()
    from grpo_gpu import machine

    results: dict[str, Any] = {"machine": machine(), "command": " ".join(["python", *sys.argv]), "variants": {}}
    folder = arguments.dir or Path(tempfile.mkdtemp(prefix="large_model_verl_"))
    prepare(folder, arguments)
    for variant in arguments.variants:
        results["variants"][variant] = found = run_variant(folder, arguments, variant)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{variant}: {found}"[:300], flush=True)


if __name__ == "__main__":
    main()
