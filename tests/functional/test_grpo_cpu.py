"""A whole run on CPU: real Ray, real vLLM, real policy worker. One long run serves most tests."""

from __future__ import annotations

import math
import re
import shutil

import pytest
from documented_metrics import documented, without_match
from grpo_replay import Replay, read_rollouts
from safetensors import safe_open

from nemo_offload_rl.report import write_report
from nemo_offload_rl.runs.loading import load_grpo_config

LAST_STEP = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grpo")


@pytest.fixture(scope="module")
def run(folder, model_folder, launch_grpo):
    """Five steps, checkpoints after the second, fourth and fifth."""
    done = launch_grpo(
        f"policy.model_name={model_folder}",
        f"logger.log_dir={folder / 'run'}",
        f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
        "checkpointing.enabled=true",
        "checkpointing.save_period=2",
        f"grpo.max_num_steps={LAST_STEP}",
        "logger.num_val_samples_to_print=2",
        "grpo.log_rollouts=true",
        "logger.profile_steps=[3]",
    )
    assert done.status == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def metrics(run, folder, read_metrics):
    return read_metrics(folder / "run")


def assert_measures(record, expected: set[str]):
    assert without_match(record, expected) == set()
    assert without_match(expected, record) == set()


def test_a_run_measures_exactly_what_the_documentation_says(metrics):
    training = documented("In every step of training")
    validation = documented("In every validation")
    checkpoint = {"timing/checkpoint_s"}
    assert set(metrics) == set(range(LAST_STEP + 1))
    assert not without_match(validation, metrics[0])
    refit = {name for name in training if name.startswith("timing/refit")}
    assert len(refit) == 6
    once = documented("Once, with the first step")
    assert_measures(metrics[1], (training - refit) | once)  # the engine is awake since the first validation
    assert_measures(metrics[3], training | {"timing/profile_s"})
    assert_measures(metrics[4], training | checkpoint | {"timing/profile_s"})
    assert_measures(metrics[LAST_STEP], training | validation | checkpoint)


def test_every_metric_of_training_is_what_plain_code_computes_from_the_rollouts(metrics, folder):
    replay = Replay(load_grpo_config(folder / "run" / "config.yaml"))
    dumped = read_rollouts(folder / "run")
    assert list(dumped) == list(range(1, LAST_STEP + 1))
    for step, rollouts in dumped.items():
        measured = {name: value for name, value in metrics[step].items() if name.startswith("train/")}
        expected = {f"train/{name}": value for name, value in replay.step(rollouts, metrics[step]).items()}
        assert measured.keys() == expected.keys()
        assert measured == pytest.approx(expected, rel=2e-3, abs=1e-4)


