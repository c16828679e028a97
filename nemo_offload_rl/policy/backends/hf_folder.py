"""Hugging Face model folders: reading a config with overrides, and writing weights beside what loads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from nemo_offload_rl.data.config import TokenizerConfig
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.models.rope import has_rotary_base
from nemo_offload_rl.policy.backends.base import COMPUTE_DTYPES
from nemo_offload_rl.policy.backends.hub_names import HubNames
from nemo_offload_rl.policy.backends.model_folder import TOKENIZER_FILES, find_file
from nemo_offload_rl.policy.checkpointing import written_whole
from nemo_offload_rl.policy.settings import PolicySettings

MAX_FILE_BYTES = 5 * 10**9  # of one file of an export, as the hub's own writer has it
_TEMPLATE_FILE, _TEMPLATE_KEY = "chat_template.jinja", "chat_template"


def load_config(model_name: str, overrides: Mapping[str, Any]) -> Any:
    """The model's Hugging Face config with `policy.hf_config_overrides` applied, as vLLM applies its `hf_overrides`.

    Raises:
        UserError: The config cannot be read, or an override names no key of it or leaves the rotary base out.
    """
    try:
        config = AutoConfig.from_pretrained(model_name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())  # of the model library, over several lines
        raise UserError(f"The config of policy.model_name={model_name} cannot be read: {reason}") from error
    known = config.to_dict()
    for key, value in overrides.items():
        if key not in known or key == "model_type":
            raise UserError(f"policy.hf_config_overrides.{key} is no key of the config of {model_name}; remove it.")
        setattr(config, key, value)
    if "rope_parameters" in overrides and not has_rotary_base(overrides["rope_parameters"]):
        raise UserError(
            "policy.hf_config_overrides.rope_parameters replaces all of the model's, and has no rope_theta; add it "
            f"({known['rope_parameters']['rope_theta']:g} in config.json)"
        )
    return config


def export_hf_folder(path: Path, weights: Iterable[tuple[str, Tensor]], config: Any, settings: PolicySettings) -> None:
    """Write config, weights and the tokenizer of the run; every rank calls it, rank 0 writes.

    Rank 0 never has more of the weights in host memory than one file.

    Args:
        path: The folder; it appears whole.
        weights: Full tensors by Hugging Face name as they are written, experts stacked or not; every rank goes through
            them.
        config: The model's Hugging Face config.
        settings: Model, tokenizer, and the precision in which weights are written.
    """
    dtype = COMPUTE_DTYPES[settings.precision]
    is_writer, hub = dist.get_rank() == 0, HubNames(config.model_type)
    with written_whole(path) as folder:
        files = _WeightWriter(folder)
        for name, value in weights:
            if is_writer:
                for own_name, part in hub.divided(name, value):
                    files.add(own_name, part.to("cpu", copy=True).contiguous())
        if is_writer:
            files.close()
            config = type(config).from_dict({**config.to_dict(), "dtype": str(dtype).removeprefix("torch.")})
            config.save_pretrained(folder)
            if (generation := find_file(settings.model_name, "generation_config.json")) is not None:
                shutil.copy(generation, folder)
            export_tokenizer(settings.tokenizer, folder)


class _WeightWriter:
    """Writes tensors into safetensors files of at most `MAX_FILE_BYTES`, each as soon as it is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # by file
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor that nothing else writes to."""
        held_bytes = sum(held.nbytes for held in self._tensors.values())
        if self._tensors and held_bytes + tensor.nbytes > MAX_FILE_BYTES:
            self._write()
        self._tensors[name] = tensor
        self._total_bytes += tensor.nbytes

    def close(self) -> None:
        """Write the rest, give the files their names, and write the index if there are several."""
        self._write()
        if len(self._names) == 1:
            self._unnamed(0).rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for index, names in enumerate(self._names):
            file = f"model-{index + 1:05d}-of-{len(self._names):05d}.safetensors"
            self._unnamed(index).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _write(self) -> None:
        save_file(self._tensors, self._unnamed(len(self._names)), metadata={"format": "pt"})
        self._names.append(list(self._tensors))
        self._tensors = {}

    def _unnamed(self, index: int) -> Path:
        return self._folder / f"{index}.safetensors"


def export_tokenizer(settings: TokenizerConfig, folder: Path) -> None:
    """Write the tokenizer that the run uses: its own files as they are, with the run's chat template.

    Args:
        settings: `name` is a folder or a hub's name.
        folder: Where the files go.

    Raises:
        UserError: A file of a hub's tokenizer cannot be fetched.
    """
    tokenizer = load_tokenizer(settings)
    for name in sorted({*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()}):
        if (file := find_file(settings.name, name)) is not None:
            shutil.copy(file, folder / name)
    if settings.chat_template is None:
        return
    (folder / _TEMPLATE_FILE).write_text(str(tokenizer.chat_template), encoding="utf-8")
    config_file = folder / "tokenizer_config.json"
    if config_file.is_file():
        config = json.loads(config_file.read_text(encoding="utf-8"))
        config.pop(_TEMPLATE_KEY, None)
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
