from __future__ import annotations

import dataclasses
import json
import math
import resource
import shutil
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from nemo_offload_rl.errors import ConfigError, UserCodeError
from nemo_offload_rl.keys.run import LoggerConfig, MlflowConfig, SinkConfig, WandbConfig
from nemo_offload_rl.utils.logger import RunLogger


def settings(folder: Path, **changes: object) -> LoggerConfig:
    values: dict[str, object] = {
        "log_dir": str(folder),
        "numbered_runs": False,
        "num_val_samples_to_print": 0,
        "memory_sample_period_s": 0.2,
        "tensorboard_enabled": False,
        "wandb_enabled": False,
        "wandb": None,
        "mlflow_enabled": False,
        "mlflow": None,
        "prometheus_enabled": False,
        "prometheus": None,
    }
    return LoggerConfig(**(values | changes))  # type: ignore[arg-type]


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_step_is_one_line_whatever_was_logged_in_how_many_calls(tmp_path: Path) -> None:
    with RunLogger(settings(tmp_path / "run"), {}) as logger:
        logger.log(1, {"loss": 0.5, "count": 3}, "train")
        logger.log(1, {"total_s": 2.0}, "timing")
        logger.log(2, {"loss": torch.tensor(0.25)}, "train")
    assert lines(tmp_path / "run") == [
        {"step": 1, "train/loss": 0.5, "train/count": 3.0, "timing/total_s": 2.0},
        {"step": 2, "train/loss": 0.25},
    ]


def test_numbered_runs_each_have_a_folder_after_the_highest(tmp_path: Path) -> None:
    (tmp_path / "exp_007").mkdir()
    (tmp_path / "exp_by_hand").mkdir()
    for step, done in ((1, None), (2, 1)):
        with RunLogger(settings(tmp_path, numbered_runs=True), {}, resume_after=done) as logger:
            logger.log(step, {"loss": 1.0}, "train")
    assert [lines(tmp_path / name) for name in ("exp_008", "exp_009")] == [
        [{"step": 1, "train/loss": 1.0}],
        [{"step": 2, "train/loss": 1.0}],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exp_007", "exp_008", "exp_009", "exp_by_hand"]


def test_a_committed_step_is_on_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    logger = RunLogger(settings(tmp_path), {})
    logger.log(1, {"loss": 1.0}, "train")
    logger.commit()
    assert lines(tmp_path) == [{"step": 1, "train/loss": 1.0}]
    logger.close()
    logger.close()
    assert len(lines(tmp_path)) == 1


def test_the_open_step_is_written_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunLogger(settings(tmp_path), {}) as logger:
        logger.log(1, {"loss": 1.0}, "train")
        _ = 1 / 0
    assert lines(tmp_path) == [{"step": 1, "train/loss": 1.0}]


def test_values_that_json_lacks_become_null_and_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunLogger(settings(tmp_path), {}) as logger:
        logger.log(4, {"loss": math.nan, "norm": math.inf, "kl": 0.0}, "train")
    assert lines(tmp_path) == [{"step": 4, "train/loss": None, "train/norm": None, "train/kl": 0.0}]
    assert "step 4: train/loss is nan" in caplog.text


def test_older_metrics_are_renamed_and_kept(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        with RunLogger(settings(tmp_path), {}) as logger:
            logger.log(1, {"x": value})
    assert lines(tmp_path) == [{"step": 1, "x": 3.0}]
    assert lines(tmp_path, "metrics.1.jsonl") == [{"step": 1, "x": 1.0}]
    assert lines(tmp_path, "metrics.2.jsonl") == [{"step": 1, "x": 2.0}]


def test_a_resumed_run_appends_and_sets_aside_what_is_there_of_the_steps_that_it_does_again(tmp_path: Path) -> None:
    for done, x in ((0, 1.0), (1, 2.0)):
        with RunLogger(settings(tmp_path), {}, resume_after=done) as logger:
            logger.log(done + 1, {"x": x})
    assert lines(tmp_path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "x"')  # the disk was full
    with RunLogger(settings(tmp_path), {}, resume_after=1) as logger:
        logger.log(2, {"x": 3.0})
    assert lines(tmp_path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 3.0}]
    assert (tmp_path / "metrics.1.jsonl").read_text() == '{"step": 2, "x": 2.0}\n{"step": 3, "x"'
    RunLogger(settings(tmp_path), {}, resume_after=2).close()
    assert not (tmp_path / "metrics.2.jsonl").exists()


def test_configuration_and_revision_are_stored(tmp_path: Path) -> None:
    config = {"grpo": {"seed": 7, "lr": 1e-8}, "policy": {"betas": [0.9, 0.999], "top_k": None}}
    RunLogger(settings(tmp_path), config).close()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == config
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["versions"]["torch"].startswith("2.")
    assert record["git_revision"] is None or len(record["git_revision"]) == 40


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"logger\.log_dir .*file/run cannot be written"):
        RunLogger(settings(tmp_path / "file" / "run"), {})


def test_tensorboard_gets_the_same_values(tmp_path: Path) -> None:
    # Steps that a resumed run does again count once.
    for done, first, last in ((None, 0.25, 3), (1, 0.5, 2)):
        with RunLogger(settings(tmp_path, tensorboard_enabled=True), {}, resume_after=done) as logger:
            for step in range((done or 0) + 1, last + 1):
                logger.log(step, {"loss": step * first}, "train")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.25), (2, 1.0)]


