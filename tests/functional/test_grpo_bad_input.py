"""Bad input ends in one line on standard error and status 2, before Ray starts."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CPU_CONFIG = Path(__file__).parents[2] / "examples/configs/grpo_arithmetic_cpu.yaml"

JSONL = (
    "dataset_name: ResponseDataset, input_key: q, output_key: a, split_validation_size: 0.1, seed: 1, path: {folder}/"
)
# name -> overrides, and words of the line; {folder} is made below
CASES: dict[str, tuple[list[str], list[str]]] = {
    "misspelt key": (["grpo.num_promts_per_step=4"], ["grpo.num_promts_per_step", "did you mean", "num_prompts_per"]),
    "wrong type": (["grpo.max_num_steps=many"], ["grpo.max_num_steps", "many"]),
    "missing model folder": (["policy.model_name={folder}/none"], ["policy.model_name", "is not a folder"]),
    "model without weights": (["policy.model_name={folder}/no_weights"], ["no_weights", "no weights", "safetensors"]),
    "model without tokenizer": (["policy.model_name={folder}/no_tokenizer"], ["no_tokenizer", "no tokenizer"]),
    "empty data set": (["~data.train", "+data.train={{" + JSONL + "empty.jsonl}}"], ["empty.jsonl"]),
    "missing data set": (["~data.train", "+data.train={{" + JSONL + "none.jsonl}}"], ["none.jsonl"]),
    "keys of another data set": (
        ["data.train={{" + JSONL + "empty.jsonl}}"],
        ["data.train.num_digits", "~data.train +data.train="],
    ),
    "batch that does not divide": (["policy.train_global_batch_size=24"], ["train_global_batch_size", "24", "32"]),
    "prompt too long": (
        ["data.max_input_seq_length=7", "data.overlong_rows=error"],
        ["arithmetic problem", "data.max_input_seq_length=7", "data.overlong_rows"],
    ),
    "another vocabulary than that of the weights": (
        ["+policy.hf_config_overrides.vocab_size=4"], ["model.embed_tokens.weight: (64, 128) instead of (4, 128)"],
    ),
    "more hosts than one, found before the data": (
        ["cluster.num_nodes=2", "data.max_input_seq_length=2"], ["cluster.num_nodes=2", "set RAY_ADDRESS"],
    ),
    "every prompt too long": (["data.max_input_seq_length=2"], ["and all others of arithmetic are longer than"]),
    "prompts that leave no room in the engine": (
        ["policy.generation.vllm_cfg.max_model_len=16"], ["max_input_seq_length 16", "max_model_len 16"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory, model_folder, run_grpo):
    """All runs, two at a time; Ray would leave a link."""
    folder = tmp_path_factory.mktemp("bad")
    for name, missing in (("no_weights", "model.safetensors"), ("no_tokenizer", "tokenizer.json")):
        shutil.copytree(model_folder, folder / name, ignore=shutil.ignore_patterns(missing))
    (folder / "empty.jsonl").touch()

    def attempt(name: str):
        overrides = [text.format(folder=folder) for text in CASES[name][0]]
        if not any(text.startswith("policy.model_name=") for text in overrides):
            overrides.append(f"policy.model_name={model_folder}")
        ray = folder / f"ray of {name}"
        done = run_grpo(*overrides, f"logger.log_dir={folder / name}", env={"RAY_TMPDIR": str(ray)})
        return done, (ray / "ray/session_latest").is_symlink()

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(attempt, CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_status_2_before_ray_starts(results, name):
    done, ray_started = results[name]
    assert done.status == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(words in line for words in CASES[name][1]), line
    assert not ray_started


def test_a_missing_configuration_is_one_line_and_status_2(run_grpo, tmp_path):
    done = run_grpo(config=tmp_path / "none.yaml")
    assert done.status == 2
    (line,) = done.stderr.splitlines()
    assert "none.yaml" in line
