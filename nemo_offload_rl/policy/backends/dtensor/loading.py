"""Building a Hugging Face causal model without memory, and reading each rank's shard of it from the model's files."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.policy.backends.weight_files import COMPUTED, WeightFiles, check_same_tensors
from nemo_offload_rl.residency import local_tensor

_META = torch.device("meta")


def build_causal_lm(config: Any, attention: str) -> Any:
    """The model in float32 with its parameters on the meta device; buffers are on the CPU with their values.

    Args:
        config: What `load_config` gave.
        attention: What `choose_attention` gave.
    """
    with _META:
        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention
        )
    _compute_buffers(model)
    # A padding row without gradient would depend on how the vocabulary is split; padding gets no gradient anyway.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


@torch.no_grad()
def _compute_buffers(model: Any) -> None:
    """Give buffers their values, which no file has: rotary frequencies, and factors that a family multiplies by."""
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        for key, buffer in buffers.items():
            module._buffers[key] = torch.full_like(buffer, float("nan"), device="cpu")
        if buffers:
            model._init_weights(module)  # parameters are on the meta device and get none
            missing = [key for key in buffers if getattr(module, key).isnan().any()]
            assert not missing, f"transformers gives no value to {name}.{missing[0]}"


@dataclass(frozen=True)
class WeightSources:
    """Where a model's parameters are in its files.

    Attributes:
        files: The model's files.
        names: A parameter's name to that of its tensor.
        repeats: Names of tied parameters that the files have twice: first the one that is read.
    """

    files: WeightFiles
    names: Mapping[str, str]
    repeats: tuple[tuple[str, str], ...]


def find_weights(causal_lm: Any, model_name: str) -> WeightSources:
    """Look for every parameter in the headers of the model's files; reads no weights.

    Args:
        causal_lm: What `build_causal_lm` gave, not changed since.
        model_name: Folder or hub name.

    Raises:
        UserError: The files cannot be read, or their names and shapes are not those of the model.
    """
    files = WeightFiles(model_name)
    wanted = {name: tuple(parameter.shape) for name, parameter in causal_lm.named_parameters()}
    names = {name: name for name in wanted}
    found, repeats = dict(files.shapes), []
    for copied, kept in causal_lm.all_tied_weights_keys.items():
        if copied in found and kept in found:
            repeats.append((kept, copied))
        elif copied in found:
            names[kept] = copied
            found[kept] = found[copied]
        found.pop(copied, None)
    harmless = [*(causal_lm._keys_to_ignore_on_load_unexpected or ()), COMPUTED]
    check_same_tensors(model_name, wanted, found, harmless)
    return WeightSources(files, names, tuple(repeats))


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give the parameters that are on the meta device memory on `device`, without values; FSDP's shards only."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def read_weights(parameters: Iterable[tuple[str, nn.Parameter]], sources: WeightSources) -> None:
    """Read this rank's shard of each parameter; every rank calls it, and an error on one is raised on all.

    Beside the shards there is never more in host memory than a part of one tensor.

    Args:
        parameters: DTensors by the names that `find_weights` saw.
        sources: What `find_weights` gave.

    Raises:
        UserError: A file cannot be read, or tied weights differ in the files.
    """
    problem = None
    try:
        repeats = dict(sources.repeats)
        for name, parameter in parameters:
            _read(parameter, sources.names[name], repeats.get(name), sources.files)
    except UserError as error:
        problem = str(error)
    problems: list[str | None] = [problem] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    told = next((text for text in problems if text is not None), None)
    if told is not None:
        raise UserError(told)


@torch.no_grad()
def _read(parameter: nn.Parameter, name: str, repeat: str | None, files: WeightFiles) -> None:
    assert isinstance(parameter, DTensor)
    local = local_tensor(parameter.detach())
    (chunk,) = parameter.__create_chunk_list__()
    if not local.numel():
        return

    def read(tensor_name: str) -> Tensor:
        # To the device in the file's dtype: fewer bytes, and no second copy on the host.
        return files.read(tensor_name, chunk.offsets, chunk.sizes).to(local.device)

    local.copy_(read(name))
    if repeat is not None and not torch.equal(local, read(repeat).to(local.dtype)):
        raise UserError(
            f"The files of the model have {name} and {repeat} with different values, but its config ties them; set "
            "policy.hf_config_overrides.tie_word_embeddings=false to train both"
        )
