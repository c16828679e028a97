"""SFT and then DPO as users start them: launch scripts, real Ray, two policy workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from documented_metrics import documented
from supervised_cases import (
    DPO_DATA,
    DPO_KEYS,
    SFT_DATA,
    SFT_KEYS,
    common,
    dpo,
    read_metrics,
    results,
    sft,
    write_model,
    write_rows,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("supervised")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    return folder


def launch(folder: Path, algorithm: str, *overrides: str, ray_address: str | None = None) -> str:
    """What a run of two workers wrote to standard output; in a Ray cluster of its own, or the one at `ray_address`."""
    keys, data = (SFT_KEYS, SFT_DATA) if algorithm == "sft" else (DPO_KEYS, DPO_DATA)
    arguments = [*keys, *common(folder, algorithm), "~data.train", data.format(folder=folder), *overrides]
    done = subprocess.run(
        [sys.executable, f"examples/run_{algorithm}.py", *arguments, "cluster.cpu_workers_per_node=2"],
        cwd=ROOT,
        env=os.environ if ray_address is None else {**os.environ, "RAY_ADDRESS": ray_address},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sft_output(folder):
    return launch(folder, "sft", "logger.num_val_samples_to_print=1", "checkpointing.save_consolidated=true")


@pytest.fixture(scope="module")
def dpo_model(folder, sft_output, ray_here):
    """The model of a DPO run that went on after two of its four steps."""
    model = f"policy.model_name={folder / 'sft' / 'checkpoints' / 'step_4' / 'hf'}"
    packing = ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=128"]
    ray_here()
    address = ray.get_runtime_context().gcs_address
    launch(folder, "dpo", model, *packing, "dpo.max_num_steps=2", ray_address=address)
    launch(folder, "dpo", model, *packing, ray_address=address)
    return model


def test_sft_on_two_workers_equals_sft_on_one(folder, sft_output):
    alone = sft(folder, "alone", "checkpointing.enabled=false")
    for ours, theirs in zip(results(read_metrics(folder / "sft")), results(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_person_sees_what_is_learned_and_each_step(sft_output):
    assert re.search(r"^  learns what is in \[\[ \]\]: 'count to \d+:>\[\[0.*<\|im_end\|>\]\]'$", sft_output, re.M)
    assert re.search(r"^before training: held-out loss \d\.\d{4}$", sft_output, re.M)
    assert re.search(r"^step 4/4  loss \d\.\d{4}  held-out loss \d\.\d{4}  \S+ s \(.*\)  0 s left$", sft_output, re.M)


def test_dpo_with_packing_on_two_workers_equals_dpo_on_one_also_when_it_is_resumed(folder, dpo_model):
    alone = dpo(folder, "alone-dpo", dpo_model, "checkpointing.enabled=false")
    for ours, theirs in zip(results(read_metrics(folder / "dpo")), results(alone), strict=True):
        # Rounding decides which response is preferred where the policy still is the reference.
        is_start = theirs["step"] < 2
        names = [name for name in theirs if not (is_start and name.endswith("accuracy"))]
        assert {name: ours[name] for name in names} == pytest.approx(
            {name: theirs[name] for name in names}, rel=1e-3, abs=1e-5
        )


@pytest.mark.parametrize(("algorithm", "title"), [("sft", "SFT"), ("dpo", "DPO")])
def test_a_run_measures_exactly_what_the_documentation_says(folder, dpo_model, algorithm, title):
    records = {record.pop("step"): set(record) for record in read_metrics(folder / algorithm)}
    both = documented("In every step of SFT and DPO")
    training = both | documented(f"In every step of {title}")
    validation = documented(f"In every validation of {title}")
    assert records[0] >= validation
    assert records[3] == training
    assert records[4] == training | validation | {"timing/checkpoint_s"}
