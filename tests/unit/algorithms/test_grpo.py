"""The trainer's loop, with a real policy and Hugging Face as the engine; whole runs are in tests/functional."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_grpo import ALWAYS, MIXED, NEVER, local_grpo
from tiny_models import save_model_folder

from nemo_offload_rl.errors import AgreementError, CheckpointError, ConfigError, DataError

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


def test_epochs_are_counted_by_the_data_that_dynamic_sampling_takes_and_the_last_full_step_is_the_last(
    tmp_path, model, caplog
):
    # Three steps' worth of batches for a step and a half: the second step cannot be filled.
    kinds = [NEVER, MIXED, NEVER, MIXED, NEVER, MIXED]
    run = local_grpo(
        tmp_path, model, kinds, *DYNAMIC, "grpo.max_num_steps=100", "grpo.val_at_end=true",
        "grpo.max_val_samples=2", "checkpointing.enabled=true", "checkpointing.save_period=50",
        validation=local_grpo(tmp_path, model, [ALWAYS, NEVER]).prompts,
    )  # fmt: skip
    records = run.run()
    assert list(records) == [1]
    assert run.engine.num_generated == 3 + 1  # every batch once, and the validation
    assert records[1]["validation/accuracy"] == 0.5
    assert (tmp_path / "checkpoints" / "step_1" / "progress.json").is_file()
    assert "ended within step 2, which dynamic sampling could not fill: the run ends with step 1" in caplog.text


def test_a_second_pass_over_the_data_goes_on_where_the_unfilled_step_began(tmp_path, model):
    kinds = [NEVER, MIXED, NEVER, MIXED, NEVER, MIXED]
    keys = (*DYNAMIC, "grpo.max_num_steps=100", "checkpointing.enabled=true", "checkpointing.save_period=50")
    local_grpo(tmp_path, model, kinds, *keys).run()
    whole = local_grpo(tmp_path / "whole", model, kinds, *keys, "grpo.max_num_epochs=2").run()
    resumed = local_grpo(tmp_path, model, kinds, *keys, "grpo.max_num_epochs=2").run()
    assert list(resumed) == list(whole) == [1, 2, 3]
    for name in ("train/loss", "train/reward_mean", "train/grad_norm"):
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
    assert list(local_grpo(tmp_path, model, [MIXED] * 8, *keys, *larger).run()) == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"step_3 is as far as this run of 3 steps goes; raise grpo\.max_num_epochs"):
        local_grpo(tmp_path, model, [MIXED] * 8, *keys, *larger).run()


def test_an_engine_of_another_model_ends_the_run_in_one_line_and_the_last_checkpoint_stays(tmp_path, model):
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
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step_1"]
    keys = (*keys, "grpo.max_num_steps=2", "grpo.max_token_mult_prob_error=null")
    lenient = local_grpo(tmp_path, model, [MIXED] * 8, *keys)
    lenient.engine.temperature_error = 3.0
    lenient.run()
    assert (tmp_path / "checkpoints" / "step_2").is_dir()


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
