"""Checkpoints: when and where they are saved, which ones are kept, and which one a run resumes from.

A checkpoint is a folder `step_<n>` with:
- `policy/`: the policy's state;
- `hf/`: a Hugging Face folder, if `save_consolidated` is set or the optimizer is not saved;
- `progress.json`: a record with size and checksum of every other file, and its own checksum.
It is written as `step_<n>.partial` and renamed when complete, so that `step_<n>` is always whole. Sizes and record are
checked before any worker starts (`newest`), checksums by the workers (`load`).

With `async_save`, training goes on after `save`. After each step `poll` completes a save that has been written, and
`finish` waits for it at the end of the run.
"""

import dataclasses
import json
import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from nemo_offload_rl.algorithms.folder_lock import FolderLock
from nemo_offload_rl.algorithms.identity import Identity, check_identity
from nemo_offload_rl.backends.saving.folders import not_written, partial_of, recover_folders, replace_folder
from nemo_offload_rl.data.loader import BatchLoader, LoaderState, ShuffledLoader
from nemo_offload_rl.errors import CheckpointError, ConfigError
from nemo_offload_rl.keys.run import CheckpointingConfig
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.utils.checksums import bytes_checksum, files_below

logger = logging.getLogger(__name__)

PROGRESS_FILE = "progress.json"
FORMAT = "nemo_offload_rl checkpoint 1"
_OWN_CHECKSUM = "checksum"
EXPORT_FOLDER = "hf"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One finished checkpoint on disk; its record has all fields but the folder.

    Attributes:
        folder: `step_<n>`.
        step: The step that it was saved after.
        metric_name: The metric that ranks it, such as `val:accuracy`.
        metric: The metric's value, None if it was not measured.
        has_optimizer: Whether training can continue from it.
        loader: Position in the data.
        total_tokens: Tokens trained on since the first step.
        algorithm: The algorithm that saved it, such as `sft`; empty if unknown.
        identity: See `identity.py`; empty if unknown.
        files: Size in bytes of every file but the record, by path inside the folder.
        checksums: Checksums of the same files, by `utils/checksums.py`; empty in checkpoints of earlier versions.
    """

    folder: Path
    step: int
    metric_name: str | None
    metric: float | None
    has_optimizer: bool
    loader: LoaderState
    total_tokens: float
    algorithm: str
    identity: Identity
    files: Mapping[str, int]
    checksums: Mapping[str, str]


@dataclass(frozen=True)
class _Pending:
    """A save whose folder has not got its final name yet."""

    policy: Policy
    target: Path
    record: dict[str, Any]
    checksums: dict[str, str]
    prunes: bool


class CheckpointKeeper:
    """Saves at the configured steps and keeps the best few.

    Args:
        settings: The keys `checkpointing.*`.
        algorithm: The running algorithm, which continues only its own checkpoints.
        identity: Identity of the run, which `resume_point` compares with a checkpoint's.
    """

    def __init__(self, settings: CheckpointingConfig, algorithm: str = "", identity: Identity | None = None) -> None:
        self.settings = settings
        self.identity: Identity = identity or {}
        self.algorithm = algorithm
        self.bound = "max_num_steps"  # the key that ends the run: this or max_num_epochs; `resume_point` sets it
        self._folder = Path(settings.checkpoint_dir).absolute()
        self._pending: _Pending | None = None
        self._lock: FolderLock | None = None

    @contextmanager
    def locked(self) -> Generator[None]:
        """Lock the folder against other runs while the block uses it.

        Raises:
            CheckpointError: The folder cannot be written, or another run uses it.
        """
        if not self.settings.enabled:
            yield
            return
        self._check_writable()
        with FolderLock(self._folder) as self._lock:
            yield

    # -- saving

    def is_due(self, step: int, is_last: bool) -> bool:
        """Tell whether a checkpoint belongs to this step."""
        return self.settings.enabled and (step % self.settings.save_period == 0 or is_last)

    @property
    def is_saving(self) -> bool:
        """Tells whether a save has begun that `finish` has not completed."""
        return self._pending is not None

    @property
    def ranks_by_validation(self) -> bool:
        """Tells whether `metric_name` is a metric of validation."""
        return (self.settings.metric_name or "").startswith("val:")

    def warn_of_unranked(self, val_period: int) -> None:
        """Warn if validation ranks checkpoints but some are saved without one: these are removed first."""
        settings = self.settings
        ranks = settings.enabled and self.ranks_by_validation and settings.keep_top_k is not None
        if ranks and val_period and settings.save_period % val_period:
            logger.warning(
                "there is a checkpoint every %d steps and a validation every %d: a checkpoint without a validation has "
                "no %s, and checkpointing.keep_top_k removes it first; make checkpointing.save_period a multiple of "
                "val_period",
                settings.save_period, val_period, settings.metric_name,
            )  # fmt: skip

    @property
    def exports_weights(self) -> bool:
        """Tells whether a save also writes a Hugging Face folder, which needs the policy's state on the devices."""
        return self.settings.save_consolidated or not self.settings.save_optimizer

    def save(
        self,
        step: int,
        policy: Policy,
        loader: LoaderState,
        metrics: Mapping[str, Mapping[str, float]],
        *,
        prunes: bool = True,
    ) -> None:
        """Save, then remove checkpoints that `checkpoints_to_keep` does not name.

        With `async_save` this waits only for the copy of GPU memory, and for the end of the previous save. Without
        `save_optimizer` the policy is saved as a Hugging Face folder, from which training cannot continue.

        Args:
            step: The step just done.
            policy: The policy.
            loader: Position in the training data.
            metrics: The step's metrics under `train`, with `total_tokens`, and under `val`.
            prunes: False removes nothing.

        Raises:
            CheckpointError: The folder cannot be written; older checkpoints are unchanged.
        """
        self.finish()
        self._check_held()
        settings, target = self.settings, self._folder / f"step_{step}"
        record = {
            "format": FORMAT,
            "step": step,
            "metric_name": settings.metric_name,
            "metric": self._metric(metrics),
            "has_optimizer": settings.save_optimizer,
            "loader": loader,
            "total_tokens": metrics["train"]["total_tokens"],
            "algorithm": self.algorithm,
            "identity": self.identity,
        }
        partial = partial_of(target)
        checksums: dict[str, str] = {}
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if self.exports_weights:
                checksums = _below(EXPORT_FOLDER, policy.export_hf(partial / EXPORT_FOLDER))
            if settings.save_optimizer:
                policy.start_save(partial / "policy", in_background=settings.async_save)
        except (OSError, CheckpointError) as error:
            self._give_up(target, error)
        self._pending = _Pending(policy, target, record, checksums, prunes)
        if not settings.async_save:
            self.finish()

    def poll(self) -> None:
        """Complete a save that has been written; called after every step.

        Raises:
            CheckpointError: The save could not be written.
        """
        if self._pending is not None and self._pending.policy.save_is_done():
            self.finish()

    def finish(self) -> None:
        """Wait for a save that has begun, and give its folder its final name; also called at the end of the run.

        Raises:
            CheckpointError: The save could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._check_held()
        try:
            checksums = pending.checksums | _below("policy", pending.policy.finish_save())
            _write_record(partial_of(pending.target), pending.record, checksums)
            replace_folder(pending.target)
        except (OSError, CheckpointError) as error:
            self._give_up(pending.target, error)
        if pending.prunes:
            self._prune()

    # -- going on

    def newest_folder(self) -> Path | None:
        """Return the newest checkpoint's folder, unread; None if there is none or checkpointing is off."""
        steps = self._steps() if self.settings.enabled else []
        return self._folder / f"step_{max(steps)}" if steps else None

    def newest(self) -> Checkpoint | None:
        """Read the newest checkpoint, to resume from; None if there is none or checkpointing is off.

        This also checks that the folder can be written, and removes unfinished saves of a killed run.

        Raises:
            CheckpointError: The checkpoint cannot be continued, is damaged or foreign, or the folder cannot be written.
        """
        if not self.settings.enabled:
            return None
        self._check_writable()
        recover_folders(self._folder, "step_*")
        steps = self._steps()
        if not steps:
            return None
        older = self._continuable(before=steps[-1])
        fallback = self._fallback(older[0] if older else None)
        checkpoint = _read_record(self._folder / f"step_{steps[-1]}", fallback)
        if checkpoint.algorithm and checkpoint.algorithm != self.algorithm:
            raise CheckpointError(
                f"{checkpoint.folder} is a checkpoint of {checkpoint.algorithm}, which {self.algorithm} cannot "
                "continue; use another checkpointing.checkpoint_dir. To begin with its model, set policy.model_name to "
                "its folder hf"
            )
        self._refuse_damage(checkpoint, _wrong_sizes(checkpoint), fallback)
        if not checkpoint.has_optimizer:
            raise CheckpointError(
                f"{checkpoint.folder} was saved without the optimizer and cannot be continued; {fallback}"
            )
        return checkpoint

    def load(self, checkpoint: Checkpoint, policy: Policy, loader: BatchLoader[Any]) -> None:
        """Restore policy and loader as they were after the checkpoint's step.

        Raises:
            CheckpointError: A file is damaged (the message names the newest undamaged checkpoint), or the policy cannot
                read it.
        """
        if not checkpoint.checksums:
            logger.warning(
                "%s was written by an earlier version, without checksums: its files are not checked", checkpoint.folder
            )
        if damage := policy.damaged_files(checkpoint.folder, checkpoint.checksums):
            older = self._continuable(before=checkpoint.step)
            sound = next((it for it in older if not policy.damaged_files(it.folder, _read_at_resume(it))), None)
            self._refuse_damage(checkpoint, damage, self._fallback(sound))
        logger.info("resuming after step %d from %s", checkpoint.step, checkpoint.folder)
        policy.load_checkpoint(checkpoint.folder / "policy")
        loader.load_state_dict(checkpoint.loader)

    # -- inside

    def _metric(self, metrics: Mapping[str, Mapping[str, float]]) -> float | None:
        if self.settings.metric_name is None:
            return None
        prefix, _, name = self.settings.metric_name.partition(":")
        # None in a step without validation, or without a row of the metric's data set.
        return metrics[prefix].get(name)

    def _check_held(self) -> None:
        if self._lock is not None:
            self._lock.check_held()

    def _continuable(self, before: int) -> list[Checkpoint]:
        """List checkpoints before a step whose record and sizes allow training to continue, newest first."""
        found = [entry for entry in self._finished() if entry.step < before and entry.has_optimizer]
        return sorted((it for it in found if not _wrong_sizes(it)), key=lambda it: it.step, reverse=True)

    def _fallback(self, older: Checkpoint | None) -> str:
        """Advise how to go on without the newest checkpoint."""
        anew = "use another checkpointing.checkpoint_dir to start anew"
        if older is None:
            return anew
        later = ", ".join(f"step_{step}" for step in self._steps() if step > older.step)
        return f"remove {later} to go on from step_{older.step}, or {anew}"

    def _refuse_damage(self, checkpoint: Checkpoint, damage: Mapping[str, str], fallback: str) -> None:
        """Raise `CheckpointError` for a damaged file that a resume reads, and warn of other damaged files."""
        for name, fault in damage.items():
            path = checkpoint.folder / name
            if checkpoint.has_optimizer and Path(name).parts[0] == EXPORT_FOLDER:
                logger.warning(
                    "%s %s: do not use that folder; the run goes on from policy/, which is not damaged", path, fault
                )
            else:
                raise CheckpointError(f"{path} {fault}, so this checkpoint is damaged; {fallback}")

    def _give_up(self, target: Path, error: OSError | CheckpointError) -> NoReturn:
        """Remove the files of a failed save, and raise an error that names the newest complete checkpoint."""
        partial = partial_of(target)
        text = str(error) if isinstance(error, CheckpointError) else not_written(error, partial)
        shutil.rmtree(partial, ignore_errors=True)
        kept = self._steps()
        left = f"step_{kept[-1]} is complete and was not touched" if kept else "there is no older one"
        raise CheckpointError(
            f"checkpoint {target} was not saved: {text} (checkpointing.checkpoint_dir); {left}"
        ) from error

    def _check_writable(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as probe:
                probe.write(b"can be written")
        except OSError as error:
            raise CheckpointError(
                f"checkpointing.checkpoint_dir {self._folder} cannot be written ({error.strerror or error}); choose "
                "another folder or free space"
            ) from error

    def _steps(self) -> list[int]:
        """List the steps of all checkpoint folders, ascending."""
        names = [path.name.removeprefix("step_") for path in self._folder.glob("step_*")]
        return sorted(int(name) for name in names if name.isdigit())

    def _finished(self) -> list[Checkpoint]:
        """List checkpoints with a readable record, and warn of others."""
        found: list[Checkpoint] = []
        for step in self._steps():
            try:
                found.append(_read_record(self._folder / f"step_{step}"))
            except CheckpointError as error:
                logger.warning("a checkpoint is ignored: %s", error)
        return found

    def _prune(self) -> None:
        """Remove checkpoints that `checkpoints_to_keep` does not name; damaged ones do not count."""
        finished = [entry for entry in self._finished() if not _wrong_sizes(entry)]
        kept = checkpoints_to_keep(finished, self.settings)
        for checkpoint in finished:
            if checkpoint.step in kept:
                continue
            try:
                # Renamed first: a half-removed folder must not look finished.
                shutil.rmtree(checkpoint.folder.rename(partial_of(checkpoint.folder)))
            except OSError as error:
                logger.warning(
                    "%s is beyond checkpointing.keep_top_k and cannot be removed (%s); remove it by hand",
                    checkpoint.folder,
                    error.strerror or error,
                )


def checkpoints_to_keep(checkpoints: Sequence[Checkpoint], settings: CheckpointingConfig) -> set[int]:
    """Return the steps of the checkpoints that stay on disk.

    These are the best `keep_top_k` by the metric, the newest, and the newest that training can continue from: at most
    `keep_top_k` + 2. A checkpoint whose metric is missing, not finite or has another name ranks last; of two equal
    ones the newer ranks first.
    """
    if settings.keep_top_k is None:
        return {entry.step for entry in checkpoints}
    sign = 1.0 if settings.higher_is_better else -1.0

    def rank(entry: Checkpoint) -> tuple[bool, float, int]:
        metric = entry.metric if entry.metric_name == settings.metric_name else None
        if metric is None or not math.isfinite(metric):
            return False, 0.0, entry.step
        return True, sign * metric, entry.step

    kept = {entry.step for entry in sorted(checkpoints, key=rank, reverse=True)[: settings.keep_top_k]}
    for steps in ([entry.step for entry in checkpoints], [e.step for e in checkpoints if e.has_optimizer]):
        kept.update(sorted(steps)[-1:])
    return kept


def _below(folder: str, checksums: Mapping[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": checksum for name, checksum in checksums.items()}


def _read_at_resume(checkpoint: Checkpoint) -> dict[str, str]:
    """Select the checksums of the files that a resume reads."""
    return {name: checksum for name, checksum in checkpoint.checksums.items() if Path(name).parts[0] != EXPORT_FOLDER}


def _write_record(folder: Path, record: Mapping[str, Any], checksums: Mapping[str, str]) -> None:
    """Write the record of a checkpoint whose other files are complete."""
    files = {name: (folder / name).stat().st_size for name in files_below(folder)}
    text = json.dumps({**record, "files": files, "checksums": checksums})
    with (folder / PROGRESS_FILE).open("w", encoding="utf-8") as file:
        file.write(f'{text[:-1]}, "{_OWN_CHECKSUM}": "{bytes_checksum(text.encode())}"}}\n')
        file.flush()
        os.fsync(file.fileno())


def _read_record(folder: Path, remedy: str | None = None) -> Checkpoint:
    """Read the record of a checkpoint.

    Args:
        folder: `step_<n>`.
        remedy: Advice if the record is damaged; None advises to remove the folder.

    Raises:
        CheckpointError: The record is missing, damaged or foreign.
    """
    path = folder / PROGRESS_FILE
    remedy = remedy or f"remove the folder {folder} or change checkpointing.checkpoint_dir"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {PROGRESS_FILE}, so it is foreign or damaged; {remedy}")
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as the record of a checkpoint ({error}); {remedy}") from error
    fields = {field.name for field in dataclasses.fields(Checkpoint)} - {"folder"}
    record = cast(dict[str, Any], read) if isinstance(read, dict) else {}
    if record:
        own_checksum = record.pop(_OWN_CHECKSUM, None)
        if own_checksum is not None and own_checksum != bytes_checksum(json.dumps(record).encode()):
            raise CheckpointError(f"{path} has changed since it was written, so this checkpoint is damaged; {remedy}")
        # Earlier versions did not write these.
        missing: dict[str, Any] = {"total_tokens": 0.0, "algorithm": "", "identity": {}, "checksums": {}}
        record = missing | record
    if record.pop("format", None) != FORMAT or record.keys() != fields:
        raise CheckpointError(f"{path} is not the record of a checkpoint of this program ({FORMAT}); {remedy}")
    return Checkpoint(folder=folder, **record)


def _wrong_sizes(checkpoint: Checkpoint) -> dict[str, str]:
    """Find files that are missing or have another size; faults by path in the folder."""
    found: dict[str, str] = {}
    for name, size in checkpoint.files.items():
        path = checkpoint.folder / name
        if not path.is_file():
            found[name] = "is missing"
        elif path.stat().st_size != size:
            found[name] = f"has {path.stat().st_size} bytes instead of {size}"
    return found


def resume_point(
    checkpoints: CheckpointKeeper, loader: ShuffledLoader[Any], max_num_steps: int, section: str
) -> tuple[Checkpoint | None, int]:
    """Return the checkpoint to resume from, None to start anew, and the number of the run's last step.

    Steps and data both bound a run. With dynamic sampling a step may take several batches, so the run may end before
    that step.

    Args:
        checkpoints: The folder of checkpoints.
        loader: The training data with its number of epochs; moved to the checkpoint's position.
        max_num_steps: Greatest number of steps.
        section: Section of the keys that bound the run: `grpo`, `sft` or `dpo`.

    Raises:
        ConfigError: The newest checkpoint is already the end of this run.
        CheckpointError: The checkpoint cannot be continued, or has another model, tokenizer or chat template.
        DataError: The checkpoint was saved with other data.
    """
    newest = checkpoints.newest()
    if newest is None:
        last_step = min(max_num_steps, loader.num_batches_left)
        checkpoints.bound = "max_num_steps" if max_num_steps == last_step else "max_num_epochs"
        return None, last_step
    check_identity(newest.folder, newest.identity, checkpoints.identity)
    loader.load_state_dict(newest.loader)
    mine = loader.state_dict()
    if newest.loader.get("parts", mine.get("parts")) != mine.get("parts"):
        logger.warning(
            "the weights of data.train are not those of %s: until the next pass over a data set, rows are repeated if "
            "its weight is lower now, and left out if it is higher",
            newest.folder,
        )
    if newest.loader.get("digest", mine.get("digest")) != mine.get("digest"):
        logger.warning(
            "data.train has the same number of rows as %s, but other rows: the run goes on at the same position, and "
            "may train on rows that were kept for validation before",
            newest.folder,
        )
    key = "max_num_steps" if newest.step >= max_num_steps else "max_num_epochs"
    last_step = min(max_num_steps, newest.step + loader.num_batches_left)
    if newest.step >= last_step:
        raise ConfigError(
            f"{newest.folder} is already the end of this run of {last_step} steps; raise {section}.{key} to go on, or "
            "change checkpointing.checkpoint_dir to start anew"
        )
    checkpoints.bound = "max_num_steps" if max_num_steps == last_step else "max_num_epochs"
    return newest, last_step


_UNITS_S = (86400, 3600, 60, 1)


def seconds_of(text: str) -> int | None:
    """Parse days:hours:minutes:seconds, such as 00:03:45:00, to seconds; None for any other text."""
    if re.fullmatch(r"\d+(:\d+){3}", text) is None:
        return None
    return sum(int(part) * unit_s for part, unit_s in zip(text.split(":"), _UNITS_S, strict=True))


class SaveDeadline:
    """The deadline `checkpointing.checkpoint_must_save_by`: tells whether one more step and its save may miss it.

    Steps and saves are expected to take as long as the longest ones so far.

    Args:
        text: Days:hours:minutes:seconds after `start`; None for no deadline.
        margin_s: Seconds to spare.
        clock: Returns the time in seconds.
    """

    def __init__(self, text: str | None, margin_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = None if text is None else seconds_of(text)
        self._margin_s = margin_s
        self._clock = clock
        self._started_s = self._step_began_s = clock()
        self._longest_step_s = self._longest_save_s = 0.0
        self._save_began_s: float | None = None
        self.reached = False  # the step that has ended is the run's last

    def start(self) -> None:
        """Note the start of the run."""
        self._started_s = self._step_began_s = self._clock()

    def step_done(self) -> None:
        """Note the end of a step, before its save, and set `reached`."""
        now_s = self._clock()
        self._longest_step_s = max(self._longest_step_s, now_s - self._step_began_s)
        self._step_began_s = now_s
        if self._limit_s is not None:
            needed_s = self._longest_step_s + self._longest_save_s + self._margin_s
            self.reached = now_s - self._started_s + needed_s >= self._limit_s

    @contextmanager
    def saving(self) -> Generator[None]:
        """Time a wait for the beginning or end of a save; it does not count as part of a step."""
        began_s = self._clock()
        self._save_began_s = began_s if self._save_began_s is None else self._save_began_s
        yield
        self._step_began_s += self._clock() - began_s

    def save_ended(self) -> None:
        """Note the end of a save, which began with the first `saving` since the previous end."""
        if self._save_began_s is not None:
            self._longest_save_s = max(self._longest_save_s, self._clock() - self._save_began_s)
        self._save_began_s = None
