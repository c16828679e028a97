"""A rank's range of a flattened tensor, for torch.distributed.checkpoint to save, and to load with any other split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


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
