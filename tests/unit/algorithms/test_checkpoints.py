"""Which checkpoints are kept, found and refused. The policy's own files are tested with the policy."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_offload_rl.algorithms.checkpoints import CheckpointKeeper, resume_point
from nemo_offload_rl.backends.saving.folders import recover_folders
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.data.records import Part
from nemo_offload_rl.errors import CheckpointError
from nemo_offload_rl.keys.run import CheckpointingConfig
from nemo_offload_rl.utils.checksums import damaged_files, file_checksums, files_below


class FilePolicy:
    """Writes one file where a policy writes many; a save in the background is done when the test says so."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []
        self.saving: Path | None = None
        self.is_written = True

    def start_save(self, path: Path, in_background: bool) -> None:
        assert self.saving is None
        self.saving = path
        self.is_written = not in_background

    def save_is_done(self) -> bool:
        return self.is_written

    def finish_save(self) -> dict[str, str]:
        path, self.saving = self.saving, None
        if path is None:
            return {}
        path.mkdir()
        (path / "state").write_text("with optimizer")
        return file_checksums(path, files_below(path))

    def export_hf(self, path: Path) -> dict[str, str]:
        path.mkdir()
        (path / "model.safetensors").write_text("weights")
        return file_checksums(path, files_below(path))

    def damaged_files(self, folder: Path, checksums: dict[str, str]) -> dict[str, str]:
        return damaged_files(folder, checksums)

    def load_checkpoint(self, path: Path) -> None:
        self.loaded.append(path)


class FullDiskPolicy(FilePolicy):
    def finish_save(self) -> None:
        self.saving.mkdir()
        (self.saving / "state").write_text("with")
        raise CheckpointError(f"{self.saving} cannot be written (No space left on device)")


def make_settings(folder: Path, **changes) -> CheckpointingConfig:
    defaults = CheckpointingConfig(
        enabled=True,
        checkpoint_dir=str(folder),
        metric_name="val:accuracy",
        higher_is_better=True,
        keep_top_k=2,
        save_period=10,
        save_optimizer=True,
        save_consolidated=False,
        async_save=False,
        checkpoint_must_save_by=None,
        grace_s=30,
        save_at_end=True,
    )
    return replace(defaults, **changes)


def make_loader() -> ShuffledLoader[int]:
    return ShuffledLoader(range(10), batch_size=2, shuffle=True, seed=3)


def save(keeper: CheckpointKeeper, step: int, accuracy: float | None, policy: FilePolicy | None = None) -> None:
    val = {} if accuracy is None else {"accuracy": accuracy}
    keeper.save(
        step,
        policy or FilePolicy(),
        make_loader().state_dict(),
        {"train": {"reward_mean": 0.5, "loss": step, "total_tokens": 7.0 * step}, "val": val},
    )


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_is_due_at_every_period_and_at_the_end_and_never_when_switched_off(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path))
    assert [step for step in range(1, 26) if keeper.is_due(step, is_last=step == 25)] == [10, 20, 25]
    assert not CheckpointKeeper(make_settings(tmp_path, enabled=False)).is_due(10, is_last=True)


def test_the_best_stays_however_many_worse_ones_follow(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, keep_top_k=1))
    for step, accuracy in ((1, 0.9), (2, 0.5), (3, 0.4)):
        save(keeper, step, accuracy)
    assert kept(tmp_path) == {"step_1", "step_3"}


def test_a_lesser_metric_is_better_when_told_so_and_an_unmeasured_one_is_the_worst(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, metric_name="train:loss", higher_is_better=False))
    for step in (10, 20, 30):  # the loss is the step
        save(keeper, step, None)
    assert kept(tmp_path) == {"step_10", "step_20", "step_30"}
    save(keeper, 40, None)
    assert kept(tmp_path) == {"step_10", "step_20", "step_40"}

    keeper = CheckpointKeeper(make_settings(tmp_path / "val"))
    for step, accuracy in ((10, 0.1), (20, None), (30, math.nan), (40, 0.2)):
        save(keeper, step, accuracy)
    assert kept(tmp_path / "val") == {"step_10", "step_40"}


