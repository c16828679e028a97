"""SFT and then DPO by their launch scripts: real Ray, two policy workers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import forked_workers
import pytest
from documented_metrics import documented
from forked import Script
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

from nemo_offload_rl.utils.progress import shown_python

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("supervised")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    return folder


def arguments(folder: Path, algorithm: str, *overrides: str) -> list[str]:
    """The launch script of a run of two workers, and its arguments."""
    keys, data = (SFT_KEYS, SFT_DATA) if algorithm == "sft" else (DPO_KEYS, DPO_DATA)
    keys = [*keys, *common(folder, algorithm), "~data.train", data.format(folder=folder), *overrides]
    return [f"examples/run_{algorithm}.py", *keys, "cluster.cpu_workers_per_node=2"]


@pytest.fixture(scope="module")
def sft_output(folder, tmp_path_factory):
    """What a run in a Ray cluster of its own wrote to standard output."""
    keys = ("logger.num_val_samples_to_print=1", "logger.profile_steps=[4]", "checkpointing.save_consolidated=true")
    words = arguments(folder, "sft", *keys)
    environment = {**os.environ, **forked_workers.variables()}
    environment.pop("RAY_ADDRESS", None)
    done = Script(words, tmp_path_factory.mktemp("output"), cwd=ROOT, env=environment).wait(1500)
    assert done.status == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dpo_keys(folder, sft_output):
    model = f"policy.model_name={folder / 'sft' / 'checkpoints' / 'step_4' / 'hf'}"
    packing = ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=128"]
    return [model, *packing]


@pytest.fixture(scope="module")
def resumed_dpo(folder, dpo_keys, joined, tmp_path_factory):
    """Metrics of a DPO run of two workers in a cluster that runs already; after two of four steps one goes on."""
    words, environment = arguments(folder, "dpo", *dpo_keys, "dpo.max_num_steps=2"), {**os.environ, **joined()}
    done = Script(words, tmp_path_factory.mktemp("output"), cwd=ROOT, env=environment).wait(1500)
    assert done.status == 0, done.stderr
    return dpo(folder, "dpo", *dpo_keys)


def test_sft_on_two_workers_equals_sft_on_one(folder, sft_output):
    alone = sft(folder, "alone", "checkpointing.enabled=false")
    for ours, theirs in zip(results(read_metrics(folder / "sft")), results(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_the_last_step_is_traced_in_both_workers(folder, sft_output, names_in_trace):
    traces = {path.name: names_in_trace(path) for path in (folder / "sft" / "traces").iterdir()}
    assert traces.keys() == {"step_4_policy_0.json.gz", "step_4_policy_1.json.gz"}
    assert all({"training pass", "update"} <= names for names in traces.values())


def test_a_person_sees_what_is_learned_and_each_step(sft_output):
    assert re.search(r"^  learns what is in \[\[ \]\]: 'count to \d+:>\[\[0.*<\|im_end\|>\]\]'$", sft_output, re.M)
    figures = [r"loss \d\.\d{4}", r"token accuracy \d+\.\d%"]
    assert re.search(rf"^before training: held-out {', '.join(figures)}$", sft_output, re.M)
    held_out = rf"held-out {', '.join(figures)} \(step 4\)"
    assert re.search(rf"^step 4/4  {'  '.join(figures)}  {held_out}  \S+ s \(.*\)  0 s left$", sft_output, re.M)


def test_a_run_begins_with_model_data_and_folders_and_ends_with_what_it_leaves(folder, sft_output):
    begin, end = (
        [
            "reading tokenizer and data",
            "SFT, 4 steps",
            f"  model        {folder}/model",
            "  data         rows, 16 rows; 8 for validation",
            f"  logs         {folder}/sft",
            f"  checkpoints  {folder}/sft/checkpoints, every 50 steps",
        ],
        [
            "the run is complete",
            f"  checkpoint  {folder}/sft/checkpoints/step_4",
            f"  hf export   {folder}/sft/checkpoints/step_4/hf",
            f"  logs        {folder}/sft",
            f"  report      {shown_python()} -m nemo_offload_rl.report {folder}/sft",
            "  go on       raise sft.max_num_steps, then start the same command again",
        ],
    )
    lines = sft_output.splitlines()
    assert lines[: len(begin)] == begin
    assert lines[-len(end) :] == end
    started = [re.fullmatch(r"(\w+) is ready after \d+\.\d s", line) for line in lines]
    assert [found[1] for found in started if found] == ["Ray", "policy"]


def test_dpo_with_packing_on_two_workers_and_a_reference_on_disk_that_goes_on_with_one_equals_dpo_on_one(
    folder, dpo_keys, resumed_dpo
):
    model, *_ = dpo_keys
    alone = dpo(folder, "alone-dpo", model, "checkpointing.enabled=false")
    for ours, theirs in zip(results(resumed_dpo), results(alone), strict=True):
        # Rounding decides which response is preferred where the policy still is the reference.
        is_start = theirs["step"] < 2
        names = [name for name in theirs if not (is_start and name.endswith("accuracy"))]
        assert {name: ours[name] for name in names} == pytest.approx(
            {name: theirs[name] for name in names}, rel=1e-3, abs=1e-5
        )


# Of DPO the steps in Ray: a policy in this process has no memory of its own to measure.
@pytest.mark.parametrize(("algorithm", "title", "last_step"), [("sft", "SFT", 4), ("dpo", "DPO", 2)])
def test_a_run_measures_exactly_what_the_documentation_says(folder, resumed_dpo, algorithm, title, last_step):
    records = {record.pop("step"): set(record) for record in read_metrics(folder / algorithm)}
    both = documented("In every step of SFT and DPO")
    training = both | documented(f"In every step of {title}")
    validation = documented(f"In every validation of {title}")
    assert records[0] >= validation
    first = documented("Once, with the first step")
    assert records[last_step - 1] == (training | first if last_step == 2 else training)
    traced = {"timing/profile_s"} if algorithm == "sft" else set()
    assert records[last_step] == training | validation | {"timing/checkpoint_s"} | traced
