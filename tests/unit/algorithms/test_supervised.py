"""Whole runs of SFT and DPO in this process, compared with plain training and with each other."""

from __future__ import annotations

import json
import math
import socket
import urllib.request

import pytest
from closeness import assert_close
from documented_metrics import documented
from prometheus_client.parser import text_string_to_metric_families
from supervised_cases import TEMPLATE, Run, dpo, results, sft, write_model, write_rows
from supervised_replay import DpoReplay, SftReplay
from tiny_models import save_model_folder

from nemo_offload_rl.algorithms.metric_names import DPO_NAMES, SFT_NAMES
from nemo_offload_rl.algorithms.reference_logprobs import FILE_NAME
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.data.readers import read_records
from nemo_offload_rl.data.rows import binary_pair, split_by
from nemo_offload_rl.errors import CheckpointError, ConfigError, UserCodeError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    return folder


@pytest.fixture(scope="module")
def sft_run(folder):
    return sft(folder, "sft", "checkpointing.save_consolidated=true")


@pytest.fixture(scope="module")
def dpo_run(folder):
    return dpo(folder, "dpo")


# -- plain references


def splits(folder):
    pairs = [binary_pair(record, "p", "c", "r") for record in read_records(folder / "rows.jsonl")]
    return split_by(pairs, lambda pair: pair.prompt[0]["content"], size=0.34, seed=1)


def batches(rows, num_steps):
    loader = ShuffledLoader(rows, batch_size=8, shuffle=True, seed=42)
    return [next(loader) for _ in range(num_steps)]


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_every_metric_is_what_plain_training_computes_and_every_one_is_documented(folder, request, algorithm):
    run = request.getfixturevalue(f"{algorithm}_run")
    replay, names = (SftReplay(), SFT_NAMES) if algorithm == "sft" else (DpoReplay(), DPO_NAMES)
    rows, title = splits(folder), algorithm.upper()
    steps = batches(rows.train, 4)
    about_training = documented("In every step of SFT and DPO", f"In every step of {title}")
    about_validation = documented(f"In every validation of {title}")
    for record in run:
        if record["step"]:
            expected = replay.step(steps[record["step"] - 1], record["timing/training_s"])
            assert part(record, "train/") == pytest.approx(expected, rel=1e-3, abs=1e-5)
            assert set(expected) == set(names["train"]) == set(part(dict.fromkeys(about_training), "train/"))
        if record["step"] % 2 == 0:
            expected = replay.validation(rows.validation)
            assert part(record, "validation/") == pytest.approx(expected, rel=1e-3, abs=1e-5)
            of_all = {name for name in names["val"] if "/" not in name}
            assert set(expected) == of_all == set(part(dict.fromkeys(about_validation), "validation/"))
    assert run[4]["validation/loss"] < run[0]["validation/loss"]


def part(record, prefix):
    return {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}


