"""Further receivers of a run's metrics: TensorBoard, Weights & Biases, MLflow, Prometheus, a user's code.

Each library is imported only when its receiver is enabled.
"""

import inspect
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any, Protocol

import yaml

from nemo_offload_rl.errors import ConfigError, UserCodeError, first_line
from nemo_offload_rl.keys.run import LoggerConfig, MlflowConfig, WandbConfig
from nemo_offload_rl.targets import UserCode
from nemo_offload_rl.utils.prometheus import PrometheusSink, not_installed

_LOG = logging.getLogger(__name__)

WANDB_ID_FILE = "wandb_run_id"
MLFLOW_ID_FILE = "mlflow_run_id"
_MLFLOW_PARAMETERS_AT_ONCE = 100  # the limit of one call


@dataclass(frozen=True)
class RunOfSinks:
    """The run whose metrics sinks get.

    Attributes:
        folder: The run folder.
        config: Plain dictionaries.
        record: Git revision, command and versions, as in run.json.
        resume_after: The step that the run goes on after, with the runs of Weights & Biases and MLflow whose ids
            `folder` holds; None for a new run.
    """

    folder: Path
    config: Mapping[str, Any]
    record: Mapping[str, Any]
    resume_after: int | None

    def known_id(self, id_file: Path) -> str | None:
        """The id of a resumed run elsewhere, None if there is none."""
        is_known = self.resume_after is not None and id_file.is_file()
        return id_file.read_text(encoding="utf-8").strip() if is_known else None


class MetricSink(Protocol):
    """A further receiver of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step."""
        ...

    def write_samples(self, step: int, lines: Sequence[str]) -> None:
        """Take validation samples, one a line."""
        ...

    def close(self) -> None:
        """Write everything that is buffered, and end."""
        ...


class LossySink:
    """A sink that a failure disconnects with a warning; metrics.jsonl has all metrics too.

    Args:
        name: For the warning.
        sink: May raise anything.
        abandon: Called after a failure; may fail too.
    """

    def __init__(self, name: str, sink: MetricSink, abandon: Callable[[], object] = lambda: None) -> None:
        self._name = name
        self._sink: MetricSink | None = sink
        self._abandon = abandon

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda sink: sink.write(step, metrics))

    def write_samples(self, step: int, lines: Sequence[str]) -> None:
        self._try(lambda sink: sink.write_samples(step, lines))

    def close(self) -> None:
        """Close the sink unless it has failed: its end may then wait for minutes."""
        self._try(lambda sink: sink.close())

    def _try(self, call: Callable[[MetricSink], None]) -> None:
        if self._sink is None:
            return
        try:
            call(self._sink)
        except Exception as error:
            self._sink = None
            _LOG.warning("%s has failed and gets no more metrics; the run goes on: %s", self._name, _reason(error))
            with suppress(Exception):
                self._abandon()


