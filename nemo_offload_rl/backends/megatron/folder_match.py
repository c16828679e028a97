"""Checks that a model and its folder have the same tensors.

Megatron-Bridge 0.6.2 only warns of a missing tensor, leaves its parameter uninitialized, and ignores unknown tensors.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_offload_rl.backends.hf.weight_files import (
    COMPUTED,
    HubNames,
    LanguageModelFiles,
    WeightFiles,
    fault_in,
)
from nemo_offload_rl.backends.megatron import parallel
from nemo_offload_rl.backends.ranks import failing_together
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.protocols.backend import WeightSpec

logger = logging.getLogger(__name__)

_ROWS = 8192  # rows of an embedding that are compared at a time


class ModelFolder:
    """Names and shapes of the tensors in a model's safetensors files, from their headers.

    Args:
        source: Megatron-Bridge's view of the files; the bridge decides which files it reads.
        model_name: `policy.model_name`.
        tied: Names of the output layer's and the embeddings' weight if the config ties them, else None.
        left_out: Layers whose tensors are ignored, like those of `mtp.`.
        other: Section of another backend that trains such models; None if there is none.
        language: Config of the language model in a folder that reads images too; None for a folder of text alone.

    Attributes:
        model_name: `policy.model_name`.
        files: The files.
        shapes: Shape of each tensor that the model may have.
        or_other: Advice to use another backend, for messages.

    Raises:
        UserError: The files cannot be read, or there are none.
    """

    def __init__(
        self,
        source: Any,
        model_name: str,
        tied: tuple[str, str] | None,
        left_out: range = range(0),
        other: str | None = None,
        language: Any = None,
    ) -> None:
        self.model_name = model_name
        self.or_other = "" if other is None else f", or use {other}"
        paths = sorted({Path(source.path) / file for file in source.key_to_filename_map.values()})
        if not paths:
            raise UserError(
                f"policy.model_name={model_name} has no safetensors files, and the Megatron backend reads "
                f"no others; save the model again with save_pretrained{self.or_other}"
            )
        self.files: WeightFiles | LanguageModelFiles = WeightFiles(model_name, paths)
        if language is not None:
            self.files = LanguageModelFiles(self.files, language.model_type, language.hidden_size)
        places = ("mtp.", *(f"model.layers.{layer}." for layer in left_out))
        if any(name.startswith(places) for name in self.files.shapes):
            logger.warning(
                "policy.model_name=%s: its layers for multi-token prediction are not trained, and exports lack them",
                model_name,
            )
        self.shapes = {
            name: shape
            for name, shape in self.files.shapes.items()
            if not re.search(COMPUTED, name) and not name.startswith(places)
        }
        self._tied = tied

    def tied_copies(self) -> set[str]:
        """Return the name of a tied output layer if the files have a copy of it.

        Raises:
            UserError: The copy differs from the embeddings.
        """
        if self._tied is None or self._tied[0] not in self.shapes:
            return set()
        output, embedding = self._tied
        if embedding in self.shapes and not self._are_equal(output, embedding):
            raise UserError(
                f"policy.model_name={self.model_name} has tie_word_embeddings true, but its {output} differs from its "
                f"{embedding}; set +policy.hf_config_overrides.tie_word_embeddings=false to train both, or remove one."
            )
        return {output}

    def _are_equal(self, left: str, right: str) -> bool:
        if self.shapes[left] != self.shapes[right]:
            return False
        num_rows, width = self.shapes[left]
        parts = ((start, min(_ROWS, num_rows - start)) for start in range(0, num_rows, _ROWS))
        return all(
            torch.equal(*(self.files.read(name, (start, 0), (rows, width)) for name in (left, right)))
            for start, rows in parts
        )

    def refuse_values(self, name: str) -> None:
        """Read a whole tensor, to refuse values that a weight cannot have.

        Raises:
            UserError: The tensor has such a value; the message names the tensor and its file.
        """
        self.files.read_whole(name)


def check_values(folder: ModelFolder, tasks: Sequence[Any]) -> None:
    """Refuse values that a weight cannot have; every rank calls this after loading.

    Loaded parameters are checked on their device. Only tensors of a faulty parameter are read from the folder again.

    Raises:
        UserError: A value is refused; raised on every rank, with tensor and file.
    """
    with failing_together(UserError):
        for task in tasks:
            if task is not None and task.param_weight is not None:
                _check_value(folder, task)


def _check_value(folder: ModelFolder, task: Any) -> None:
    fault = fault_in(task.param_weight.detach())
    if fault is None:
        return
    for name in _names(task.mapping.hf_param):
        if name in folder.shapes:
            folder.refuse_values(name)
    raise UserError(
        f"The weights of policy.model_name={folder.model_name} become {fault} in {task.param_name}, since "
        f"{task.param_weight.dtype} has too small a range; use policy.precision=bfloat16"
    )


def check_names(folder: ModelFolder, tasks: Sequence[Any]) -> None:
    """Refuse a folder with missing or additional tensors; every rank calls this before loading.

    Args:
        folder: The folder.
        tasks: Megatron-Bridge's conversions of this rank; None for a parameter without a name in the folder.

    Raises:
        UserError: Names differ; the message has the first one and their number.
    """
    mine = {name for task in tasks if task is not None for name in _names(task.mapping.hf_param)}
    group = parallel.expert_parallel_group()
    everyones: list[set[str]] = [mine] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    wanted = folder.tied_copies().union(*everyones)
    _refuse_difference(folder, wanted)
    if None in tasks:
        raise UserError(
            f"policy.model_name={folder.model_name} has {tasks.count(None)} parameters for which Megatron-Bridge "
            f"has no Hugging Face name; use another model{folder.or_other}"
        )


def check_shapes(folder: ModelFolder, exported: Iterable[WeightSpec], model_type: str) -> None:
    """Refuse a model whose export differs from its folder in a name or a shape.

    Args:
        folder: The folder.
        exported: Specs of the exported tensors, experts stacked or not.
        model_type: `model_type` of config.json.

    Raises:
        UserError: A tensor differs; the message has the first one.
    """
    hub = HubNames(model_type)
    pieces = (piece for spec in exported for piece in hub.pieces(spec.name, spec.shape))
    shapes = {piece.name: piece.shape for piece in pieces if not re.search(COMPUTED, piece.name)}
    _refuse_difference(folder, shapes.keys())
    for name, shape in folder.shapes.items():
        if shapes[name] != shape:
            raise UserError(
                f"policy.model_name={folder.model_name} has {name} with the shape {list(shape)}, but its config.json "
                f"asks for {list(shapes[name])}; correct config.json or policy.hf_config_overrides"
            )


def _refuse_difference(folder: ModelFolder, wanted: Iterable[str]) -> None:
    missing, unexpected = sorted(set(wanted) - folder.shapes.keys()), sorted(folder.shapes.keys() - set(wanted))
    if missing:
        raise UserError(
            f"policy.model_name={folder.model_name} lacks {len(missing)} tensors that its config.json asks for, first "
            f"{missing[0]}; complete the folder, or correct config.json"
        )
    if unexpected:
        raise UserError(
            f"policy.model_name={folder.model_name} has {len(unexpected)} tensors that the Megatron backend cannot "
            f"load, first {unexpected[0]}; correct config.json{folder.or_other}"
        )


def _names(hf_param: str | Mapping[str, str]) -> Iterable[str]:
    return [hf_param] if isinstance(hf_param, str) else hf_param.values()
