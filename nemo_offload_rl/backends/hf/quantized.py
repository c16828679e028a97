"""Reads the 8- and 4-bit weights of a checkpoint as bfloat16, part by part.

- `fp8` (DeepSeek-V3, Qwen3-FP8, MiniMax-M2): `NAME` in float8, and `NAME_scale_inv`: a factor for each block of
  `weight_block_size` rows and columns, or one for the tensor. Values are products in float32, rounded to bfloat16.
- `mxfp4` (gpt-oss): `NAME_blocks` [E, out, in / 32, 16], two 4-bit numbers in a byte, the first in its low half, and
  `NAME_scales` [E, out, in / 32], exponents of 2 plus 127. Read as `NAME` [E, in, out]; every value is exact.

Sources: `transformers` 5.12.1, `integrations/finegrained_fp8.py` and `integrations/mxfp4.py`; OCP Microscaling Formats
(MX) Specification 1.0, section 5.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_FP8_TYPES = {"F8_E4M3", torch.float8_e4m3fn}
_BYTES = {"U8", torch.uint8}
_GROUP = 32  # values that share an exponent
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Scales of activations, which layers that compute in 8 bits use.
_UNUSED = (".activation_scale", ".input_scale")

type Shape = tuple[int, ...]
type Read = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""Reads a part of a stored tensor, by name, offsets and sizes."""


class Packed(Protocol):
    """A tensor that a checkpoint stores as two."""

    @property
    def stored(self) -> tuple[str, str]:
        """Names of the values and of their scales in the checkpoint."""
        ...

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        ...

    def read(self, read: Read, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a part of the tensor in bfloat16; of the checkpoint only what the part needs."""
        ...


@dataclass(frozen=True)
class BlockScaled:
    """A float8 tensor [..., N, K] with a factor for each block of its last two dimensions.

    Attributes:
        stored: See `Packed`.
        shape: See `Packed`.
        block: Rows and columns of a block; None if the whole tensor has one factor.
        scales_shape: Shape of the stored factors.
    """

    stored: tuple[str, str]
    shape: Shape
    block: tuple[int, int] | None
    scales_shape: Shape

    def read(self, read: Read, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        values = read(self.stored[0], offsets, sizes).float()
        if self.block is None:
            factor = read(self.stored[1], [0] * len(self.scales_shape), self.scales_shape).float()
            return (values * factor.reshape(())).bfloat16()
        blocks = [(size, offset // size) for size, offset in zip(self.block, offsets[-2:], strict=True)]
        ends = [offset + size for offset, size in zip(offsets[-2:], sizes[-2:], strict=True)]
        counts = [-(-end // size) - first for (size, first), end in zip(blocks, ends, strict=True)]
        factors = read(self.stored[1], [*offsets[:-2], *(first for _, first in blocks)], [*sizes[:-2], *counts]).float()
        for dim, (size, first), offset, extent in zip((-2, -1), blocks, offsets[-2:], sizes[-2:], strict=True):
            factors = factors.repeat_interleave(size, dim).narrow(dim, offset - first * size, extent)
        return (values * factors).bfloat16()


@dataclass(frozen=True)
class FourBit:
    """Experts' weights [E, in, out], stored as [E, out, in / 32, 16] bytes and as exponents.

    Attributes:
        stored: See `Packed`.
        shape: See `Packed`.
    """

    stored: tuple[str, str]
    shape: Shape

    def read(self, read: Read, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        (expert, column, row), (num_experts, num_columns, num_rows) = offsets, sizes
        first = column // _GROUP
        groups = -(-(column + num_columns) // _GROUP) - first
        begins, extents = [expert, row, first], [num_experts, num_rows, groups]
        pairs = read(self.stored[0], [*begins, 0], [*extents, _GROUP // 2])
        exponents = read(self.stored[1], begins, extents).int() - 127
        numbers = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        values = torch.stack([numbers[(pairs & 15).int()], numbers[(pairs >> 4).int()]], dim=-1).flatten(-2)
        values = torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2)
        return values.narrow(-1, column - first * _GROUP, num_columns).transpose(1, 2).bfloat16()


def find_packed(
    headers: Mapping[str, tuple[Shape, Any]], weight_block_size: Sequence[int] | None
) -> tuple[dict[str, Packed], set[str]]:
    """Find the tensors that a checkpoint stores as two.

    Args:
        headers: Shape and type of each stored tensor, by name.
        weight_block_size: `quantization_config.weight_block_size` of config.json.

    Returns:
        These tensors by name, and the names of stored tensors that are no weights.
    """
    block = None if weight_block_size is None else (weight_block_size[0], weight_block_size[1])
    packed: dict[str, Packed] = {}
    for name, (shape, dtype) in headers.items():
        scales = f"{name}_scale_inv"
        if dtype in _FP8_TYPES and scales in headers:
            scales_shape = headers[scales][0]
            per_block = block if len(scales_shape) == len(shape) >= 2 else None
            packed[name] = BlockScaled((name, scales), shape, per_block, scales_shape)
        base = name.removesuffix("_blocks")
        if dtype in _BYTES and base != name and f"{base}_scales" in headers and len(shape) == 4:
            num_experts, rows, groups, _ = shape
            packed[base] = FourBit((name, f"{base}_scales"), (num_experts, groups * _GROUP, rows))
    return packed, {*_scales(packed.values()), *(name for name in headers if packed and name.endswith(_UNUSED))}


def _scales(packed: Iterable[Packed]) -> Iterable[str]:
    return (name for tensor in packed for name in tensor.stored)
