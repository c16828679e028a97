"""That a model takes over its folder whole: every tensor of the folder has a place in it, and it needs no other.

Megatron-Bridge 0.6.2 warns of a tensor that it cannot find, leaves the parameter as memory happened to be, and says
nothing of tensors that it does not ask for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.policy.backends.base import WeightSpec
from nemo_offload_rl.policy.backends.megatron import parallel

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# Buffers that old releases of transformers saved; it computes them anew.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
_ROWS = 8192  # of an embedding that are compared at a time


class ModelFolder:
    """Names and shapes of the tensors in a model's safetensors files, from their headers.

    Args:
        source: Megatron-Bridge's view of the files, which says where a name is.
        model_name: `policy.model_name`, for messages.

    Raises:
        UserError: The files cannot be read, or there are none.
    """

    def __init__(self, source: Any, model_name: str) -> None:
        self.model_name = model_name
        files: dict[Path, list[str]] = {}
        try:
            for name, file in source.key_to_filename_map.items():
                files.setdefault(Path(source.path) / file, []).append(name)
            self._file_of = {
                name: file for file, names in files.items() for name in names if not _COMPUTED.search(name)
            }
            self.shapes = dict(_shapes(files))
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(
                f"The weights of policy.model_name={model_name} cannot be read ({error}); repair or replace its "
                "safetensors files."
            ) from error
        if not self.shapes:
            raise UserError(
                f"policy.model_name={model_name} has no safetensors files, which are all that the Megatron backend "
                "reads; save the model anew with save_pretrained, or use policy.dtensor_cfg."
            )

    def check_tied(self) -> None:
        """Refuse an output layer that differs from the embeddings though the config ties them.

        Raises:
            UserError: They differ.
        """
        if {EMBEDDING, OUTPUT} <= self._file_of.keys() and not self._are_equal(EMBEDDING, OUTPUT):
            raise UserError(
                f"policy.model_name={self.model_name} has tie_word_embeddings true, but its {OUTPUT} differs from its "
                f"{EMBEDDING}; set +policy.hf_config_overrides.tie_word_embeddings=false to train both, or remove one."
            )

    def _are_equal(self, left: str, right: str) -> bool:
        if self.shapes[left] != self.shapes[right]:
            return False
        with safe_open(self._file_of[left], "pt") as one, safe_open(self._file_of[right], "pt") as other:
            first, second = one.get_slice(left), other.get_slice(right)
            starts = range(0, self.shapes[left][0], _ROWS)
            return all(torch.equal(first[start : start + _ROWS], second[start : start + _ROWS]) for start in starts)


def _shapes(files: Mapping[Path, Iterable[str]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file, names in files.items():
        with safe_open(file, "pt") as opened:
            for name in names:
                if not _COMPUTED.search(name):
                    yield name, tuple(opened.get_slice(name).get_shape())


def check_names(folder: ModelFolder, tasks: Sequence[Any], *, is_tied: bool) -> None:
    """Refuse a folder that lacks a tensor of the model or has one more; every rank calls it, before weights are loaded.

    Args:
        folder: The folder.
        tasks: Megatron-Bridge's conversions of this rank, None for a parameter that it has no name for.
        is_tied: The output layer is the embeddings.

    Raises:
        UserError: With the first name that differs and their number.
    """
    mine = {name for task in tasks if task is not None for name in _names(task.mapping.hf_param)}
    group = parallel.expert_parallel_group()
    everyones: list[set[str]] = [mine] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    wanted = set[str]().union(*everyones)
    if is_tied and OUTPUT in folder.shapes:
        folder.check_tied()
        wanted.add(OUTPUT)
    _refuse_difference(folder, wanted)
    if None in tasks:
        raise UserError(
            f"policy.model_name={folder.model_name} makes {tasks.count(None)} parameters that Megatron-Bridge does not "
            "know in a Hugging Face folder; use policy.dtensor_cfg, or another model."
        )


def check_shapes(folder: ModelFolder, exported: Iterable[WeightSpec]) -> None:
    """Refuse a model whose export differs from its folder in a name or a shape.

    Raises:
        UserError: With the first tensor that differs.
    """
    shapes = {spec.name: spec.shape for spec in exported if not _COMPUTED.search(spec.name)}
    _refuse_difference(folder, shapes.keys())
    for name, shape in folder.shapes.items():
        if shapes[name] != shape:
            raise UserError(
                f"policy.model_name={folder.model_name} has {name} with the shape {list(shape)}, and its config.json "
                f"makes one of {list(shapes[name])}; repair config.json or policy.hf_config_overrides."
            )


def _refuse_difference(folder: ModelFolder, wanted: Iterable[str]) -> None:
    missing, unexpected = sorted(set(wanted) - folder.shapes.keys()), sorted(folder.shapes.keys() - set(wanted))
    if missing:
        raise UserError(
            f"policy.model_name={folder.model_name} lacks {missing[0]}, as {len(missing)} tensors that its config.json "
            "asks for; complete the folder, or repair config.json."
        )
    if unexpected:
        raise UserError(
            f"policy.model_name={folder.model_name} has {unexpected[0]}, as {len(unexpected)} tensors that the "
            "Megatron backend has no place for and would leave out; use policy.dtensor_cfg, or repair config.json."
        )


def _names(hf_param: str | Mapping[str, str]) -> Iterable[str]:
    return [hf_param] if isinstance(hf_param, str) else hf_param.values()