@pytest.mark.parametrize(("val_period", "is_warned"), [(10, False), (5, False), (20, True), (3, True)])
def test_saves_without_the_validation_that_ranks_them_are_told_of_at_the_start(tmp_path, caplog, val_period, is_warned):
    CheckpointKeeper(make_settings(tmp_path)).warn_of_unranked(val_period)  # saves every 10 steps
    assert [f"a validation every {val_period}" in message for message in caplog.messages] == [True] * is_warned
    caplog.clear()
    CheckpointKeeper(make_settings(tmp_path, metric_name="train:loss")).warn_of_unranked(val_period)
    CheckpointKeeper(make_settings(tmp_path, keep_top_k=None)).warn_of_unranked(val_period)
    assert not caplog.messages


METRICS = st.none() | st.just(math.nan) | st.sampled_from([0.0, 0.5, -1.0]) | st.floats()


@st.composite
def histories(draw):
    """Saves of one folder: metric, whether with the optimizer, and whether a process was killed in it before."""
    saves = draw(st.lists(st.tuples(METRICS, st.booleans(), st.booleans()), min_size=1, max_size=9))
    return [(step, *entry) for step, entry in enumerate(saves, start=1)]


@given(history=histories(), limit=st.integers(1, 4), higher=st.booleans())
@settings(max_examples=80)
def test_whatever_is_measured_no_better_checkpoint_is_removed_while_a_worse_one_stays(history, limit, higher):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = make_settings(folder, keep_top_k=limit, higher_is_better=higher)
        for step, metric, with_optimizer, is_killed in history:
            keeper = CheckpointKeeper(replace(options, save_optimizer=with_optimizer))
            if is_killed:  # in the next save: what it wrote is removed by the start after it
                (folder / f"step_{step}.partial" / "policy").mkdir(parents=True)
                recover_folders(folder, "step_*")
            save(keeper, step, metric)
        on_disk = {int(entry.removeprefix("step_")) for entry in kept(folder)}

    def goodness(entry):
        step, metric, *_ = entry
        if metric is None or not math.isfinite(metric):
            return (0, 0.0, step)
        return (1, metric if higher else -metric, step)

    # By hand, one removal at a time, as the process saw it: what was removed never comes back.
    expected: list[tuple] = []
    for entry in history:
        expected.append(entry)
        best = sorted(expected, key=goodness)[-limit:]
        with_optimizer = [other for other in expected if other[2]]
        expected = [other for other in expected if other in best or other is entry or other in with_optimizer[-1:]]
    assert on_disk == {step for step, *_ in expected}
    # And against the whole history: the best ones that were ever saved are there.
    assert {step for step, *_ in sorted(history, key=goodness)[-limit:]} <= on_disk
    assert history[-1][0] in on_disk
    assert len(on_disk) <= limit + 2


def test_a_checkpoint_that_cannot_be_removed_is_told_and_ends_nothing(tmp_path, caplog):
    keeper = CheckpointKeeper(make_settings(tmp_path, keep_top_k=1))
    save(keeper, 10, 0.5)
    (tmp_path / "step_10.partial").write_text("in the way")
    save(keeper, 20, 0.9)
    assert "step_10 is beyond checkpointing.keep_top_k and cannot be removed (Not a directory)" in caplog.text
    assert {"step_10", "step_20"} <= kept(tmp_path)


def test_without_a_metric_the_newest_are_kept_and_without_a_limit_all(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path / "two", metric_name=None))
    everything = CheckpointKeeper(make_settings(tmp_path / "all", keep_top_k=None))
    for step in (10, 20, 100):
        save(keeper, step, 1.0 / step)
        save(everything, step, 0.0)
    assert kept(tmp_path / "two") == {"step_20", "step_100"}
    assert kept(tmp_path / "all") == {"step_10", "step_20", "step_100"}


