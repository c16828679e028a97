"""Checkpoints in the format of torch.distributed.checkpoint, of any training state that lists its tensors by name."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from nemo_offload_rl.errors import CheckpointError
from nemo_offload_rl.policy.checkpointing import StateReader

logger = logging.getLogger(__name__)

METADATA_FILE = ".metadata"
OPTIMIZER = "optimizer/"


class TrainingState(Protocol):
    """What a checkpoint is taken of, and read into."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer states by their names in the checkpoint, those below `OPTIMIZER` the optimizer's.

        A name that several ranks give stands for the same contents, of which one is written.
        """
        ...

    def values(self) -> dict[str, Any]:
        """What is no tensor: the optimizer's settings and the schedule."""
        ...

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Take over what `values` gave when the checkpoint was written."""
        ...

    def make_optimizer_state(self) -> None:
        """Have the optimizer allocate its lazy state, which is read from disk next; changes no parameter."""
        ...

    def rng_state(self) -> dict[str, Tensor]:
        """This rank's random states by name."""
        ...

    def set_rng_state(self, states: Mapping[str, Tensor]) -> None:
        """Take over what `rng_state` gave."""
        ...


@dataclass(frozen=True)
class _Whole:
    """A value that is saved and read in one piece.

    A dictionary would be taken apart, and of its keys only those read that the state at hand has: an optimizer that
    counts steps in its parameter groups has no count before its first step.
    """

    value: Any


# -- saving ------------------------------------------------------------------------------------------------------------


class _FetchingPlanner(DefaultSavePlanner):
    """A planner that gives the writer what was fetched for it, and forgets the tensors themselves."""

    def __init__(self) -> None:
        super().__init__()
        self._fetched: dict[MetadataIndex, Callable[[], Tensor | BytesIO]] = {}

    def fetch(self, plan: SavePlan, reader: StateReader) -> None:
        """Fetch what this rank writes. Tensors that another rank writes are not read."""
        for item in plan.items:
            found = self.lookup_object(item.index)
            if item.type == WriteItemType.BYTE_IO:
                self._fetched[item.index] = _constant(self.transform_object(item, found))
            else:
                self._fetched[item.index] = reader.fetch(item.index.fqn, found)
        # The state must not be kept alive by a save that is being written.
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        return self._fetched[write_item.index]()


def _constant[T](value: T) -> Callable[[], T]:
    return lambda: value


class StagedDcpSave:
    """Implements `StagedSave`: the plan is made, and writing needs no other rank."""

    def __init__(self, writer: FileSystemWriter, planner: _FetchingPlanner, plan: SavePlan, metadata: Metadata) -> None:
        self._writer = writer
        self._planner = planner
        self._plan = plan
        self._metadata = metadata
        self._results: list[WriteResult] = []

    def write(self) -> None:
        """Write this rank's file."""
        self._results = self._writer.write_data(self._plan, self._planner).wait()

    def finish(self) -> None:
        """Tell rank 0 what was written, which writes the metadata."""
        is_writer = dist.get_rank() == 0
        gathered: list[Any] | None = [None] * dist.get_world_size() if is_writer else None
        dist.gather_object(self._results, gathered)
        if gathered is not None:
            self._writer.finish(self._metadata, cast(list[list[WriteResult]], gathered))


def stage_save(folder: Path, state: TrainingState, reader: StateReader) -> StagedDcpSave:
    """Stage parameters, optimizer, schedule and this rank's random state; every rank calls it.

    Args:
        folder: Exists already, empty.
        state: What is saved.
        reader: What tensors are read with.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    planner, writer = _FetchingPlanner(), FileSystemWriter(folder)
    planner.set_up_planner({**state.tensors(), **_rng_entries(state), **_whole_values(state)}, is_coordinator=rank == 0)
    writer.set_up_storage_writer(rank == 0, rank=rank)
    plans: list[Any] = [None] * world_size
    dist.all_gather_object(plans, writer.prepare_local_plan(planner.create_local_plan()))
    # Every rank makes the same global plan out of the same local ones.
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
    planner.fetch(plan, reader)
    return StagedDcpSave(writer, planner, plan, metadata)


def _whole_values(state: TrainingState) -> dict[str, _Whole]:
    return {name: _Whole(value) for name, value in state.values().items()}


def _rng_entries(state: TrainingState) -> dict[str, Tensor]:
    return {f"rng/{dist.get_rank()}/{name}": value for name, value in state.rng_state().items()}


# -- loading -----------------------------------------------------------------------------------------------------------


def load_state(path: Path, state: TrainingState) -> None:
    """Read what `stage_save` wrote into the tensors that exist already; every rank calls it.

    Raises:
        CheckpointError: `path` holds no checkpoint, a damaged one, or one of another model or optimizer.
    """
    saved = _read_metadata(path).state_dict_metadata
    present = state.tensors()
    # Masters are there from the start; only what the first step makes has to be made for it.
    if any(key.startswith(OPTIMIZER) and key not in present for key in saved):
        state.make_optimizer_state()
    wanted: dict[str, Any] = {**state.tensors()}
    _check_fits(path, wanted, saved)
    random_states = _rng_entries(state)
    has_rng = saved.keys() >= random_states.keys()
    if has_rng:
        wanted |= random_states
    else:
        logger.warning("checkpoint %s has no random state for rank %d; it keeps its seed", path, dist.get_rank())
    wanted |= _whole_values(state)
    try:
        load(wanted, checkpoint_id=path)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"{path} cannot be read by rank {rank} ({type(cause).__name__}: {_first_line(cause)}); the checkpoint is "
            "damaged: remove it to go on from an older one"
        ) from error
    state.set_values({name: wanted[name].value for name in state.values()})
    if has_rng:
        state.set_rng_state({name.rpartition("/")[2]: wanted[name] for name in random_states})


def saved_names(path: Path) -> list[str]:
    """Names of what a checkpoint holds.

    Raises:
        CheckpointError: `path` holds no checkpoint, or a damaged one.
    """
    return list(_read_metadata(path).state_dict_metadata)


def _read_metadata(path: Path) -> Metadata:
    if not (path / METADATA_FILE).is_file():
        raise CheckpointError(f"{path} holds no policy checkpoint (it has no {METADATA_FILE}); give another folder.")
    try:
        return FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path / METADATA_FILE} cannot be read ({type(error).__name__}: {_first_line(error)}); the checkpoint is "
            "damaged or foreign: remove it to go on from an older one"
        ) from error


def _check_fits(path: Path, wanted: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    missing = sorted(key for key in wanted if key not in saved)
    if missing:
        raise CheckpointError(
            f"The checkpoint {path} has no {missing[0]} ({len(missing)} of {len(wanted)} tensors are missing); it "
            "belongs to another model or optimizer."
        )
    for key, tensor in wanted.items():
        entry = saved[key]
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            raise CheckpointError(
                f"The checkpoint {path} has {key} with the shape {tuple(entry.size)} instead of {tuple(tensor.shape)}; "
                "it belongs to another model or optimizer."
            )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def torch_rng_state(device: torch.device) -> dict[str, Tensor]:
    """Torch's random states of the CPU and of a GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_torch_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Take over what `torch_rng_state` gave."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