def test_weights_and_biases_works_offline(tmp_path: Path) -> None:
    wandb = WandbConfig(project="p", name="n", entity="team", group="g", tags=("t",), mode="offline")
    with RunLogger(settings(tmp_path, wandb_enabled=True, wandb=wandb), {"grpo": {"seed": 1}}) as logger:
        logger.log(1, {"loss": 0.5}, "train")
        logger.log_samples(1, ["right '1+1=' -> '2'"])
    (record,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    assert record.name == f"run-{run_id}.wandb"
    # wandb's own process writes the file a moment after `finish` returned.
    deadline = time.monotonic() + 300
    while b"train/loss" not in (written := record.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"train/loss" in written
    assert b"git_revision" in written
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/validation/samples_*.json")
    assert "'1+1=' -> '2'" in table.read_text()
    # A resumed run goes on as the same one, also with a step that was logged before; any other is a new one.
    for resume in (True, False):
        done = 0 if resume else None
        with RunLogger(settings(tmp_path, wandb_enabled=True, wandb=wandb), {}, resume_after=done) as logger:
            logger.log(1, {"loss": 0.25}, "train")
        assert ((tmp_path / "wandb_run_id").read_text().strip() == run_id) is resume
    names = [path.name for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")]
    assert (len(names), names.count(f"run-{run_id}.wandb")) == (3, 2)


def test_validation_samples_are_a_text_file_for_each_validation_and_in_tensorboard(tmp_path: Path) -> None:
    with RunLogger(settings(tmp_path, tensorboard_enabled=True), {}) as logger:
        logger.log_samples(10, ["right '1+1=' -> '2'", "wrong '2+2=' -> '5'"])
        logger.log_samples(20, [])
    assert (tmp_path / "samples" / "step_10.txt").read_text() == "right '1+1=' -> '2'\nwrong '2+2=' -> '5'\n"
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_10.txt"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("validation/samples/text_summary")
    assert event.step == 10
    assert b"'2+2=' -> '5'" in event.tensor_proto.string_val[0]


def test_tensorboard_gets_hyperparameters_configuration_and_revision_in_one_run(tmp_path: Path) -> None:
    config = {"grpo": {"seed": 7, "clip": None}, "policy": {"lr": 1e-8, "betas": [0.9, 0.999]}}
    RunLogger(settings(tmp_path, tensorboard_enabled=True), config).close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert len(list((tmp_path / "tensorboard").rglob("events.*"))) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert b"betas" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b"git_revision" in events.Tensors("run/text_summary")[0].tensor_proto.string_val[0]
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["grpo.seed"].number_value == 7
    assert hparams["policy.lr"].number_value == 1e-8
    assert hparams["policy.betas"].string_value == "[0.9, 0.999]"


def test_a_full_disk_costs_one_warning_and_what_it_refused_is_written_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunLogger(settings(tmp_path), {}) as logger:
        logger.log(1, {"loss": 0.5})
        logger.commit()
        size = (tmp_path / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))  # a part of the next line has room
        try:
            for step in (2, 3):
                logger.log(step, {"loss": 0.25})
                logger.commit()
                logger.log_samples(step, ["sample"])
                logger.log_rollouts(step, [{"reward": 1.0, "text": "long"}])
            assert (tmp_path / "metrics.jsonl").stat().st_size == size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logger.log(4, {"loss": 0.125})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert caplog.text.count("cannot be written (File too large): the run goes on") == 1


def test_samples_with_characters_that_no_file_can_hold_are_written_by_their_codes(tmp_path: Path) -> None:
    with RunLogger(settings(tmp_path), {}) as logger:
        logger.log_samples(1, ["right '\ud800' -> '2'"])
    assert (tmp_path / "samples/step_1.txt").read_text() == "right '\\ud800' -> '2'\n"


class _EndsBadly:
    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Takes them."""

    def close(self) -> None:
        raise RuntimeError("cannot be closed")


def test_an_error_at_the_end_of_a_callback_hides_no_other(tmp_path: Path) -> None:
    with (
        pytest.raises(UserCodeError, match="cannot be closed"),
        RunLogger(settings(tmp_path), {}, None, [_EndsBadly()]),
    ):
        pass
    with pytest.raises(ZeroDivisionError), RunLogger(settings(tmp_path), {}, None, [_EndsBadly()]):
        _ = 1 / 0


def test_lines_that_were_never_written_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(ZeroDivisionError), RunLogger(settings(tmp_path), {}, resume_after=0) as logger:
        logger.log(1, {"loss": 0.5})
        logger.log(2, {"loss": 0.5})
        _ = 1 / 0
    assert caplog.text.count("cannot be written (No space left on device)") == 1
    assert "2 lines of" in caplog.text and "were never written" in caplog.text


class _Sink:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)
        raise RuntimeError("the connection is closed")


def test_a_sink_that_fails_gets_nothing_more_and_one_of_python_code_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text("def post(step, metrics):\n    raise ConnectionError('gone')\n")
    sinks = (SinkConfig(target=f"{tmp_path}/mine.py:post", kwargs=None),)
    with RunLogger(settings(tmp_path / "run", sinks=sinks), {}) as logger:
        for step in (1, 2):
            logger.log(step, {"loss": 0.5})
            logger.commit()
    assert caplog.text.count("logger.sinks.0.target has failed and gets no more metrics; the run goes on") == 1
    assert len(lines(tmp_path / "run")) == 2
    sink = _Sink()
    with (
        pytest.raises(UserCodeError, match="the connection is closed"),
        RunLogger(settings(tmp_path / "called"), {}, callbacks=[sink]) as logger,
    ):
        logger.log(1, {"loss": 0.5})
        logger.commit()
    assert sink.steps == [1]


def test_the_end_of_weights_and_biases_own_process_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = WandbConfig(project="p", name="n", entity=None, group=None, tags=None, mode="offline")
    with RunLogger(settings(tmp_path, wandb_enabled=True, wandb=wandb), {}) as logger:
        helpers = [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]
        for helper in helpers:
            helper.kill()
        psutil.wait_procs(helpers, timeout=1500)
        for step in (1, 2, 3):
            logger.log(step, {"loss": 0.5})
            logger.log_samples(step, ["right '1+1=' -> '2'"])
            logger.commit()
    assert helpers
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert caplog.text.count("Weights & Biases has failed and gets no more metrics; the run goes on: ") == 1


@pytest.mark.parametrize("name", ["wandb", "mlflow", "prometheus"])
def test_a_logger_needs_its_section(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no section logger\.{name}"):
        RunLogger(settings(tmp_path, **{f"{name}_enabled": True}), {})


# -- MLflow ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoggerConfig:
    """Settings that write to MLflow's store of files."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = MlflowConfig(experiment_name="e", run_name="n", tracking_uri=f"file:{tmp_path}/mlruns")
    return settings(tmp_path / "run", mlflow_enabled=True, mlflow=mlflow)


def test_mlflow_gets_metrics_parameters_configuration_revision_and_samples(
    tmp_path: Path, mlflow_settings: LoggerConfig
) -> None:
    client_of = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny").MlflowClient
    lists = {f"list_{number}": [0.9, number] for number in range(120)}
    config = {"grpo": {"seed": 7, "clip": None}, "policy": {"lr": 1e-8, "name": "", **lists}}
    for value in (0.5, 0.25):
        with RunLogger(mlflow_settings, config) as logger:
            logger.log(1, {"loss": value, "kl": math.nan}, "train")
            logger.log(2, {"loss": value / 2}, "train")
            logger.log_samples(2, ["right '1+1=' -> '2'"])
    client = client_of(tracking_uri=f"file:{tmp_path}/mlruns")
    (experiment,) = [found for found in client.search_experiments() if found.name == "e"]
    newest, oldest = client.search_runs([experiment.experiment_id])
    assert (newest.info.run_name, newest.info.status) == ("n", "FINISHED")
    history = client.get_metric_history(oldest.info.run_id, "train/loss")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.5), (2, 0.25)]
    assert math.isnan(newest.data.metrics["train/kl"])
    expected = {"grpo.seed": "7", "grpo.clip": "null", "policy.lr": "1e-08", "policy.name": ""}
    assert newest.data.params == expected | {f"policy.{name}": json.dumps(value) for name, value in lists.items()}
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert newest.data.tags.get("mlflow.source.git.commit") == record["git_revision"]
    folder = Path(newest.info.artifact_uri.removeprefix("file:"))
    assert yaml.safe_load((folder / "config.yaml").read_text()) == config
    assert json.loads((folder / "run.json").read_text()) == record
    assert "'1+1=' -> '2'" in (folder / "samples" / "step_2.txt").read_text()