def test_the_newest_checkpoint_is_found_by_number_and_loads_policy_and_loader(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, keep_top_k=None))
    assert keeper.newest() is None
    loader = make_loader()
    next(loader)
    for step in (20, 100):
        keeper.save(
            step, FilePolicy(), loader.state_dict(), {"train": {"total_tokens": 0.0}, "val": {"accuracy": 0.25}}
        )
    newest = keeper.newest()
    assert newest is not None
    assert (newest.step, newest.metric, newest.folder) == (100, 0.25, tmp_path / "step_100")

    policy, resumed = FilePolicy(), make_loader()
    keeper.load(newest, policy, resumed)
    assert policy.loaded == [tmp_path / "step_100" / "policy"]
    assert next(resumed) == next(loader)
    assert CheckpointKeeper(make_settings(tmp_path, enabled=False)).newest() is None


def test_another_mixture_of_the_same_data_sets_is_gone_on_with_and_a_warning(tmp_path, caplog):
    def mixture(*weights: float) -> ShuffledLoader[int]:
        parts = [Part(5, weight) for weight in weights]
        return ShuffledLoader(range(10), batch_size=2, shuffle=True, seed=3, parts=parts)

    keeper = CheckpointKeeper(make_settings(tmp_path))
    keeper.save(1, FilePolicy(), mixture(0.5, 0.5).state_dict(), {"train": {"total_tokens": 0.0}, "val": {}})
    for weights, is_warned in (((0.5, 0.5), False), ((0.9, 0.1), True)):
        newest, last_step = resume_point(keeper, mixture(*weights), 3, "sft")
        assert (newest.step, last_step) == (1, 3)
        assert ("weights of data.train are not those of" in caplog.text) is is_warned


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path):
    save(CheckpointKeeper(make_settings(tmp_path), "sft"), 10, 0.5)
    assert CheckpointKeeper(make_settings(tmp_path), "sft").newest().step == 10
    with pytest.raises(CheckpointError, match=r"step_10 is a checkpoint of sft, which dpo cannot continue"):
        CheckpointKeeper(make_settings(tmp_path), "dpo").newest()


def test_a_checkpoint_of_a_version_that_counted_no_tokens_is_read(tmp_path, caplog):
    keeper = CheckpointKeeper(make_settings(tmp_path))
    save(keeper, 10, 0.5)
    assert keeper.newest().total_tokens == 70
    path = tmp_path / "step_10" / "progress.json"
    record = json.loads(path.read_text())
    for name in ("total_tokens", "algorithm", "checksums", "checksum"):
        del record[name]
    path.write_text(json.dumps(record))
    older = CheckpointKeeper(make_settings(tmp_path), "sft")
    assert older.newest().total_tokens == 0
    older.load(older.newest(), FilePolicy(), make_loader())
    assert "step_10 was written by an earlier version, without checksums" in caplog.text


def test_what_a_killed_run_left_unfinished_is_removed_and_a_replaced_folder_comes_back(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, keep_top_k=None))
    save(keeper, 10, 0.5)
    save(keeper, 20, 0.5)
    (tmp_path / "step_30.partial" / "policy").mkdir(parents=True)
    (tmp_path / "step_20").rename(tmp_path / "step_20.replaced")  # died between two renames of a second save
    (tmp_path / "step_10.replaced").mkdir()
    (tmp_path / "other.partial").mkdir()
    newest = keeper.newest()
    assert newest is not None and newest.step == 20
    assert kept(tmp_path) == {"step_10", "step_20", "other.partial"}


def test_a_save_in_the_background_counts_only_when_it_is_written_and_the_next_one_waits_for_it(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, keep_top_k=None, async_save=True))
    first, second = FilePolicy(), FilePolicy()
    save(keeper, 10, 0.5, first)
    keeper.poll()
    assert kept(tmp_path) == {"step_10.partial"}
    first.is_written = True
    keeper.poll()
    assert kept(tmp_path) == {"step_10"}

    save(keeper, 20, 0.5, second)
    save(keeper, 30, 0.5, first)
    assert kept(tmp_path) == {"step_10", "step_20", "step_30.partial"}
    keeper.finish()
    keeper.finish()
    assert kept(tmp_path) == {"step_10", "step_20", "step_30"}


