"""The trainer's loop, with a real policy and Hugging Face as the engine; whole runs are in tests/functional."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from documented_metrics import documented, without_match
from grpo_replay import Replay, read_rollouts
from local_grpo import (
    ALWAYS,
    BROKEN,
    LATE,
    MIXED,
    NEVER,
    KnownRewards,
    LocalGrpo,
    collected_ahead,
    local_grpo,
    make_prompts,
)
from tiny_models import save_model_folder

from nemo_offload_rl.algorithms.metric_names import names_of
from nemo_offload_rl.algorithms.metrics import IdleSteps
from nemo_offload_rl.backends.dtensor.model import LogprobModel
from nemo_offload_rl.environments.interfaces import Unscored
from nemo_offload_rl.errors import AgreementError, CheckpointError, ConfigError, DataError

MASKED = (
    "loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_ratio=1.03",
    "loss_fn.truncated_importance_sampling_ratio_min=0.97",
)  # fmt: skip
DYNAMIC = ("grpo.use_dynamic_sampling=true", "data.shuffle=false", "grpo.max_num_epochs=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model_folder(folder, seed=0)
    return folder


def test_metrics_are_about_all_sampled_groups_and_what_was_trained_on_has_names_of_its_own(tmp_path, model):
    # Two batches a step: of four groups two differ in reward.
    kinds = [ALWAYS, MIXED, NEVER, MIXED, NEVER, MIXED, NEVER, MIXED]
    record = local_grpo(tmp_path, model, kinds, *DYNAMIC).run()[1]
    assert record["train/reward_mean"] == record["train/accuracy"] == 0.5
    assert record["train/constant_group_rate"] == 0.5
    assert record["train/pass_rate"] == 0.75
    assert record["train/dynamic_sampling_batches"] == 2
    assert record["train/dynamic_sampling_constant_groups"] == 2
    assert record["train/filtered_reward_mean"] == record["train/filtered_accuracy"] == 0.5
    assert record["train/shaped_reward_mean"] == 0.5
    assert record["train/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert record["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    second = local_grpo(tmp_path / "more", model, [NEVER, MIXED, NEVER, MIXED], *DYNAMIC).run()[1]
    assert (second["train/reward_mean"], second["train/filtered_reward_mean"]) == (0.25, 0.5)


def test_a_generation_batch_of_dynamic_sampling_has_a_multiple_of_a_steps_prompts_rounded_down(tmp_path, model):
    kinds = [NEVER, MIXED, MIXED, NEVER, MIXED, NEVER, ALWAYS]
    for multiplier, batches in ((1, [2, 2]), (1.6, [3]), (2, [4]), (3.49, [6])):
        keys = (*DYNAMIC, "grpo.max_num_steps=1", f"grpo.batch_multiplier={multiplier}")
        run = local_grpo(tmp_path / str(multiplier), model, kinds, *keys)
        record = run.run()[1]
        assert [len(prompts) for prompts, _ in run.engine.calls] == batches
        assert record["train/dynamic_sampling_batches"] == len(batches)
        assert record["train/filtered_accuracy"] == 0.5


def test_steps_without_any_advantage_in_a_row_are_warned_of_with_what_to_change(tmp_path, model, caplog):
    def warnings() -> list[str]:
        return [found.getMessage() for found in caplog.records if "nothing to learn from" in found.getMessage()]

    kinds = [*[NEVER] * 4, *[MIXED] * 2, *[ALWAYS] * 14]  # two prompts a step
    local_grpo(tmp_path, model, kinds, "data.shuffle=false", "grpo.max_num_epochs=1", "grpo.max_num_steps=10").run()
    assert ["last 3 steps" in warnings()[0], "last 6 steps" in warnings()[1]] == [True, True]
    assert len(warnings()) == 2 and "rewards from 1 to 1" in warnings()[0] and "are too easy" in warnings()[0]
    caplog.clear()
    idle, known = IdleSteps(), {"advantage_min": 0.0, "advantage_max": 0.0, "reward_min": 0.0, "accuracy": 0.0}
    cases = ((1.0, 0.0, "num_generations_per_prompt"), (0.0, 0.9, "max_new_tokens"), (0.0, 0.0, "are too hard"))
    for count, (reward, cut_off, advice) in zip((3, 3, 6), cases, strict=True):
        for _ in range(count):
            idle.count({**known, "reward_max": reward, "truncation_rate": cut_off})
        assert advice in warnings()[-1]


def test_epochs_are_counted_by_the_data_that_dynamic_sampling_takes_and_the_last_full_step_is_the_last(
    tmp_path, model, caplog
):
    # Three steps' worth of batches for a step and a half: the second step cannot be filled.
    kinds = [NEVER, MIXED, NEVER, MIXED, NEVER, MIXED]
    run = local_grpo(
        tmp_path, model, kinds, *DYNAMIC, "grpo.max_num_steps=100", "grpo.val_at_end=true",
        "grpo.max_val_samples=2", "grpo.val_period=50", "checkpointing.enabled=true", "checkpointing.save_period=1",
        "checkpointing.metric_name='val:accuracy'",
        validation=local_grpo(tmp_path, model, [ALWAYS, NEVER]).prompts,
    )  # fmt: skip
    records = run.run()
    assert list(records) == [1]
    assert len(run.engine.calls) == 3 + 1  # every batch once, and the validation
    assert records[1]["validation/accuracy"] == 0.5
    # Saved as one of its period, and once more with what ranks it.
    assert json.loads((tmp_path / "checkpoints" / "step_1" / "progress.json").read_text())["metric"] == 0.5
    assert "ended within step 2, which dynamic sampling could not fill: the run ends with step 1" in caplog.text


def test_a_second_pass_over_the_data_goes_on_where_the_unfilled_step_began(tmp_path, model):
    kinds = [NEVER, MIXED, NEVER, MIXED, NEVER, MIXED]
    keys = (*DYNAMIC, "grpo.max_num_steps=100", "checkpointing.enabled=true", "checkpointing.save_period=50")
    local_grpo(tmp_path, model, kinds, *keys).run()
    whole = local_grpo(tmp_path / "whole", model, kinds, *keys, "grpo.max_num_epochs=2").run()
    resumed = local_grpo(tmp_path, model, kinds, *keys, "grpo.max_num_epochs=2").run()
    assert list(resumed) == list(whole) == [1, 2, 3]
    for name in ("train/loss", "train/reward_mean", "train/grad_norm", "train/total_tokens"):
        assert [resumed[step][name] for step in whole] == [whole[step][name] for step in whole]


def test_data_that_fill_no_step_at_all_are_an_error(tmp_path, model):
    with pytest.raises(DataError, match="ended before dynamic sampling had filled the first step"):
        local_grpo(tmp_path, model, [NEVER, NEVER, MIXED, NEVER], *DYNAMIC).run()


def test_without_dynamic_sampling_epochs_end_the_run_at_the_same_step_also_after_a_resume_with_larger_steps(
    tmp_path, model
):
    keys = ("grpo.max_num_epochs=1", "checkpointing.enabled=true", "checkpointing.save_period=1")
    assert list(local_grpo(tmp_path, model, [MIXED] * 8, *keys, "grpo.max_num_steps=2").run()) == [1, 2]
    # Half of the data are left: with twice as many prompts a step that is one step, not two.
    larger = ("grpo.num_prompts_per_step=4", "policy.train_global_batch_size=16")
    ended = local_grpo(tmp_path, model, [MIXED] * 8, *keys, *larger)
    assert list(ended.run()) == [1, 2, 3]
    assert "max_num_epochs, then start the same command again" in ended.shown
    with pytest.raises(
        ConfigError, match=r"step_3 is already the end of this run of 3 steps; raise grpo\.max_num_epochs"
    ):
        local_grpo(tmp_path, model, [MIXED] * 8, *keys, *larger).run()


def test_a_run_saves_and_ends_before_its_deadline_and_goes_on_when_it_is_started_again(tmp_path, model):
    keys = (
        "checkpointing.enabled=true", "checkpointing.save_period=1000", "grpo.max_num_steps=1000",
        "grpo.max_num_epochs=1000", "checkpointing.checkpoint_must_save_by='00:00:00:01'",
    )  # fmt: skip
    run = local_grpo(tmp_path, model, [MIXED] * 2, *keys)
    (*_, last) = run.run()
    assert last < 1000
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step_{last}"]
    assert f"ended after step {last} of 1000, as checkpointing.checkpoint_must_save_by asks" in run.shown
    again = local_grpo(tmp_path, model, [MIXED] * 2, *keys, "checkpointing.checkpoint_must_save_by=null",
                       f"grpo.max_num_steps={last + 1}")  # fmt: skip
    assert max(again.run()) == last + 1


def test_a_run_with_top_p_and_an_engine_that_rounds_like_bfloat16_agrees_in_20_steps(tmp_path, model):
    run = local_grpo(
        tmp_path, model, [MIXED] * 8, "policy.generation.top_p=0.9", "grpo.max_num_steps=20", "grpo.max_num_epochs=10",
        "grpo.num_generations_per_prompt=8", "policy.train_global_batch_size=16", "grpo.log_rollouts=true",
        "grpo.max_token_mult_prob_error=1.02", "grpo.seq_logprob_error_threshold=1.1",
    )  # fmt: skip
    run.engine.logit_noise = 0.018  # of bfloat16 numbers from 8 to 16
    records = run.run()
    assert len(records) == 20
    num_outside = 0
    for step, rollouts in read_rollouts(tmp_path).items():
        prev_logprobs = [value for rollout in rollouts for value in rollout["prev_logprobs"]]
        num_outside += prev_logprobs.count(None)
        record = records[step]
        assert record["train/outside_nucleus_rate"] == pytest.approx(prev_logprobs.count(None) / len(prev_logprobs))
        assert 1 < record["train/token_mult_prob_error"] <= record["train/max_seq_mult_prob_error"] < 1.1
        assert record["train/num_masked_seqs_by_logprob_error"] == 0 == record["train/skipped_updates"]
    assert num_outside


def test_an_engine_of_another_model_ends_the_run_in_one_line_and_the_step_is_saved(tmp_path, model):
    keys = ("checkpointing.enabled=true", "checkpointing.save_period=1", "checkpointing.async_save=true")
    run = local_grpo(tmp_path, model, [MIXED] * 8, *keys, "grpo.max_num_steps=1")
    run.run()
    run = local_grpo(tmp_path, model, [MIXED] * 8, *keys, "grpo.max_num_steps=3")
    run.engine.temperature_error = 3.0
    with pytest.raises(AgreementError, match=r"step 2: .* above grpo\.max_token_mult_prob_error=1\.5") as caught:
        run.run()
    assert "\n" not in str(caught.value)
    assert "look at weights that were imported wrongly" in str(caught.value)
    assert run.metrics()[2]["train/token_mult_prob_error"] > 1.5
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step_1", "step_2"]
    keys = (*keys, "grpo.max_num_steps=3", "grpo.max_token_mult_prob_error=null")
    lenient = local_grpo(tmp_path, model, [MIXED] * 8, *keys)
    lenient.engine.temperature_error = 3.0
    lenient.run()
    assert (tmp_path / "checkpoints" / "step_3").is_dir()


def with_room_for_two_rows(forward):
    """A model's forward pass on a device whose memory runs out in larger micro-batches."""

    def limited(model, input_ids_BS, *args):
        if len(input_ids_BS) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(model, input_ids_BS, *args)

    return limited


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("grpo.overlong_filtering=true", "grpo.use_leave_one_out_baseline=true", "grpo.normalize_rewards=false"),
        (
            *DYNAMIC, "grpo.max_num_epochs=2", "grpo.batch_multiplier=1.5", "policy.train_global_batch_size=4",
            "loss_fn.ratio_clip_c=1.01",
            "loss_fn.ratio_clip_min=0.001", "loss_fn.ratio_clip_max=0.002", "policy.optimizer.kwargs.lr=1e-2",
            "loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_ratio=1.05",
        ),
        (
            *DYNAMIC, "grpo.max_num_epochs=2", "grpo.dynamic_sampling_drops=responses",
            "grpo.adv_estimator.name=reinforce_plus_plus", "loss_fn.use_kl_in_reward=true",
            "loss_fn.reference_policy_kl_type=k2", "loss_fn.reference_policy_kl_penalty=5.0",
            "grpo.advantage_clip_low=-0.6", "grpo.advantage_clip_high=0.9", "loss_fn.use_cispo=true",
            "loss_fn.ratio_clip_min=0.001", "loss_fn.ratio_clip_max=0.002", "policy.train_global_batch_size=4",
            "policy.optimizer.kwargs.lr=1e-2", *MASKED, "loss_fn.truncated_importance_sampling_type=icepop",
        ),
        (
            "grpo.seq_logprob_error_threshold=1.3", "grpo.normalize_rewards=false", "loss_fn.token_level_loss=false",
            "loss_fn.constant_length_divisor=6", "loss_fn.disable_ppo_ratio=true", *MASKED,
            "loss_fn.truncated_importance_sampling_type=seq-mask-tis",
        ),
        (*collected_ahead(1), "policy.optimizer.kwargs.lr=1e-2"),
    ],
    ids=[
        "one update a step", "some responses left out", "two updates a step of half the groups",
        "REINFORCE++ and CISPO", "Dr. GRPO without a ratio", "rollouts of older weights",
    ],
)  # fmt: skip
def test_every_metric_is_what_plain_code_computes_from_the_rollouts_and_every_one_is_documented(
    tmp_path, model, keys, monkeypatch
):
    runs_out = not keys
    if runs_out:
        monkeypatch.setattr(LogprobModel, "forward", with_room_for_two_rows(LogprobModel.forward))
    kinds = [MIXED, NEVER, LATE, BROKEN] * 3
    run = local_grpo(
        tmp_path, model, kinds, *keys, "grpo.max_num_steps=3", "grpo.log_rollouts=true", "grpo.val_period=3",
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.2, total_iters: 9}}]",
        "grpo.val_num_generations_per_prompt=2", "grpo.val_batch_size=2", "grpo.max_val_samples=3",
        prompts=with_an_overlong_one(make_prompts(kinds, ("sums", "products"))),
        validation=make_prompts([MIXED, ALWAYS, NEVER], ("a", "b")),
    )  # fmt: skip
    run.engine.temperature_error = 1.1  # so that engine and policy differ
    records, dumped, replay = run.run(), read_rollouts(tmp_path), Replay(run.config)
    assert list(records) == list(dumped) == [1, 2, 3]
    for step, record in records.items():
        expected = replay.step(dumped[step], record)
        measured = {name.removeprefix("train/"): value for name, value in record.items() if name.startswith("train/")}
        assert measured.keys() == expected.keys()
        assert (measured["oom_splits"] >= 4) is runs_out  # two micro-batches of logprobs and two of training
        expected["oom_splits"] = measured["oom_splits"]
        assert measured == pytest.approx(expected, rel=2e-3, abs=1e-4)
    validation = {
        name.removeprefix("validation/"): value for name, value in records[3].items() if "validation/" in name
    }
    assert validation == pytest.approx(validation_again(run))
    shown = [line for line in run.shown.splitlines() if line.startswith("step ")]
    assert [f"accuracy {records[step]['train/accuracy']:.1%}  " in shown[step - 1] for step in records] == [True] * 3
    assert ["held-out accuracy 50.0% (step 3)" in line for line in shown] == [False, False, True]
    documented_names = documented("In every step of training", "In every validation", "Only with certain keys")
    assert without_match(records[3], documented_names) == set()
    names = names_of(run.config)
    for known, found in ((names["train"], measured), (names["val"], validation)):
        assert without_match(found, known) == set()
        # A step whose prompts are all of one data set has no metrics by data set.
        assert {name for name in without_match(known, found) if "<" not in name} == set()