def test_a_resumed_run_goes_on_as_the_same_run_of_mlflow_and_a_new_one_is_another(
    tmp_path: Path, mlflow_settings: LoggerConfig
) -> None:
    client_of = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny").MlflowClient
    for step, done in ((1, None), (2, 1)):
        with RunLogger(mlflow_settings, {"max_num_steps": step}, resume_after=done) as logger:
            logger.log(step, {"loss": float(step)})
    client = client_of(tracking_uri=f"file:{tmp_path}/mlruns")
    (experiment,) = [found for found in client.search_experiments() if found.name == "e"]

    def runs() -> list[str]:
        return [run.info.run_id for run in client.search_runs([experiment.experiment_id])]

    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert [(entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 1.0),
        (2, 2.0),
    ]
    assert run.data.params == {"max_num_steps": "1"}  # MLflow changes no parameter
    folder = Path(run.info.artifact_uri.removeprefix("file:"))
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"max_num_steps": 2}
    RunLogger(mlflow_settings, {}).close()
    assert len(runs()) == 2
    client.delete_run((tmp_path / "run" / "mlflow_run_id").read_text().strip())
    RunLogger(mlflow_settings, {}, resume_after=2).close()  # the run to go on with is gone: a new one
    assert len(runs()) == 2
    (tmp_path / "run" / "mlflow_run_id").write_text("0123456789abcdef0123456789abcdef\n")
    RunLogger(mlflow_settings, {}, resume_after=2).close()
    assert len(runs()) == 3