def test_a_save_in_the_background_that_fails_is_raised_at_the_next_step_and_harms_no_older_one(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, async_save=True))
    save(keeper, 10, 0.5)
    failing = FullDiskPolicy()
    save(keeper, 20, 0.5, failing)
    keeper.poll()
    failing.is_written = True
    with pytest.raises(CheckpointError, match=r"step_20 was not saved: .*No space left.*step_10 is complete") as caught:
        keeper.poll()
    assert "\n" not in str(caught.value)
    assert kept(tmp_path) == {"step_10"}
    keeper.finish()


def test_a_step_that_fails_to_save_again_is_still_there_from_the_first_time(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path))
    save(keeper, 10, 0.5)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(keeper, 10, 0.7, FullDiskPolicy())
    newest = keeper.newest()
    assert newest is not None and newest.metric == 0.5
    save(keeper, 10, 0.7)
    newest = keeper.newest()
    assert newest is not None and newest.metric == 0.7
    assert kept(tmp_path) == {"step_10"}


def test_without_the_optimizer_a_model_folder_is_written_which_cannot_be_continued(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, save_optimizer=False))
    save(keeper, 10, 0.5)
    assert {path.name for path in (tmp_path / "step_10").iterdir()} == {"hf", "progress.json"}
    assert (tmp_path / "step_10" / "hf" / "model.safetensors").is_file()
    with pytest.raises(CheckpointError, match="without the optimizer and cannot be continued; use another"):
        keeper.newest()
    for step, with_optimizer in ((5, True), (8, False)):
        save(CheckpointKeeper(make_settings(tmp_path, save_optimizer=with_optimizer)), step, 0.4)
    with pytest.raises(CheckpointError, match=r"step_10 was .* continued; remove step_8, step_10 to go on from step_5"):
        keeper.newest()


def test_with_both_the_checkpoint_has_a_model_folder_beside_the_state(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, save_consolidated=True))
    save(keeper, 10, 0.5)
    assert {path.name for path in (tmp_path / "step_10").iterdir()} == {"hf", "policy", "progress.json"}
    assert keeper.newest() is not None


@pytest.mark.parametrize("act", ["start", "save"])
def test_a_folder_that_cannot_be_written_is_one_line_that_names_the_key(tmp_path, act):
    (tmp_path / "file").touch()
    keeper = CheckpointKeeper(make_settings(tmp_path / "file"))
    with pytest.raises(CheckpointError) as caught:
        keeper.newest() if act == "start" else save(keeper, 10, 0.5)
    text = str(caught.value)
    assert "\n" not in text
    assert "checkpointing.checkpoint_dir" in text and str(tmp_path / "file") in text
    assert "File exists" in text if act == "start" else "Not a directory" in text


def test_a_record_that_is_broken_foreign_or_missing_is_named(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path))
    save(keeper, 10, 0.5)
    record = tmp_path / "step_10" / "progress.json"
    for text, reason in (("{", r"progress\.json cannot be read"), ('{"step": 10}', "not the record of a checkpoint")):
        record.write_text(text)
        with pytest.raises(CheckpointError, match=rf"step_10.*{reason}"):
            keeper.newest()
    record.unlink()
    with pytest.raises(CheckpointError, match=r"step_10 has no progress\.json, so it is foreign or damaged"):
        keeper.newest()


def test_a_file_that_was_cut_short_or_lost_is_named_with_the_checkpoint_to_fall_back_to(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, keep_top_k=None))
    for step in (9, 10, 20):
        save(keeper, step, 0.5)
    state = tmp_path / "step_20" / "policy" / "state"
    state.write_text("with")
    with pytest.raises(CheckpointError, match=r"state has 4 bytes instead of 14.*remove step_20 to go on from step_10"):
        keeper.newest()
    state.unlink()
    with pytest.raises(CheckpointError, match=r"step_20/policy/state is missing"):
        keeper.newest()


