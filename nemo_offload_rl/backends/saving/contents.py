"""The contents of a training checkpoint: what a backend lists by name, for `dcp.py` to save and load."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

MODEL, OPTIMIZER = "model/", "optimizer/"
MASTER = "/master"  # suffix of fp32 masters, which exist before the first step
STEP_COUNT = "/step"


class FlatRange(Tensor):
    """A placeholder in a checkpoint's state for a tensor `[num_elements]`; this rank holds one range of it.

    It has the whole tensor's shape and no memory of its own, and supports no computation. The methods with underscores
    are torch.distributed.checkpoint's protocol for a tensor that is spread over ranks. If several ranks give the same
    range, one copy is written.

    Args:
        part: This rank's range, in a shape that can be viewed as one dimension.
        offset: First element of the range.
        num_elements: Size of the whole tensor.
    """

    # Torch function modes must not intercept reads of sizes and types.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    part: Tensor
    offset: int

    @staticmethod
    def __new__(cls, part: Tensor, offset: int, num_elements: int) -> FlatRange:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, (num_elements,), dtype=part.dtype, device=part.device
        )
        made.part = part.detach().view(-1)
        made.offset = offset
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a range of a flattened tensor; take its part")

    def __repr__(self, **_: Any) -> str:
        return f"FlatRange(offset={self.offset}, length={self.part.numel()}, of={self.numel()})"

    def __create_write_items__(self, fqn: str, _: Tensor) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(self.part), size=self.size())
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([self.offset]), sizes=self.part.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is None or index.offset == torch.Size([self.offset])
        return self.part


class TrainingState(Protocol):
    """The training state that a checkpoint saves and loads."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        ...

    @property
    def groups(self) -> Sequence[str]:
        """The optimizer's state groups: first the group that stays on the device in a step, then the streamed parts."""
        ...

    def model_tensors(self) -> dict[str, Tensor]:
        """Return parameters by their names in the checkpoint, which begin with `MODEL`.

        If several ranks give a name, their contents are the same and one copy is written.
        """
        ...

    def model_tensors_with(self, group: str) -> dict[str, Tensor]:
        """Return the `model_tensors` that are on the device together with `group`; each belongs to one of `groups`."""
        ...

    def optimizer_tensors(self, group: str) -> dict[str, Tensor]:
        """Return masters and states of one of `groups` by name: `OPTIMIZER` + parameter + "/" + state."""
        ...

    def values(self) -> dict[str, Any]:
        """Return the state without tensors: the optimizer's settings and the schedule."""
        ...

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Restore the result of `values` from a checkpoint."""
        ...

    def make_optimizer_state(self, group: str, saved: Container[str]) -> None:
        """Make the optimizer allocate one group's states, which are read next; changes no parameter.

        Only states that the optimizer would create in its first step are allocated here.

        Args:
            group: One of `groups`.
            saved: `OPTIMIZER` + parameter, for each parameter whose states are in the checkpoint; others get none.
        """
        ...

    def rng_state(self) -> dict[str, Tensor]:
        """Return this rank's random states by name."""
        ...

    def set_rng_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore a result of `rng_state`."""
        ...


def torch_rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return torch's random states of the CPU and, if `device` is a GPU, of the GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_torch_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore a result of `torch_rng_state`."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
