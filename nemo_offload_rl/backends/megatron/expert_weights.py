"""Experts of a layer as two stacked tensors for refits and exports, as in `generation/vllm/stacked_experts.py`.

Megatron-Bridge converts each expert separately: 18,432 tensors for 48 layers of 128 experts. Here one collective per
projection gathers a layer's experts. With pipeline or expert tensor parallelism, the bridge's tensors are stacked.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from nemo_offload_rl.backends.megatron import parallel

_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.(?:local_experts\.\d+\.)?(linear_fc[12])\.weight\d*$")
_STACKED = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}

type Export = Callable[[Sequence[Any]], Iterable[tuple[str, Tensor]]]
"""Converts the parameters of some of Megatron-Bridge's tasks."""


@dataclass(frozen=True)
class _Place:
    """A projection of one layer's experts.

    Attributes:
        layer: Number of the layer.
        own_name: Name in Megatron.
        stacked_name: Name in a refit.
        part_names: Suffixes of the names of one expert's tensors, in the order of their rows.
    """

    layer: int
    own_name: str
    stacked_name: str
    part_names: tuple[str, ...]


class Conversions:
    """Megatron-Bridge's conversion tasks, divided into experts and others; the same in every refit."""

    def __init__(self, tasks: Iterable[Any]) -> None:
        self.tasks = list(tasks)
        places = [_place(task) for task in self.tasks]
        self.others = [task for task, place in zip(self.tasks, places, strict=True) if place is None]
        self.places = sorted({place for place in places if place is not None}, key=lambda p: (p.layer, p.own_name))


def exported(
    chunks: Sequence[Any], conversions: Conversions, num_experts: int, export: Export
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors under their checkpoint names, with experts stacked; a collective over all ranks.

    Args:
        chunks: The model.
        conversions: Tasks for all parameters of the model.
        num_experts: Experts of a layer; 0 for a dense model.
        export: Converts the parameters of tasks one by one.
    """
    if parallel.pipeline_group().size() > 1 or parallel_state.get_expert_tensor_parallel_world_size() != 1:
        yield from _put_together(export(conversions.tasks), set(conversions.places), num_experts)
        return
    yield from export(conversions.others)
    for place in conversions.places:
        yield place.stacked_name, _gathered(chunks, place)


def _place(task: Any) -> _Place | None:
    """Return the place of a task's parameter if it belongs to an expert that is exported separately, else None."""
    found = _EXPERT.match(task.global_param_name)
    if found is None or getattr(task.mapping, "is_grouped_export", False):
        return None
    names = task.mapping.hf_param
    parts = [names["gate"], names["up"]] if isinstance(names, dict) else [names]
    stem = parts[0].partition(".experts.")[0]
    ends = tuple(part.removeprefix(f"{stem}.experts.").partition(".")[2] for part in parts)
    is_ungated = found[2] == "linear_fc1" and len(parts) == 1  # Nemotron 3
    stacked = "up_proj" if is_ungated else _STACKED[found[2]]
    return _Place(int(found[1]), found[2], f"{stem}.experts.{stacked}", ends)


@torch.no_grad()
def _gathered(chunks: Sequence[Any], place: _Place) -> Tensor:
    """Return the experts of all expert-parallel ranks, [E, rows, columns]."""
    (chunk,) = chunks
    model: Any = unwrap_model(chunk)
    experts = model.decoder.layers[place.layer].mlp.experts
    local = getattr(experts, "local_experts", None)
    if local is None:
        layer = getattr(experts, place.own_name)
        mine = [getattr(layer, f"weight{index}") for index in range(layer.num_gemms)]
    else:
        mine = [getattr(expert, place.own_name).weight for expert in local]
    mine_EIO, group = torch.stack([weight.detach() for weight in mine]), parallel.expert_parallel_group()
    if group.size() == 1:
        return mine_EIO
    whole = mine_EIO.new_empty(group.size() * len(mine_EIO), *mine_EIO.shape[1:])
    dist.all_gather_into_tensor(whole, mine_EIO, group=group)
    return whole


def _put_together(
    weights: Iterable[tuple[str, Tensor]], places: set[_Place], num_experts: int
) -> Iterator[tuple[str, Tensor]]:
    """Stack the tensors of single experts; yield other tensors unchanged."""
    wanted = {
        f"{stem}.experts.{expert}.{part}": (place, expert, row)
        for place in places
        for stem in [place.stacked_name.partition(".experts.")[0]]
        for expert in range(num_experts)
        for row, part in enumerate(place.part_names)
    }
    stacks: dict[_Place, tuple[Tensor, set[tuple[int, int]]]] = {}
    for name, tensor in weights:
        if name not in wanted:
            yield name, tensor
            continue
        place, expert, row = wanted[name]
        rows = len(tensor)
        if place not in stacks:
            shape = (num_experts, len(place.part_names) * rows, *tensor.shape[1:])
            stacks[place] = (tensor.new_empty(shape), set())
        stack, seen = stacks[place]
        stack[expert, row * rows : (row + 1) * rows] = tensor
        seen.add((expert, row))
        if len(seen) == num_experts * len(place.part_names):
            yield place.stacked_name, stacks.pop(place)[0]
