"""How a family's checkpoints name and divide what `transformers` has as one parameter, as `transformers` itself says.

Experts of a layer are one parameter here and one tensor each in most checkpoints; some modules have other names there.
Between policy and engine experts travel stacked under the checkpoint's name of the module
(`generation/vllm/stacked_experts.py` has the form); an export divides them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint, as a part of a parameter.

    Attributes:
        name: In the checkpoint.
        shape: There.
        offsets: Where it begins in the parameter.
        sizes: Its extent there, with a 1 for the dimension of the experts.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class HubNames:
    """The names of one family's checkpoints.

    Args:
        model_type: As config.json has it.
    """

    def __init__(self, model_type: str) -> None:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

        self._renamings: list[Any] = []
        self._experts: dict[str, tuple[str, ...]] = {}  # end of a parameter's name to those of an expert's tensors
        for rule in get_checkpoint_conversion_mapping(model_type) or ():
            if not isinstance(rule, WeightConverter):
                self._renamings.append(rule.reverse_transform())
                continue
            kinds = [type(operation) for operation in rule.operations]
            assert kinds in ([MergeModulelist], [MergeModulelist, Concatenate]), f"{model_type}: {rule}"
            (stacked,) = rule.target_patterns
            ends = (pattern[pattern.index(".experts.") :] for pattern in rule.source_patterns)
            self._experts[stacked[stacked.index(".experts.") :]] = tuple(ends)

    def of(self, name: str) -> str:
        """The checkpoint's name of a parameter; of stacked experts that of their module, and the parameter's own."""
        for rule in reversed(self._renamings):
            name = rule.rename_source_key(name)[0]
        return name

    def pieces(self, name: str, shape: Sequence[int]) -> list[Piece]:
        """The tensors that a parameter consists of.

        Args:
            name: Of the parameter, or what `of` gave for it.
            shape: Of the parameter.
        """
        place, end, own_name = self.of(name).partition(".experts.")
        ends = self._experts.get(end + own_name)
        if ends is None:
            return [Piece(self.of(name), tuple(shape), (0,) * len(shape), tuple(shape))]
        num_experts, num_rows, *rest = shape
        rows = num_rows // len(ends)
        return [
            Piece(place + part.replace("*", str(expert)), (rows, *rest), (expert, index * rows, 0), (1, rows, *rest))
            for expert in range(num_experts)
            for index, part in enumerate(ends)
        ]

    def divided(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a checkpoint, views, that a whole parameter makes."""
        for piece in self.pieces(name, value.shape):
            where = tuple(slice(begin, begin + size) for begin, size in zip(piece.offsets, piece.sizes, strict=True))
            yield piece.name, value[where].view(piece.shape)