@pytest.mark.parametrize("keys", [(), DYNAMIC, collected_ahead(1)], ids=["plain", "dynamic sampling", "ahead"])
def test_a_step_of_which_nothing_has_a_score_ends_the_run_with_the_first_reason(tmp_path, model, keys):
    class NoJudge(KnownRewards):
        def step(self, responses):
            return [Unscored("failed", "the judge is away")] * len(responses)

    run = local_grpo(tmp_path, model, [MIXED] * 4, *keys, environment=NoJudge())
    with pytest.raises(DataError, match=r"step 1: not one of 8 rollouts has a score.*the first: the judge is away"):
        run.run()


def with_an_overlong_one(prompts):
    return (replace(prompts[0], loss_multiplier=0.0), *prompts[1:])


def validation_again(run: LocalGrpo) -> dict[str, float]:
    """What a validation of one mixed, one always right and one never right prompt reports, two responses each."""
    completions = [completion for _, groups in run.engine.calls[-2:] for group in groups for completion in group]
    lengths = [len(completion.token_ids) for completion in completions]
    return {
        "accuracy": 3 / 6,
        "reward": 3 / 6,
        "accuracy/a": 1 / 4,
        "reward/a": 1 / 4,
        "accuracy/b": 1.0,
        "reward/b": 1.0,
        "pass_at_2": 2 / 3,
        "mean_response_tokens": sum(lengths) / 6,
        "truncation_rate": sum(completion.finish_reason == "length" for completion in completions) / 6,
        "failed_rate": 0.0,
        "timed_out_rate": 0.0,
        "no_reward_rate": 0.0,
    }


def test_a_save_that_fails_loses_no_metrics_of_its_step(tmp_path, model):
    run = local_grpo(
        tmp_path, model, [MIXED] * 4, "checkpointing.enabled=true", "checkpointing.save_period=1",
        "grpo.val_period=1", "grpo.max_val_samples=1", validation=local_grpo(tmp_path, model, [ALWAYS]).prompts,
    )  # fmt: skip
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_1.partial").symlink_to("/dev/full")
    with pytest.raises(CheckpointError):
        run.run()
    record = run.metrics()[1]
    assert {"train/reward_mean", "train/loss", "validation/accuracy", "timing/training_s"} <= record.keys()