def test_a_second_run_is_refused_before_it_removes_what_the_first_one_is_writing(tmp_path):
    settings = make_settings(tmp_path, async_save=True)
    first, second = CheckpointKeeper(settings), CheckpointKeeper(settings)
    with first.locked():
        save(first, 10, 0.5)
        with pytest.raises(CheckpointError, match=r"another run uses checkpointing\.checkpoint_dir"), second.locked():
            second.newest()
        first.finish()
        assert kept(tmp_path) == {"step_10", "run.lock"}
        save(first, 20, 0.5)
        (tmp_path / "run.lock").write_text("{}")  # another run took it while this one was suspended
        with pytest.raises(CheckpointError, match="was taken over by another run"):
            first.finish()
        assert kept(tmp_path) == {"step_10", "step_20.partial", "run.lock"}
    with CheckpointKeeper(make_settings(tmp_path / "off", enabled=False)).locked():
        assert not (tmp_path / "off").exists()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_flipped_bit_is_refused_with_the_newest_sound_checkpoint_to_fall_back_to(tmp_path, caplog):
    keeper = CheckpointKeeper(make_settings(tmp_path, keep_top_k=None, save_consolidated=True))
    for step in (10, 20, 30):
        save(keeper, step, 0.5)
    flip_a_bit(tmp_path / "step_30" / "hf" / "model.safetensors")
    policy = FilePolicy()
    keeper.load(keeper.newest(), policy, make_loader())
    assert policy.loaded == [tmp_path / "step_30" / "policy"]  # nothing reads the export
    assert "step_30/hf/model.safetensors has the checksum" in caplog.text

    for step in (20, 30):
        flip_a_bit(tmp_path / f"step_{step}" / "policy" / "state")
    flip_a_bit(tmp_path / "step_10" / "hf" / "model.safetensors")
    sound = r"step_30/policy/state has the checksum .* damaged; remove step_20, step_30 to go on from step_10"
    with pytest.raises(CheckpointError, match=sound):
        keeper.load(keeper.newest(), FilePolicy(), make_loader())
    flip_a_bit(tmp_path / "step_10" / "policy" / "state")
    with pytest.raises(CheckpointError, match=r"damaged; use another checkpointing\.checkpoint_dir to start anew"):
        keeper.load(keeper.newest(), FilePolicy(), make_loader())


def test_a_record_that_was_changed_is_refused_whatever_it_says_now(tmp_path):
    keeper = CheckpointKeeper(make_settings(tmp_path, keep_top_k=None))
    for step in (10, 20):
        save(keeper, step, 0.5)
    record = tmp_path / "step_20" / "progress.json"
    record.write_text(record.read_text().replace('"position": 0', '"position": 2'))
    refused = r"step_20/progress\.json has changed since it was written.*remove step_20 to go on from step_10"
    with pytest.raises(CheckpointError, match=refused):
        keeper.newest()


def test_a_damaged_checkpoint_takes_no_place_of_a_whole_one_and_ends_no_run(tmp_path, caplog):
    keeper = CheckpointKeeper(make_settings(tmp_path, keep_top_k=1))
    save(keeper, 10, 0.9)
    save(keeper, 20, 0.5)
    (tmp_path / "step_10" / "policy" / "state").write_text("cut")
    save(keeper, 30, 0.4)
    assert kept(tmp_path) == {"step_10", "step_20", "step_30"}  # of the whole ones 20 is the best
    (tmp_path / "step_20" / "progress.json").write_text("{")
    save(keeper, 40, 0.3)
    assert kept(tmp_path) == {"step_10", "step_20", "step_30", "step_40"}
    assert "step_20/progress.json cannot be read" in caplog.text
    assert keeper.newest().step == 40


def test_metrics_of_another_name_do_not_rank(tmp_path):
    save(CheckpointKeeper(make_settings(tmp_path, metric_name="train:loss", keep_top_k=None)), 10, 0.5)  # loss is 10
    keeper = CheckpointKeeper(make_settings(tmp_path))
    for step, accuracy in ((20, 0.4), (30, 0.3)):
        save(keeper, step, accuracy)
    assert kept(tmp_path) == {"step_20", "step_30"}
