"""Hugging Face model folders: reading a config with overrides, and writing weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoConfig

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.policy.backends.model_folder import TOKENIZER_FILES
from nemo_offload_rl.policy.checkpointing import written_whole


def load_config(model_name: str, overrides: Mapping[str, Any]) -> Any:
    """The model's Hugging Face config with `policy.hf_config_overrides` applied.

    Raises:
        UserError: The config cannot be read, or an override names no key of it.
    """
    try:
        config = AutoConfig.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        raise UserError(f"The config of policy.model_name={model_name} cannot be read: {error}") from error
    known = config.to_dict()
    for key, value in overrides.items():
        if key not in known:
            raise UserError(f"policy.hf_config_overrides.{key} is no key of the config of {model_name}; remove it.")
        setattr(config, key, value)
    return config


def export_hf_folder(
    path: Path, weights: Iterable[tuple[str, Tensor]], config: Any, dtype: torch.dtype, source: str
) -> None:
    """Write config, weights in `dtype` and the tokenizer files of `source`; every rank calls it, rank 0 writes.

    Args:
        path: The folder; it appears whole.
        weights: Full tensors by Hugging Face name; every rank goes through them.
        config: The model's Hugging Face config.
        dtype: What the config says that the weights are.
        source: Folder with the tokenizer.
    """
    is_writer = dist.get_rank() == 0
    with written_whole(path) as folder:
        state = {name: value.to("cpu", dtype, copy=True).contiguous() for name, value in weights if is_writer}
        if is_writer:
            save_torch_state_dict(state, folder)
            config = type(config).from_dict({**config.to_dict(), "dtype": str(dtype).removeprefix("torch.")})
            config.save_pretrained(folder)
            for name in (*TOKENIZER_FILES, "generation_config.json"):
                if (Path(source) / name).is_file():
                    shutil.copy(Path(source) / name, folder / name)