@pytest.mark.parametrize("run", [sft, dpo])
def test_a_masked_row_keeps_its_place_and_has_no_share_in_loss_or_gradient(folder, run: Run):
    """Two sets of which the first has a row that is too long, in the middle of its data."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    long = json.dumps({"p": "count " * 20, "c": "1", "r": "2"})
    for name, rows in {"with": [*lines[:9], long], "without": lines[:9], "other": lines[9:16]}.items():
        for file in (f"{name}.jsonl", f"held_{name}.jsonl"):
            (folder / file).write_text("\n".join(rows) + "\n")
    keys = {"sft": "input_key: p, output_key: c", "dpo": "prompt_key: p, chosen_key: c, rejected_key: r"}[run.__name__]
    kind = {"sft": "ResponseDataset", "dpo": "BinaryPreferenceDataset"}[run.__name__]

    def data(*names: str) -> str:
        sets = [f"{{dataset_name: {kind}, {keys}, path: {folder / name}.jsonl}}" for name in names]
        return f"{{dataset_name: mixture, weights: null, datasets: [{', '.join(sets)}]}}"

    found = {}
    for name, size in (("with", 17), ("without", 16)):
        data_keys = (
            "~data.train",
            f"+data.train={data(name, 'other')}",
            "data.overlong_rows=mask",
            "data.shuffle=false",
        )
        found[name] = run(
            folder, f"{run.__name__}-{name}", *data_keys, f"data.validation={data(f'held_{name}', 'held_other')}",
            "data.max_input_seq_length=60", f"policy.train_global_batch_size={size}", "checkpointing.enabled=false",
            "policy.train_micro_batch_size=1", f"{run.__name__}.max_num_steps=2",
        )  # fmt: skip
    masked, plain = found["with"], found["without"]
    rates = [record.get("train/overlong_row_rate") for record in masked]
    assert rates == [None, pytest.approx(1 / 17), pytest.approx(1 / 17)]
    counts = {"overlong_rows": 1, "overlong_rows/with": 1, "overlong_rows/other": 0}
    assert [part(record, "data/") for record in masked] == [{}, counts, {}]
    for name in ("train/loss", "train/grad_norm"):
        theirs = [record[name] for record in plain[1:]]
        assert [record[name] for record in masked[1:]] == pytest.approx(theirs, rel=1e-4)
    for theirs, ours in zip(plain, masked, strict=True):
        for name, value in part(theirs, "validation/").items():
            assert ours[f"validation/{name.replace('_without', '_with')}"] == pytest.approx(value, rel=1e-3, abs=1e-5)
    by_set = [masked[0][f"validation/loss/held_{name}"] for name in ("with", "other")]
    assert min(by_set) <= masked[0]["validation/loss"] <= max(by_set)


def test_before_the_first_update_no_pair_is_told_apart_and_after_four_most_are(dpo_run):
    assert dpo_run[0]["validation/loss"] == pytest.approx(math.log(2))
    assert dpo_run[0]["validation/accuracy"] == 0.0
    assert dpo_run[4]["validation/accuracy"] > 0.5
    assert dpo_run[4]["validation/rewards_margin_mean"] > 0


def test_a_run_validates_when_it_is_told_to(sft_run, dpo_run):
    for run in (sft_run, dpo_run):
        assert [record["step"] for record in run if "validation/loss" in record] == [0, 2, 4]


def test_a_run_saves_and_ends_before_its_deadline(folder):
    records = sft(
        folder, "deadline", "checkpointing.checkpoint_must_save_by='00:00:00:01'", "checkpointing.save_period=1000",
        "sft.max_num_steps=1000", "sft.max_num_epochs=1000", "sft.val_period=0", "checkpointing.metric_name=null",
    )  # fmt: skip
    last = records[-1]["step"]
    assert last < 1000
    assert [path.name for path in (folder / "deadline/checkpoints").iterdir()] == [f"step_{last}"]


@pytest.mark.parametrize(("run", "batching"), [(sft, "dynamic_batching"), (dpo, "sequence_packing")])
def test_micro_batches_by_tokens_change_nothing_but_rounding(folder, sft_run, dpo_run, run: Run, batching):
    section = f"policy.{batching}"
    other = run(
        folder,
        f"{run.__name__}-{batching}",
        f"{section}.enabled=true",
        f"{section}.train_mb_tokens=128",
        f"{section}.logprob_mb_tokens=64",
        f"{section}.sequence_length_round=4",
        "checkpointing.enabled=false",
    )
    for ours, theirs in zip(results(other), results(sft_run if run is sft else dpo_run), strict=True):
        if theirs["step"] < 2:  # before the first update rounding decides which response is preferred
            ours, theirs = without_accuracy(ours), without_accuracy(theirs)
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def without_accuracy(record):
    return {name: value for name, value in record.items() if not name.endswith("accuracy")}


def test_reference_logprobs_computed_once_equal_those_of_each_step_and_are_read_or_computed_at_a_resume(
    folder, dpo_run, caplog
):
    caplog.set_level("INFO")
    once = dpo(folder, "once", "dpo.precompute_reference_logprobs=true", "checkpointing.save_period=2")
    assert "reference logprobs of 24 pairs computed" in caplog.text
    for ours, theirs in zip(results(once), results(dpo_run), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert not any("timing/reference_logprobs_s" in record for record in once)
    caplog.clear()
    forget_after(folder, "once", 2)
    assert results(dpo(folder, "once", "dpo.precompute_reference_logprobs=true")) == results(once)
    assert "reference logprobs read from" in caplog.text
    assert "computed" not in caplog.text
    # Those that were lost are of the initial weights again.
    (folder / "once/checkpoints/step_4").rename(folder / "once step_4 again")
    path = folder / "once" / "checkpoints" / FILE_NAME
    path.write_bytes(path.read_bytes()[:-1])
    caplog.clear()
    assert results(dpo(folder, "once", "dpo.precompute_reference_logprobs=true")) == results(once)
    assert "cannot be read" in caplog.text
    assert "reference logprobs of 24 pairs computed" in caplog.text


def forget_after(folder, name: str, step: int) -> None:
    """Make the run look as if it had been killed after a step."""
    for checkpoint in (folder / name / "checkpoints").glob("step_*"):
        if checkpoint.name != f"step_{step}":
            checkpoint.rename(folder / f"{name} {checkpoint.name}")


@pytest.mark.parametrize("run", [sft, dpo])
def test_a_resumed_run_goes_on_bitwise_as_the_uninterrupted_one(folder, run: Run, caplog):
    name = f"{run.__name__}-resumed"
    whole = run(folder, name, "checkpointing.save_period=2", "policy.offload_optimizer_states_for_logprob=true")
    forget_after(folder, name, 2)
    assert results(run(folder, name, "policy.dtensor_cfg.offload_optimizer_states=true")) == results(whole)
    with pytest.raises(
        ConfigError, match=rf"step_4 is already the end of this run of 4 steps; raise {run.__name__}\.max"
    ):
        run(folder, name)
    with pytest.raises(CheckpointError, match=f"step_4 is a checkpoint of {run.__name__}, which"):
        (dpo if run is sft else sft)(folder, name)
    assert "data.train has the same number of rows" not in caplog.text
    further = f"{run.__name__}.max_num_steps=5"
    if not (folder / "other").exists():
        save_model_folder(folder / "other", seed=1)
        (folder / "other.jinja").write_text("{# another #}" + TEMPLATE)
    for key, value in (("model_name", folder / "other"), ("tokenizer.chat_template", folder / "other.jinja")):
        refused = rf"step_4 was trained from policy\.{key}=.*, and this run has {value}, which is another one"
        with pytest.raises(CheckpointError, match=refused):
            run(folder, name, further, f"policy.{key}={value}")
    (saved,) = (folder / name / "checkpoints" / "step_4" / "policy").glob("*.distcp")
    content = saved.read_bytes()
    saved.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        CheckpointError, match=r"step_4/policy/__0_0\.distcp has the checksum .*to go on from step_2, or"
    ):
        run(folder, name, further)
    saved.write_bytes(content)
    run(folder, name, further, "data.train.seed=4")  # keeps other rows aside
    assert "step_4, but other rows" in caplog.text


def test_what_sft_exports_is_what_dpo_begins_with(folder, sft_run):
    trained = folder / "sft" / "checkpoints" / "step_4" / "hf"
    overrides = [f"policy.model_name={trained}", "dpo.max_num_steps=1", "dpo.sft_loss_weight=1e-9"]
    before, after = dpo(folder, "after", *overrides, "dpo.sft_average_log_probs=true", "checkpointing.enabled=false")
    assert after["train/loss"] == pytest.approx(math.log(2))
    # The better responses are those that SFT imitated: the mean over responses is near the mean over their tokens.
    assert before["validation/sft_loss"] == pytest.approx(sft_run[4]["validation/loss"], rel=0.2)


def test_averages_label_smoothing_and_the_sft_term_change_the_loss_as_they_should(folder, dpo_run):
    records = dpo(
        folder,
        "other",
        "dpo.preference_average_log_probs=true",
        "dpo.sft_loss_weight=0.5",
        "dpo.label_smoothing=0.1",
        "dpo.max_num_steps=2",
        "checkpointing.enabled=false",
    )
    assert_close(records[1]["train/loss"], math.log(2) + 0.5 * records[1]["train/sft_loss"])
    assert records[2]["train/rewards_margin_mean"] < dpo_run[2]["train/rewards_margin_mean"]


def test_validation_without_data_is_refused_before_anything_is_written(folder):
    with pytest.raises(ConfigError, match=r"sft\.val_period, val_at_start or val_at_end asks for validation"):
        sft(folder, "none", "data.train.split_validation_size=0.001")
    assert not (folder / "none").exists()


def test_dpo_without_host_memory_for_the_reference_is_told_how_to_do_without(folder):
    with pytest.raises(ConfigError, match=r"host_memory_budget_gib leaves .*dpo\.precompute_reference_logprobs=true"):
        dpo(folder, "budget", "policy.host_memory_budget_gib=1e-4")
    records = dpo(
        folder, "budget", "policy.host_memory_budget_gib=1e-4", "dpo.precompute_reference_logprobs=true",
        "dpo.max_num_steps=1", "checkpointing.enabled=false",
    )  # fmt: skip
    assert records[-1]["step"] == 1


def test_a_run_tells_prometheus_its_memory_phases_and_rates_while_it_goes_on_and_this_machine_alone(
    folder, monkeypatch
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.delenv("NEMO_OFFLOAD_RL_TOKEN", raising=False)
    seen = {}

    def scrape(step, metrics):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        seen[step] = {
            (sample.name.removeprefix("nemo_offload_rl_"), *sample.labels.values()): sample.value
            for family in families for sample in family.samples
        }  # fmt: skip

    keys = ("logger.prometheus_enabled=true", "checkpointing.enabled=false", "sft.max_num_steps=2")
    here = f"logger.prometheus={{host: 127.0.0.1, port: {port}}}"
    records = sft(folder, "scraped", *keys, here, callbacks=[scrape])
    assert list(seen) == [0, 1, 2]
    for record in records[1:]:
        found = seen[record["step"]]
        assert found["step",] == record["step"]
        assert found["tokens_per_second", "training"] == record["train/training_tokens_per_s"]
        assert found["metric", "train/loss"] == record["train/loss"]
        assert found["host_memory_bytes", "driver"] == record["memory/host_driver_gib"] * 2**30 > 0
    for phase in ("training", "validation", "total"):
        total = sum(record.get(f"timing/{phase}_s", 0.0) for record in records)
        assert seen[2]["phase_seconds_total", phase] == pytest.approx(total)
    with pytest.raises(ConfigError, match=r"logger\.prometheus\.host=0\.0\.0\.0 can be reached from other machines"):
        sft(folder, "open", *keys, "logger.prometheus={host: 0.0.0.0, port: 0}")


def test_a_loss_of_ones_own_takes_the_place_of_sfts_and_the_metrics_stay(folder, sft_run):
    own = (
        "loss_fn={target: examples/custom/supervised_loss.py:bounded_nll, kwargs: {floor: -1e9}}",
        "sft.max_num_steps=2",
    )
    same = sft(folder, "own", *own, "checkpointing.enabled=false")
    for record, theirs in zip(results(same), results(sft_run), strict=False):
        assert record == pytest.approx(theirs, rel=1e-5)
    bounded = sft(folder, "bounded", *own, "loss_fn.kwargs.floor=-3", "checkpointing.enabled=false")
    assert bounded[0]["validation/loss"] <= 3.0 < same[0]["validation/loss"]
    assert bounded[1]["train/token_accuracy"] == same[1]["train/token_accuracy"]


def test_a_loss_of_ones_own_takes_the_place_of_dpos(folder, dpo_run):
    own = "loss_fn={target: examples/custom/supervised_loss.py:ipo, kwargs: {beta: 0.25}}"
    keys = ("dpo.max_num_steps=2", "policy.optimizer.kwargs.lr=1e-5", "checkpointing.enabled=false")
    records = dpo(folder, "ipo", own, *keys)
    assert records[1]["train/loss"] == pytest.approx(4.0)  # (1 / (2 beta))^2, where policy and reference are the same
    assert records[1]["train/preference_loss"] == pytest.approx(math.log(2))
    assert records[2]["train/loss"] < 4.0
    with pytest.raises(UserCodeError, match=r"AttributeError: .*reference_sums.* at .*supervised_loss\.py:\d+ in ipo"):
        sft(folder, "wrong", "loss_fn={target: examples/custom/supervised_loss.py:ipo, kwargs: null}")
