"""Checkpoint names and pieces of a family's parameters, from the conversion rules of `transformers`.

A layer's experts are one parameter in `transformers` and one tensor per expert in most checkpoints; some modules have
another name there. A refit sends the stacked experts under the checkpoint's name of their module
(`generation/vllm/stacked_experts.py` has the form); an export divides them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A checkpoint's tensor that is a part of a parameter.

    Attributes:
        name: Name in the checkpoint.
        shape: Shape in the checkpoint.
        offsets: Offsets in the parameter.
        sizes: Extent in the parameter, with a 1 for the dimension of the experts.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class HubNames:
    """The names of one family's checkpoints.

    Args:
        model_type: `model_type` of config.json.
    """

    def __init__(self, model_type: str) -> None:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

        self._renamings: list[Any] = []
        self._experts: dict[str, tuple[str, ...]] = {}  # end of a parameter's name -> ends of an expert's tensor names
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
        """Return a parameter's checkpoint name; for stacked experts their module's, followed by the parameter's own."""
        for rule in reversed(self._renamings):
            name = rule.rename_source_key(name)[0]
        return name

    def pieces(self, name: str, shape: Sequence[int]) -> list[Piece]:
        """Return the checkpoint's tensors that make up a parameter.

        Args:
            name: Name of the parameter, or the result of `of` for it.
            shape: Shape of the parameter.
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
        """Yield the checkpoint's tensors, by name, as views of a whole parameter."""
        for piece in self.pieces(name, value.shape):
            where = tuple(slice(begin, begin + size) for begin, size in zip(piece.offsets, piece.sizes, strict=True))
            yield piece.name, value[where].view(piece.shape)
