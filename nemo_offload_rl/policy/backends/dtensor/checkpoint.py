"""Checkpoints of the DTensor backend (torch.distributed.checkpoint) and exports to a Hugging Face folder.

A checkpoint appears under its name whole or not at all: ranks write beside it, and rank 0 renames when all are done.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.policy.backends.model_folder import TOKENIZER_FILES

logger = logging.getLogger(__name__)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A folder for all ranks to write to, renamed to `path` by rank 0 after the last rank has finished."""
    partial = path.with_name(path.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    yield partial
    dist.barrier()
    if dist.get_rank() == 0:
        if path.exists():
            replaced = path.with_name(path.name + ".replaced")
            path.rename(replaced)
            partial.rename(path)
            shutil.rmtree(replaced)
        else:
            partial.rename(path)
    dist.barrier()


def _rng_key() -> str:
    return f"rng/{dist.get_rank()}"


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    state = {f"{_rng_key()}/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"{_rng_key()}/cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[f"{_rng_key()}/cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[f"{_rng_key()}/cuda"], device)


def _optimizer_entries(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    entries = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                entries[f"optimizer/{names[parameter]}/{key}"] = value
    return entries


def _make_optimizer_state(optimizer: Optimizer) -> None:
    """Have the optimizer allocate its state, by a step that changes nothing; its values are read from disk next."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _param_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def save_state(
    path: Path, parameters: list[tuple[str, nn.Parameter]], optimizer: Optimizer, scheduler: LRScheduler | None
) -> None:
    """Write parameters, optimizer, schedule and this rank's random state; every rank calls it."""
    device = parameters[0][1].device
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters}
    state: dict[str, Any] = {f"model/{name}": parameter.detach() for name, parameter in parameters}
    state |= _optimizer_entries(optimizer, names) | _rng_state(device)
    state["param_groups"] = _param_groups(optimizer)
    state["scheduler"] = scheduler.state_dict() if scheduler else None
    with written_whole(path) as folder:
        save(state, checkpoint_id=folder)


def load_state(
    path: Path, parameters: list[tuple[str, nn.Parameter]], optimizer: Optimizer, scheduler: LRScheduler | None
) -> None:
    """Read what `save_state` wrote into the tensors that exist already; every rank calls it.

    Raises:
        UserError: `path` holds no checkpoint, or one of another model or optimizer.
    """
    if not (path / ".metadata").is_file():
        raise UserError(f"{path} holds no policy checkpoint (it has no .metadata); give another folder.")
    saved = set(FileSystemReader(path).read_metadata().state_dict_metadata)
    device = parameters[0][1].device
    if any(key.startswith("optimizer/") for key in saved):
        _make_optimizer_state(optimizer)
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters}
    state: dict[str, Any] = {f"model/{name}": parameter.detach() for name, parameter in parameters}
    state |= _optimizer_entries(optimizer, names)
    missing = sorted(key for key in state if key not in saved)
    if missing:
        raise UserError(
            f"The checkpoint {path} has no {missing[0]} ({len(missing)} of {len(state)} tensors are missing); it "
            "belongs to another model or optimizer."
        )
    has_rng = f"{_rng_key()}/cpu" in saved
    if has_rng:
        state |= _rng_state(device)
    else:
        logger.warning("checkpoint %s has no random state for rank %d; it keeps its seed", path, dist.get_rank())
    state |= {"param_groups": _param_groups(optimizer), "scheduler": scheduler.state_dict() if scheduler else None}
    load(state, checkpoint_id=path)
    for group, values in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(values)
    if scheduler is not None and state["scheduler"] is not None:
        scheduler.load_state_dict(state["scheduler"])
    if has_rng:
        _set_rng_state(state, device)


def full_tensor(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor in `dtype`; a collective for a DTensor. Cast before the gather, which then moves fewer bytes."""
    value = parameter.detach().to(dtype)
    return value.full_tensor() if isinstance(value, DTensor) else value


def export_hf_folder(
    path: Path, parameters: list[tuple[str, nn.Parameter]], config: Any, dtype: torch.dtype, source: str
) -> None:
    """Write config, weights in `dtype` and the tokenizer files of `source`; every rank calls it, rank 0 writes."""
    is_writer = dist.get_rank() == 0
    with written_whole(path) as folder:
        weights = {}
        for name, parameter in parameters:
            value = full_tensor(parameter, dtype)
            if is_writer:
                weights[name] = value.to("cpu", copy=True).contiguous()
        if is_writer:
            save_torch_state_dict(weights, folder)
            config = type(config).from_dict({**config.to_dict(), "dtype": str(dtype).removeprefix("torch.")})
            config.save_pretrained(folder)
            for name in (*TOKENIZER_FILES, "generation_config.json"):
                if (Path(source) / name).is_file():
                    shutil.copy(Path(source) / name, folder / name)
