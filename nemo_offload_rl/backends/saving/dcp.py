"""Checkpoints in the format of torch.distributed.checkpoint, of any training state that lists its tensors by name.

Loading runs no code from a checkpoint: its unpicklers accept a few data classes and refuse every other name
(`_MetadataUnpickler`, and torch's own with `weights_only`).
"""

import logging
import pickle
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from nemo_offload_rl.backends.ranks import failing_together
from nemo_offload_rl.backends.saving.contents import MASTER, MODEL, OPTIMIZER, STEP_COUNT, TrainingState
from nemo_offload_rl.errors import CheckpointError, first_line
from nemo_offload_rl.protocols.saving import StateReader
from nemo_offload_rl.utils.checksums import SummedStream
from nemo_offload_rl.utils.liveness import show_progress

logger = logging.getLogger(__name__)

METADATA_FILE = ".metadata"
_METADATA_CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
)
_BAD_PICKLE = (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, LookupError)
_FOREIGN = "another model or optimizer wrote it: resume with the settings that wrote it, or begin anew from an export"


@dataclass(frozen=True)
class _Whole:
    """A value that is saved and read in one piece.

    A plain dictionary would be flattened, and only keys that the present state has would be read. An optimizer that
    counts steps in its parameter groups would lose the count, which it lacks before its first step.
    """

    value: Any


# -- saving ------------------------------------------------------------------------------------------------------------


class _FetchingPlanner(DefaultSavePlanner):
    """A planner that hands fetched data to the writer and keeps no reference to the state's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._fetched: dict[MetadataIndex, Callable[[], Tensor | BytesIO]] = {}

    def fetch(self, plan: SavePlan, reader: StateReader) -> None:
        """Fetch what this rank writes; tensors that another rank writes are not read."""
        for item in plan.items:
            found = self.lookup_object(item.index)
            if item.type == WriteItemType.BYTE_IO:
                self._fetched[item.index] = _constant(self.transform_object(item, found))
            else:
                self._fetched[item.index] = reader.fetch(item.index.fqn, found)
        # A running save must not keep the state alive.
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        show_progress()
        return self._fetched[write_item.index]()


class _SummedFiles(FileSystem):
    """The file system; also computes a checksum of each written file, by name."""

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = SummedStream(cast(Any, stream))
            yield summed
            self.checksums[Path(path).name] = summed.checksum()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


def _constant[T](value: T) -> Callable[[], T]:
    return lambda: value


class StagedDcpSave:
    """A `StagedSave` whose plan is made, so that writing needs no other rank."""

    def __init__(self, writer: FileSystemWriter, planner: _FetchingPlanner, plan: SavePlan, metadata: Metadata) -> None:
        self._writer = writer
        self._files = writer.fs = _SummedFiles()
        self._planner = planner
        self._plan = plan
        self._metadata = metadata
        self._results: list[WriteResult] = []

    def write(self) -> None:
        """Write this rank's file."""
        self._results = self._writer.write_data(self._plan, self._planner).wait()

    def finish(self) -> None:
        """Gather all ranks' results on rank 0, which writes the metadata."""
        is_writer = dist.get_rank() == 0
        gathered: list[Any] | None = [None] * dist.get_world_size() if is_writer else None
        dist.gather_object(self._results, gathered)
        if gathered is not None:
            self._writer.finish(self._metadata, cast(list[list[WriteResult]], gathered))

    @property
    def checksums(self) -> dict[str, str]:
        """Checksum of each file that this rank has written, by name."""
        return self._files.checksums


def stage_save(folder: Path, state: TrainingState, reader: StateReader) -> StagedDcpSave:
    """Stage parameters, optimizer, schedule and random state for an existing empty folder; every rank calls it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    planner, writer = _FetchingPlanner(), FileSystemWriter(folder)
    entries = {**state_tensors(state), **_rng_entries(state), **_whole_values(state.values())}
    planner.set_up_planner(entries, is_coordinator=rank == 0)
    writer.set_up_storage_writer(rank == 0, rank=rank)
    plans: list[Any] = [None] * world_size
    dist.all_gather_object(plans, writer.prepare_local_plan(planner.create_local_plan()))
    # All ranks make the same global plan from the same local plans.
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
    planner.fetch(plan, reader)
    return StagedDcpSave(writer, planner, plan, metadata)


def state_tensors(state: TrainingState) -> dict[str, Tensor]:
    """Return all tensors of a state by their names in the checkpoint."""
    found = state.model_tensors()
    for group in state.groups:
        found |= state.optimizer_tensors(group)
    return found


def _whole_values(values: Mapping[str, Any]) -> dict[str, _Whole]:
    return {name: _Whole(value) for name, value in values.items()}


def _rng_entries(state: TrainingState) -> dict[str, Tensor]:
    return {f"rng/{dist.get_rank()}/{name}": value for name, value in state.rng_state().items()}


# -- loading -----------------------------------------------------------------------------------------------------------


def load_state(path: Path, state: TrainingState, streamed: Iterable[str] = ()) -> None:
    """Read what `stage_save` wrote into existing tensors; every rank calls it.

    States of a streamed part are made and read while the part is on the device, so loading takes no more device memory
    than a step. Ranks may have different parts, so each reads alone; errors are exchanged at the end.

    Args:
        path: Folder of the checkpoint.
        state: The state to fill, with its parameters and first group's states on the device.
        streamed: Yields the name of each other group once its states are on the device.

    Raises:
        CheckpointError: `path` holds no checkpoint, a damaged one, or one of another model or optimizer.
    """
    reader = _Reader(path)
    _check_nothing_is_left_over(reader, MODEL, state.model_tensors())
    random_states = _rng_entries(state)
    has_rng = reader.entries.keys() >= random_states.keys()
    if not has_rng:
        logger.warning("checkpoint %s has no random state for rank %d, which keeps its seed", path, dist.get_rank())
    # Reading replaces these values or fills them in place.
    values: dict[str, Any] = {**_whole_values(state.values())}
    names = list(values)
    values |= random_states if has_rng else {}
    with failing_together(CheckpointError):
        _read_alone(reader, state, streamed, values)
    _check_nothing_is_left_over(reader, OPTIMIZER, state_tensors(state))
    state.set_values({name: values[name].value for name in names})
    if has_rng:
        state.set_rng_state({name.rpartition("/")[2]: values[name] for name in random_states})


class _DataPlanner(DefaultLoadPlanner):
    """A planner that reads values as data; torch's own planner unpickles them and so runs any code they name."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            with torch.serialization.safe_globals([_Whole]):
                self.original_state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(f"{name} is damaged, or names code") from error

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        show_progress()