class TensorBoardSink:
    """Writes TensorBoard events: metrics, samples, configuration and run record.

    TensorBoard hides events of an earlier start about steps after `resume_after`, which are done again.
    """

    def __init__(self, run: RunOfSinks) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        first_step = None if run.resume_after is None else run.resume_after + 1
        self._writer = SummaryWriter(log_dir=str(run.folder / "tensorboard"), purge_step=first_step)
        self._writer.add_text("config", _as_block(yaml.safe_dump(dict(run.config), sort_keys=False)))
        self._writer.add_text("run", _as_block(json.dumps(run.record, indent=2)))
        # `add_hparams` would make a run of its own for them.
        for summary in hparams(dict(_leaves(run.config)), {}):
            self._writer._get_file_writer().add_summary(summary)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def write_samples(self, step: int, lines: Sequence[str]) -> None:
        self._writer.add_text("validation/samples", _as_block("\n".join(lines)), step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Writes to Weights & Biases; with mode `offline`, into the run folder only.

    The id of the run is kept in the run folder, so that a resumed run is the same run there. Metrics are drawn over
    `step`, not over the count of calls: a resumed run repeats steps that were logged after its checkpoint.
    """

    def __init__(self, settings: WandbConfig, run: RunOfSinks) -> None:
        try:
            import wandb
            from wandb.errors import Error as WandbError
        except ModuleNotFoundError as error:
            raise not_installed("wandb", "wandb") from error
        mode: Any = settings.mode
        id_file = run.folder / WANDB_ID_FILE
        known_id = run.known_id(id_file)
        try:
            self._run = wandb.init(
                project=settings.project,
                name=settings.name,
                entity=settings.entity,
                group=settings.group,
                tags=settings.tags or None,
                id=known_id,
                resume="allow" if known_id else None,
                dir=str(run.folder),
                config={**run.config, "run": dict(run.record)},
                mode=mode,
                settings=wandb.Settings(console="off", silent=True),
            )
        except WandbError as error:
            raise ConfigError(
                f"Weights & Biases did not start ({_reason(error)}); run `wandb login`, or set "
                "logger.wandb.mode=offline or logger.wandb_enabled=false"
            ) from error
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def write_samples(self, step: int, lines: Sequence[str]) -> None:
        import wandb

        table = wandb.Table(columns=["step", "sample"], data=[[step, line] for line in lines])
        self._run.log({"step": step, "validation/samples": table})

    def close(self) -> None:
        self._run.finish()

    @staticmethod
    def abandon() -> None:
        """Give up the connection, which would raise again at the end of this process."""
        import wandb

        wandb.teardown()


class MlflowSink:
    """Writes to MLflow: metrics, samples, and the configuration as parameters and, with the run record, as files.

    The id of the run is kept in the run folder, so that a resumed run is the same run there. MLflow keeps its first
    parameters; config.yaml becomes the present one.
    """

    def __init__(self, settings: MlflowConfig, run: RunOfSinks) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ModuleNotFoundError as error:
            packages = "mlflow-skinny (mlflow, to write into a database of this machine)"
            raise not_installed("mlflow", "mlflow", packages) from error
        self._new_metric = Metric
        _LOG.info("opening an MLflow run at %s", _without_password(settings.tracking_uri))
        parameters = [Param(name, str(value)) for name, value in _leaves(run.config)]
        tags = {"mlflow.source.git.commit": run.record["git_revision"]} if run.record["git_revision"] else {}
        id_file = run.folder / MLFLOW_ID_FILE
        known_id = run.known_id(id_file)
        try:
            self._client = MlflowClient(tracking_uri=settings.tracking_uri)
            if known_id is not None and self._is_there(known_id):
                self._run_id = known_id
                self._client.update_run(known_id, status="RUNNING")
            else:
                found = self._client.get_experiment_by_name(settings.experiment_name)
                experiment = found.experiment_id if found else self._client.create_experiment(settings.experiment_name)
                self._run_id = self._client.create_run(experiment, tags=tags, run_name=settings.run_name).info.run_id
                for some in batched(parameters, _MLFLOW_PARAMETERS_AT_ONCE):
                    self._client.log_batch(self._run_id, params=some)
            self._client.log_dict(self._run_id, dict(run.config), "config.yaml")
            self._client.log_dict(self._run_id, dict(run.record), "run.json")
        except (MlflowException, OSError, ImportError) as error:  # the last where artifacts need another client
            raise ConfigError(
                f"MLflow did not start at logger.mlflow.tracking_uri {_without_password(settings.tracking_uri)} "
                f"({_reason(error)}); start its server, correct the address, or set logger.mlflow_enabled to false"
            ) from error
        id_file.write_text(f"{self._run_id}\n", encoding="utf-8")

    def _is_there(self, run_id: str) -> bool:
        """Whether the server still has a run; another server, or an emptied one, has not."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        entries = [self._new_metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=entries)

    def write_samples(self, step: int, lines: Sequence[str]) -> None:
        self._client.log_text(self._run_id, "\n".join(lines) + "\n", f"samples/step_{step}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class UserSink:
    """A user's function of step and metrics, or object with `write`, and optionally `write_samples` and `close`.

    Args:
        code: The function, object or class.

    Raises:
        UserCodeError: It cannot be made or called.
    """

    def __init__(self, code: UserCode) -> None:
        self._code = code
        if inspect.isclass(code.value):
            code.check_positional(())
        self._object: Any = code.make()
        self._has_write = hasattr(self._object, "write")
        if self._has_write:
            UserCode(f"{code.label}.write", self._object.write).check_positional(("step", "metrics"))
        else:
            code.check_positional(("step", "metrics"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._has_write:
            with self._code.telling():
                self._object.write(step, dict(metrics))
        else:
            self._code.call(step, dict(metrics))

    def write_samples(self, step: int, lines: Sequence[str]) -> None:
        if hasattr(self._object, "write_samples"):
            with self._code.telling():
                self._object.write_samples(step, list(lines))

    def close(self) -> None:
        if hasattr(self._object, "close"):
            with self._code.telling():
                self._object.close()


def user_sinks(settings: LoggerConfig, callbacks: Sequence[Any] = ()) -> list[MetricSink]:
    """Sinks of `logger.sinks`, and callbacks of Python code, whose errors end the run.

    Raises:
        UserCodeError: One cannot be used.
    """
    named: list[MetricSink] = []
    for index, sink in enumerate(settings.sinks or ()):
        label = f"logger.sinks.{index}.target"
        named.append(LossySink(label, UserSink(UserCode.named(label, sink.target, sink.kwargs))))
    if not isinstance(callbacks, Iterable):
        raise UserCodeError(f"callbacks is a {type(callbacks).__name__}; give a list of functions or objects")
    return [*named, *(UserSink(UserCode("callbacks", callback)) for callback in callbacks)]


def open_sinks(settings: LoggerConfig, run: RunOfSinks) -> list[MetricSink]:
    """Open the sinks that are enabled.

    Raises:
        ConfigError: One is not installed, did not start, or has no section.
    """
    sinks: list[MetricSink] = []
    if settings.tensorboard_enabled:
        sinks.append(LossySink("TensorBoard", TensorBoardSink(run)))
    if settings.wandb_enabled:
        wandb = WandbSink(_section(settings.wandb, "wandb"), run)
        sinks.append(LossySink("Weights & Biases", wandb, WandbSink.abandon))
    if settings.mlflow_enabled:
        sinks.append(LossySink("MLflow", MlflowSink(_section(settings.mlflow, "mlflow"), run)))
    if settings.prometheus_enabled:
        sinks.append(LossySink("Prometheus", PrometheusSink(_section(settings.prometheus, "prometheus"), run.folder)))
    return sinks


def _section[Section](section: Section | None, name: str) -> Section:
    if section is None:
        raise ConfigError(
            f"logger.{name}_enabled is true, but there is no section logger.{name}; add it, or set that key to false"
        )
    return section


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Dotted names and values of a nested configuration; lists and null as JSON."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, config if isinstance(config, bool | int | float | str) else json.dumps(config)


def _as_block(text: str) -> str:
    """Text as a block of Markdown, which TensorBoard shows verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _without_password(text: str) -> str:
    """Text with user names and passwords of addresses in it left out."""
    return re.sub(r"(\w://)[^/\s]+@", r"\1...@", text)


def _reason(error: BaseException) -> str:
    return _without_password(first_line(error))