def test_mlflow_that_does_not_start_is_one_line(
    tmp_path: Path, mlflow_settings: LoggerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    with pytest.raises(ConfigError, match=r"MLflow did not start at logger\.mlflow\.tracking_uri file:") as caught:
        RunLogger(mlflow_settings, {})
    assert "set `MLFLOW_ALLOW_FILE_STORE=true`" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert mlflow_settings.mlflow is not None
    elsewhere = dataclasses.replace(mlflow_settings.mlflow, tracking_uri="nowhere://user:pa55@word@host/x")
    with pytest.raises(ConfigError, match=r"tracking_uri nowhere://\.\.\.@host/x ") as caught:
        RunLogger(dataclasses.replace(mlflow_settings, mlflow=elsewhere), {})
    assert "pa55" not in str(caught.value) and "word" not in str(caught.value)


def test_mlflow_that_is_lost_costs_a_warning_and_not_the_run(
    tmp_path: Path, mlflow_settings: LoggerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    with RunLogger(mlflow_settings, {}) as logger:
        logger.log(1, {"loss": 1.0})
        logger.commit()
        (record,) = (tmp_path / "mlruns").glob("*/*/meta.yaml")
        shutil.rmtree(record.parent)
        for step in (2, 3):
            logger.log(step, {"loss": 1.0})
            logger.log_samples(step, ["sample"])
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]
    assert caplog.text.count("MLflow has failed") == 1


def test_mlflow_that_is_not_installed_is_one_line_with_its_fix(
    tmp_path: Path, mlflow_settings: LoggerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as an import of what is not there
    with pytest.raises(ConfigError, match="pip install mlflow-skinny"):
        RunLogger(mlflow_settings, {})