class _Reader(FileSystemReader):
    """Reads tensors of one checkpoint; reads its metadata once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = path
        self._metadata = _read_metadata(path)
        self.entries = self._metadata.state_dict_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read(self, entries: dict[str, Any]) -> None:
        """Fill tensors in place, and replace other values; calls no collective.

        Raises:
            CheckpointError: The checkpoint lacks an entry, has it in another shape, or is damaged.
        """
        _check_fits(self.folder, entries, self.entries)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # else logged at every load
                load(entries, storage_reader=self, planner=_DataPlanner(), no_dist=True)
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise CheckpointError(
                f"{self.folder} cannot be read by rank {dist.get_rank()} ({type(cause).__name__}: "
                f"{first_line(cause)}); the checkpoint is damaged: remove it to go on from an older one"
            ) from error


def _read_alone(reader: _Reader, state: TrainingState, streamed: Iterable[str], others: dict[str, Any]) -> None:
    """Read everything that this rank needs: group by group, then `others`."""
    lazy = {
        name.rpartition("/")[0] for name in reader.entries if name.startswith(OPTIMIZER) and not name.endswith(MASTER)
    }
    first, waiting = state.groups[0], list(state.groups[1:])
    # Before reading: Megatron's hybrid optimizer makes its states by a step that changes the parameters.
    state.make_optimizer_state(first, lazy)
    reader.read({**state.model_tensors_with(first), **state.optimizer_tensors(first)})
    for group in streamed:
        waiting.remove(group)
        state.make_optimizer_state(group, lazy)
        reader.read({**state.model_tensors_with(group), **state.optimizer_tensors(group)})
    if waiting:
        raise RuntimeError(f"the states of {', '.join(waiting)} never came, so they were not read")
    reader.read(others)


def _check_nothing_is_left_over(reader: _Reader, prefix: str, tensors: Container[str]) -> None:
    """Refuse a checkpoint with entries under `prefix` that no rank has; a collective."""
    # Step counts are left out: some optimizers count for each parameter, others for a parameter group.
    mine = [
        name
        for name in reader.entries
        if name.startswith(prefix) and not name.endswith(STEP_COUNT) and name not in tensors
    ]
    everyones: list[list[str]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    left_over = sorted(set(mine).intersection(*everyones))
    if left_over:
        others = f" and {len(left_over) - 1} more tensors" if len(left_over) > 1 else ""
        raise CheckpointError(
            f"The checkpoint {reader.folder} has {left_over[0]}{others}, which this run lacks; {_FOREIGN}"
        )


def saved_names(path: Path) -> list[str]:
    """Return the names of a checkpoint's entries.

    Raises:
        CheckpointError: `path` holds no checkpoint, or a damaged one.
    """
    return list(_read_metadata(path).state_dict_metadata)


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the classes of `.metadata`, and raises `UnpicklingError` at any other name, which could be code."""

    _KNOWN = frozenset(
        [
            *(("torch.distributed.checkpoint.metadata", known.__name__) for known in _METADATA_CLASSES),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("collections", "OrderedDict"),
        ]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _read_metadata(path: Path) -> Metadata:
    if not (path / METADATA_FILE).is_file():
        raise CheckpointError(f"{path} holds no policy checkpoint (it has no {METADATA_FILE}); give another folder.")
    try:
        with (path / METADATA_FILE).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}")
        names = {info.relative_path for info in (metadata.storage_data or {}).values()}
    except _BAD_PICKLE as error:
        raise CheckpointError(
            f"{path / METADATA_FILE} cannot be read ({type(error).__name__}: {first_line(error)}); the checkpoint is "
            "damaged or foreign: remove it to go on from an older one"
        ) from error
    if outside := sorted(name for name in names if Path(name).name != name):
        raise CheckpointError(
            f"{path / METADATA_FILE} names {outside[0]}, which is outside of its folder; remove the checkpoint"
        )
    return metadata


def _check_fits(path: Path, wanted: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    missing = sorted(key for key in wanted if key not in saved)
    if missing:
        raise CheckpointError(
            f"The checkpoint {path} has no {missing[0]} ({len(missing)} of {len(wanted)} tensors are missing); "
            f"{_FOREIGN}"
        )
    for key, tensor in wanted.items():
        entry = saved[key]
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            raise CheckpointError(
                f"The checkpoint {path} has {key} with the shape {tuple(entry.size)} instead of {tuple(tensor.shape)}; "
                f"{_FOREIGN}"
            )
