"""Small SFT and DPO runs in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from tiny_models import make_tokenizer, save_model_folder

from nemo_offload_rl.runs.loading import load_dpo_config, load_sft_config
from nemo_offload_rl.runs.supervised import StartPolicy, local_policy, run_dpo, run_sft

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}>{% endif %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
NUM_ROWS = 24


def write_model(folder: Path) -> None:
    """The tiny model with a template whose beginning of a turn can be told."""
    save_model_folder(folder, seed=0)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def write_rows(path: Path) -> None:
    """Rows of different lengths that serve both algorithms."""
    rows = [
        {"p": f"count to {row}:", "c": " ".join(map(str, range(row % 5 + 1))), "r": "no" * (row % 3 + 1)}
        for row in range(NUM_ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def common(folder: Path, name: str) -> list[str]:
    return [
        f"policy.model_name={folder / 'model'}",
        "policy.precision=float32",
        "policy.max_total_sequence_length=64",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=4",
        "policy.logprob_batch_size=3",
        "policy.logprob_chunk_size=null",
        "policy.max_grad_norm=1e9",
        "policy.scheduler=null",
        "policy.optimizer.kwargs.lr=1e-3",
        "policy.sequence_packing.enabled=false",
        "policy.use_pinned_optimizer_offload=false",
        "cluster.gpus_per_node=0",
        "logger.tensorboard_enabled=false",
        f"logger.log_dir={folder / name}",
        f"checkpointing.checkpoint_dir={folder / name / 'checkpoints'}",
    ]


FILE = "split_validation_size: 0.34, seed: 1, path: {folder}/rows.jsonl"
SFT_DATA = "+data.train={{dataset_name: ResponseDataset, input_key: p, output_key: c, " + FILE + "}}"
DPO_DATA = (
    "+data.train={{dataset_name: BinaryPreferenceDataset, prompt_key: p, chosen_key: c, rejected_key: r, " + FILE + "}}"
)
SFT_KEYS = [
    "sft.max_num_epochs=10", "sft.max_num_steps=4", "sft.val_period=2", "sft.val_batches=0",
    "sft.val_global_batch_size=4", "sft.val_micro_batch_size=3",
]  # fmt: skip
DPO_KEYS = [key.replace("sft.", "dpo.") for key in SFT_KEYS]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def sft(
    folder: Path, name: str, *overrides: str, start: StartPolicy = local_policy, callbacks: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """Metrics of a run, one record a step."""
    keys = [*SFT_KEYS, *common(folder, name), "~data.train", SFT_DATA.format(folder=folder), *overrides]
    run_sft(load_sft_config("examples/configs/sft.yaml", keys), start, Console(quiet=True), callbacks=callbacks)
    return read_metrics(folder / name)


def dpo(folder: Path, name: str, *overrides: str, start: StartPolicy = local_policy) -> list[dict[str, Any]]:
    """Metrics of a run, one record a step."""
    keys = [*DPO_KEYS, *common(folder, name), "~data.train", DPO_DATA.format(folder=folder), *overrides]
    run_dpo(load_dpo_config("examples/configs/dpo.yaml", keys), start, Console(quiet=True))
    return read_metrics(folder / name)


def results(records: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What does not depend on the clock."""
    return [
        {
            name: value
            for name, value in record.items()
            if name.startswith(("train/", "validation/", "step")) and not name.endswith("_per_s")
        }
        for record in records
    ]


Run = Callable[..., list[dict[str, Any]]]