def test_every_metric_is_finite_and_the_engine_agrees_with_the_policy(metrics):
    for record in metrics.values():
        assert all(value is not None and math.isfinite(value) for value in record.values())
    for step in range(1, LAST_STEP + 1):
        assert metrics[step]["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)
        assert metrics[step]["train/grad_norm"] > 1e-3  # there is something to learn from
    assert metrics[LAST_STEP]["train/kl"] > 0  # and it was learned


def test_a_step_moves_the_bytes_that_the_plan_implies_for_the_size_of_the_model(metrics, model_folder):
    with safe_open(model_folder / "model.safetensors", "pt") as weights:
        weight_bytes = sum(4 * math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    rotary_bytes = 2 * 4 * 16  # two buffers of half a head
    params, adam = weight_bytes + rotary_bytes, 2 * weight_bytes
    step = metrics[3]
    # Out: what training wrote. In: parameters for the logprobs, the reference's and then the policy's again, and Adam.
    assert step["residency/bytes_out"] == params + adam
    assert step["residency/bytes_in"] == 3 * params + adam
    # The first validation sent the initial parameters, whose host copy is still right.
    assert metrics[1]["residency/bytes_clean"] == params


def test_a_person_sees_each_step_and_answers_of_the_validation(run):
    for step in range(1, LAST_STEP + 1):
        figures = r"reward \S+  accuracy \S+%  length \S+  cut off \S+%  KL \S+  held-out accuracy \S+% \(step [05]\)"
        assert re.search(rf"^step {step}/{LAST_STEP}  {figures}  \S+ s \(.*\)  \d+ s left$", run.stdout, re.MULTILINE)
    samples = re.findall(r"^  (?:right|wrong)  '<user>.*' -> '.*expected '\d+'$", run.stdout, re.MULTILINE)
    assert len(samples) == 2 * 2  # two at each of two validations
    assert run.stderr == ""


def test_the_residency_plan_is_told_once(run):
    assert run.stdout.count("residency plan of each policy worker:") == 1
    assert run.stdout.count("loss_fn.force_on_policy_ratio=true would save the pass") == 1
    assert re.findall(r"^(\w+) is ready after \d+\.\d s$", run.stdout, re.MULTILINE) == ["Ray", "engine", "policy"]
    assert re.search(r"^params \(\S+ GiB\) +DEVICE +DEVICE +DEVICE +DEVICE +HOST$", run.stdout, re.MULTILINE)


def test_a_step_that_is_traced_has_a_file_of_each_worker_with_the_names_of_its_parts(run, folder, names_in_trace):
    traces = folder / "run" / "traces"
    assert {path.name for path in traces.iterdir()} == {"step_3_policy_0.json.gz", "step_3_engine_0_0.json.gz"}
    passes = {"training pass", "logprobs pass", "reference logprobs pass", "update", "refit bucket"}
    transitions = {f"transition to {phase}" for phase in ("refit", "generation", "lp_inference", "training")}
    policy = names_in_trace(traces / "step_3_policy_0.json.gz")
    assert policy >= passes | transitions | {"aten::mm"}
    engine = names_in_trace(traces / "step_3_engine_0_0.json.gz")
    assert engine >= {"generation", "refit bucket", "aten::mm"}
    assert not engine & passes - {"refit bucket"}
    assert f"traces of step 3: {traces}/step_3_*.json.gz" in run.stdout


def test_the_report_is_written(run, folder):
    html = write_report(folder / "run").read_text()
    titles = set(re.findall(r"<figcaption>([^<]+)</figcaption>", html))
    assert titles == {
        "Reward", "Accuracy", "Response length", "Truncation rate", "Gradient norm", "Entropy", "Clip fraction",
        "KL to the reference policy", "token_mult_prob_error", "Tokens per second", "Seconds by phase",
        "Bytes moved and freed",
    }  # fmt: skip
    (row,) = re.findall(r"driver outside engine and passes, median.*?>(\d+\.\d\d) s, (\d+\.\d)% of a step", html, re.S)
    assert 0 < float(row[1]) < 100


@pytest.mark.parametrize(
    "residency_keys",
    [
        ["policy.use_pinned_optimizer_offload=true", "policy.offload_optimizer_states_for_logprob=true"],
        [
            "policy.dtensor_cfg.cpu_offload=true",
            "policy.dtensor_cfg.activation_checkpointing=true",
            "checkpointing.save_consolidated=true",
        ],
    ],
    ids=["", "in parts"],
)
def test_a_resumed_run_with_other_residency_keys_goes_on_bitwise_as_the_uninterrupted_one(
    metrics, folder, model_folder, run_in_one_process, read_metrics, tmp_path, residency_keys
):
    resumed_folder = tmp_path / "resumed"
    resumed_folder.mkdir()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed_folder / "metrics.jsonl").write_text("".join(lines[:3]))
    shutil.copytree(folder / "checkpoints" / "step_2", resumed_folder / "checkpoints" / "step_2")
    done = run_in_one_process(
        f"policy.model_name={model_folder}",
        f"logger.log_dir={resumed_folder}",
        f"checkpointing.checkpoint_dir={resumed_folder / 'checkpoints'}",
        "checkpointing.enabled=true",
        "checkpointing.save_period=100",
        f"grpo.max_num_steps={LAST_STEP}",
        *residency_keys,
    )
    assert done.status == 0, done.stderr
    resumed = read_metrics(resumed_folder)
    assert list(resumed) == list(metrics)

    def results(record):
        return {
            name: value
            for name, value in record.items()
            if name.startswith(("train/", "validation/")) and not name.endswith("_per_s")
        }

    for step in range(3, LAST_STEP + 1):
        assert results(resumed[step]) == results(metrics[step])


def test_only_a_checkpoint_that_exports_weights_puts_an_engine_to_sleep_that_the_next_step_needs(
    folder, model_folder, run_in_one_process, read_metrics
):
    records = {}
    for exports in ("false", "true"):
        done = run_in_one_process(
            f"policy.model_name={model_folder}",
            f"logger.log_dir={folder / f'exports_{exports}'}",
            f"checkpointing.checkpoint_dir={folder / f'checkpoints_{exports}'}",
            f"checkpointing.save_consolidated={exports}",
            "checkpointing.enabled=true",
            "checkpointing.save_period=2",
            "grpo.val_period=2",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "grpo.max_num_steps=3",
        )
        assert done.status == 0, done.stderr
        records[exports] = read_metrics(folder / f"exports_{exports}")
    assert "timing/refit_s" not in records["false"][3]
    assert records["true"][3]["timing/refit_s"] > 0
    for name in ("train/loss", "train/reward_mean", "train/grad_norm"):
        assert records["false"][3][name] == records["true"][3][name]


def test_a_run_that_is_finished_says_so_instead_of_starting(run, folder, model_folder, run_grpo):
    done = run_grpo(
        f"policy.model_name={model_folder}",
        f"logger.log_dir={folder / 'again'}",
        f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
        "checkpointing.enabled=true",
        f"grpo.max_num_steps={LAST_STEP}",
    )
    assert done.status == 2
    (line,) = done.stderr.splitlines()
    assert "step_5 is already the end of this run of 5 steps" in line
    assert not (folder / "again").exists()
