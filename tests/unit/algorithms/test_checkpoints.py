"""Which checkpoints are kept, found and refused. The policy's own files are tested with the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_offload_rl.algorithms.checkpoints import CheckpointKeeper
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.settings import CheckpointingSettings


class FilePolicy:
    """Writes one file where a policy writes many; remembers what it was asked to load."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []

    def save_checkpoint(self, path: Path) -> None:
        path.mkdir()
        (path / "state").write_text("with optimizer")

    def export_hf(self, path: Path) -> None:
        path.mkdir()
        (path / "model.safetensors").write_text("weights")

    def load_checkpoint(self, path: Path) -> None:
        self.loaded.append(path)


class FullDiskPolicy(FilePolicy):
    def save_checkpoint(self, path: Path) -> None:
        raise OSError(28, "No space left on device")


def make_settings(folder: Path, **changes) -> CheckpointingSettings:
    settings = CheckpointingSettings(
        enabled=True,
        checkpoint_dir=str(folder),
        metric_name="val:accuracy",
        higher_is_better=True,
        keep_top_k=2,
        save_period=10,
        save_optimizer=True,
    )
    return replace(settings, **changes)


def make_loader() -> ShuffledLoader[int]:
    return ShuffledLoader(range(10), batch_size=2, shuffle=True, seed=3)


def save(keeper: CheckpointKeeper, step: int, accuracy: float | None, policy: FilePolicy | None = None) -> None:
    val = {} if accuracy is None else {"accuracy": accuracy}
    keeper.save(step, policy or FilePolicy(), make_loader(), {"train": {"reward_mean": 0.5, "loss": step}, "val": val})


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_is_due_at_every_period_and_at_the_end_and_never_when_switched_off(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path))
    assert [step for step in range(1, 26) if keeper.is_due(step, is_last=step == 25)] == [10, 20, 25]
    assert not CheckpointKeeper(make_settings(tmp_path, enabled=False)).is_due(10, is_last=True)


def test_the_best_and_the_newest_are_kept(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path))
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.7), (40, 0.6)):
        save(keeper, step, accuracy)
    assert kept(tmp_path) == {"step_20", "step_40"}


def test_a_lesser_metric_is_better_when_told_so_and_an_unmeasured_one_is_the_worst(tmp_path):
    settings = make_settings(tmp_path, metric_name="train:loss", higher_is_better=False)
    keeper = CheckpointKeeper(settings)
    for step in (10, 20, 30):  # the loss is the step
        save(keeper, step, None)
    assert kept(tmp_path) == {"step_10", "step_30"}

    keeper = CheckpointKeeper(make_settings(tmp_path / "val"))
    for step, accuracy in ((10, 0.1), (20, None), (30, 0.2)):
        save(keeper, step, accuracy)
    assert kept(tmp_path / "val") == {"step_10", "step_30"}


def test_without_a_metric_the_newest_are_kept_and_without_a_limit_all(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path / "two", metric_name=None))
    everything = CheckpointKeeper(make_settings(tmp_path / "all", keep_top_k=None))
    for step in (10, 20, 100):
        save(keeper, step, 1.0 / step)
        save(everything, step, 0.0)
    assert kept(tmp_path / "two") == {"step_20", "step_100"}
    assert kept(tmp_path / "all") == {"step_10", "step_20", "step_100"}


def test_the_newest_finished_checkpoint_is_found_by_number_and_loads_policy_and_loader(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, keep_top_k=None))
    assert keeper.newest() is None
    loader = make_loader()
    next(loader)
    for step in (20, 100):
        keeper.save(step, FilePolicy(), loader, {"train": {}, "val": {"accuracy": 0.25}})
    (tmp_path / "step_200" / "policy").mkdir(parents=True)  # its run died before the record was written
    newest = keeper.newest()
    assert newest is not None
    assert (newest.step, newest.metric, newest.folder) == (100, 0.25, tmp_path / "step_100")

    policy, resumed = FilePolicy(), make_loader()
    keeper.load(newest, policy, resumed)
    assert policy.loaded == [tmp_path / "step_100" / "policy"]
    assert next(resumed) == next(loader)
    assert CheckpointKeeper(make_settings(tmp_path, enabled=False)).newest() is None


def test_a_step_that_fails_to_save_again_no_longer_counts_as_finished(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path))
    save(keeper, 10, 0.5)
    with pytest.raises(ConfigError, match="No space left on device"):
        save(keeper, 10, 0.5, FullDiskPolicy())
    assert keeper.newest() is None


def test_without_the_optimizer_a_model_folder_is_written_which_cannot_be_continued(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, save_optimizer=False))
    save(keeper, 10, 0.5)
    assert (tmp_path / "step_10" / "policy" / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="without the optimizer"):
        keeper.newest()


def test_a_folder_that_cannot_be_written_is_one_line_that_names_the_key(tmp_path):
    (tmp_path / "file").touch()
    keeper = CheckpointKeeper(make_settings(tmp_path / "file"))
    with pytest.raises(ConfigError) as caught:
        save(keeper, 10, 0.5)
    text = str(caught.value)
    assert "\n" not in text
    assert "step_10" in text and "Not a directory" in text and "checkpointing.checkpoint_dir" in text


def test_a_record_that_is_broken_is_named(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path))
    save(keeper, 10, 0.5)
    (tmp_path / "step_10" / "progress.json").write_text("{")
    with pytest.raises(ConfigError, match=r"step_10.progress\.json cannot be read"):
        keeper.newest()


def test_a_metric_that_is_not_measured_is_refused_with_those_that_are(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, metric_name="train:rewards"))
    with pytest.raises(ConfigError, match="choose one of loss, reward_mean"):
        save(keeper, 10, 0.5)
