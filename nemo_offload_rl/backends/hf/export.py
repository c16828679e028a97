"""Hugging Face model folders: reads a config with overrides, and writes config, weights and tokenizer."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nemo_offload_rl.backends.hf.model_folder import (
    TOKENIZER_FILES,
    find_file,
    plain_number,
    read_model_config,
    read_whole_config,
)
from nemo_offload_rl.backends.hf.weight_files import HubNames, WeightFiles, in_order_of
from nemo_offload_rl.backends.saving.folders import written_whole
from nemo_offload_rl.data.tokenizer import load_tokenizer, template_text
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.keys.data import TokenizerConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.models.families import quantization_problem, unread_tensors
from nemo_offload_rl.models.rope import has_rotary_base, older_rope_keys, with_published_factor
from nemo_offload_rl.models.towers import (
    MODULES,
    PART_OF,
    PROCESSOR_FILES,
    WHOLE_MODELS,
    is_of_towers,
    place_in_whole,
    placed,
    whole_config,
)
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES
from nemo_offload_rl.utils.liveness import show_progress

ADAPTER = "adapter"
"""Name of the folder with a model's adapters, in the folder of the merged model."""

MAX_FILE_BYTES = 5 * 10**9  # of one file of an export, as in the hub's own writer
_TEMPLATE_FILE, _TEMPLATES_FOLDER = "chat_template.jinja", "additional_chat_templates"
_EXTRA_LAYERS = "num_nextn_predict_layers"
_DERIVED = ("num_hidden_layers", "hybrid_override_pattern")  # properties of Nemotron-H's config, keys in older versions
_TOKENIZER_CONFIG, _TEMPLATE_KEY = "tokenizer_config.json", "chat_template"


def load_config(model_name: str, overrides: Mapping[str, Any]) -> Any:
    """Load the model's Hugging Face config and apply `policy.hf_config_overrides` as the engine does.

    Rotary embeddings get their published attention factor, even if only keys that engines alone read give it. Weights
    in 8 or 4 bits are read as bfloat16 (see `WeightFiles`), so the config loses its `quantization_config`. Of a folder
    that reads images too, it is the language model's.

    Raises:
        UserError: The config cannot be read, the weights are quantized in a way that cannot be read, or an override
            names an unknown key or leaves out the rotary base.
    """
    try:
        config = AutoConfig.from_pretrained(model_name)
        if PART_OF in (language := read_model_config(model_name) if config.model_type in WHOLE_MODELS else {}):
            config = CONFIG_MAPPING[language["model_type"]].from_dict(language)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())  # the model library's message has several lines
        raise UserError(
            f"The config of policy.model_name={model_name} cannot be read: {reason}; correct it, or use another model"
        ) from error
    known = config.to_dict()
    if (problem := quantization_problem(known)) is not None:
        raise UserError(f"policy.model_name={model_name} has {problem}; use another folder of the model")
    config.__dict__.pop("quantization_config", None)
    for key, value in overrides.items():
        if key not in known or key in ("model_type", PART_OF):
            raise UserError(f"policy.hf_config_overrides.{key} is not a key of the config of {model_name}; remove it")
        setattr(config, key, value)
    if "rope_parameters" in overrides and not has_rotary_base(overrides["rope_parameters"]):
        raise UserError(
            "policy.hf_config_overrides.rope_parameters replaces all of the model's, but has no rope_theta; add it "
            f"({known['rope_parameters']['rope_theta']:g} in config.json)"
        )
    if (rope := with_published_factor(config.to_dict())) is not None:
        config.rope_parameters = rope
    return config


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters to export.

    Attributes:
        weights: `LAYER.lora_A.weight` [rank, in] and `LAYER.lora_B.weight` [out, rank]; every rank iterates.
        dim: The rank.
        alpha: The product of both is scaled by alpha / dim.
        dropout: Dropout probability in training.
    """

    weights: Iterable[tuple[str, Tensor]]
    dim: int
    alpha: int
    dropout: float

    def scaled(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in float32, each B times alpha / dim, as refits send them; a collective."""
        for name, weight in self.weights:
            is_second = name.endswith(".lora_B.weight")
            yield name, weight.float() * (self.alpha / self.dim) if is_second else weight.float()


def export_hf_folder(
    path: Path,
    weights: Iterable[tuple[str, Tensor]],
    config: Any,
    settings: PolicySettings,
    adapters: Adapters | None = None,
) -> None:
    """Write config, weights and tokenizer of the run; every rank calls it, rank 0 writes.

    Rank 0 holds at most one file's weights in host memory. What the model's folder has besides the language model is
    copied, in the type that it has there.

    Args:
        path: The folder; it appears when complete.
        weights: Full tensors by Hugging Face name, in the type to write, experts stacked or not; every rank iterates.
        config: The model's Hugging Face config.
        settings: Model, tokenizer, and the precision for config.json.
        adapters: Adapters, which `weights` have merged, to write in peft's format to the folder `adapter`.
    """
    dtype = COMPUTE_DTYPES[settings.precision]
    is_writer, is_part = dist.get_rank() == 0, hasattr(config, PART_OF)
    unread = unread_tensors(config.to_dict())
    source = WeightFiles(settings.model_name) if is_part or unread is not None else None
    place = place_in_whole(source.shapes) if source is not None and is_part else {}
    hub = HubNames(config.model_type, place)
    with written_whole(path) as folder:
        files = _WeightWriter(folder)
        for name, value in weights:
            if is_writer:
                is_stacked = source is not None and is_part and hub.of(name) in source.shapes
                if source is not None and is_stacked:
                    value = in_order_of(source.shapes[hub.of(name)], value)
                for own_name, part in [(hub.of(name), value)] if is_stacked else hub.divided(name, value):
                    files.add(own_name, part.to("cpu", copy=True).contiguous())
        if is_writer:
            if source is not None:
                for name in source.shapes:
                    if (is_part and is_of_towers(name, place)) or (unread is not None and re.search(unread, name)):
                        files.add(name, source.read_whole(name).clone())
            if is_part:
                files.close()
                _export_whole_config(config, settings, folder)
            else:
                files.close()
                export_config(config, dtype, files.names, folder)
            if (generation := find_file(settings.model_name, "generation_config.json")) is not None:
                shutil.copyfile(generation, folder / generation.name)
            export_tokenizer(settings.tokenizer, folder)
        if adapters is not None:
            held = {
                placed(name, MODULES if is_part else {}): value.to("cpu", copy=True).contiguous()
                for name, value in adapters.weights
                if is_writer
            }
            if is_writer:
                _export_adapters(folder / ADAPTER, held, adapters, files.names, settings.model_name)


def _export_whole_config(config: Any, settings: PolicySettings, folder: Path) -> None:
    """Write the original folder's config.json with the changes to its language model, and copy its processor's files.

    Args:
        config: The language model's.
        settings: The model's folder, overrides and precision.
        folder: Folder for the files.
    """
    changes = dict(settings.hf_config_overrides)
    if with_published_factor(read_model_config(settings.model_name) | changes) is not None:
        changes["rope_parameters"] = config.rope_parameters
    dtype = str(COMPUTE_DTYPES[settings.precision]).removeprefix("torch.")
    written = whole_config(read_whole_config(settings.model_name), changes, dtype)
    text = json.dumps(written, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    for name in PROCESSOR_FILES:
        if (file := find_file(settings.model_name, name)) is not None:
            shutil.copyfile(file, folder / name)


def _export_adapters(
    folder: Path, weights: Mapping[str, Tensor], adapters: Adapters, model_weights: Iterable[str], model_name: str
) -> None:
    """Write adapters as `peft.PeftModel.from_pretrained` and vLLM read them."""
    from peft import LoraConfig

    adapted = {name.removesuffix(".lora_A.weight") for name in weights if name.endswith(".lora_A.weight")}
    last_names = {name.rpartition(".")[2] for name in adapted}
    layers = {name.removesuffix(".weight") for name in model_weights}
    others = {layer for layer in layers - adapted if layer.rpartition(".")[2] in last_names}
    config = LoraConfig(
        r=adapters.dim,
        lora_alpha=adapters.alpha,
        lora_dropout=adapters.dropout,
        target_modules=sorted(adapted if others else last_names),
        base_model_name_or_path=model_name,
        inference_mode=True,
        task_type="CAUSAL_LM",
    )
    folder.mkdir()
    config.save_pretrained(str(folder))
    _save({f"base_model.model.{name}": value for name, value in weights.items()}, folder / "adapter_model.safetensors")


def export_config(config: Any, dtype: torch.dtype, weights: Iterable[str], folder: Path) -> None:
    """Write config.json for transformers 5 and older versions: each renamed key appears under both names.

    Without the older names, `transformers` 4 silently reads `rope_theta` as 10000. Infinite numbers are written as
    published folders have them (Nemotron-H), which `transformers` 4 reads.

    Args:
        config: The model's Hugging Face config.
        dtype: Type of the exported weights.
        weights: Names of the exported weights. Layers for multi-token prediction are not trained; if none is among
            them, the config declares none.
        folder: Folder for the file.
    """
    name = str(dtype).removeprefix("torch.")
    changed = {**config.to_dict(), "dtype": name}
    if changed.get(_EXTRA_LAYERS) and not any(f"layers.{config.num_hidden_layers}." in weight for weight in weights):
        changed[_EXTRA_LAYERS] = 0
    config = type(config).from_dict(changed)
    config.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"), object_hook=plain_number)
    other_names = {old: written[new] for old, new in config.attribute_map.items() if new in written}
    derived = {key: getattr(config, key) for key in _DERIVED if key not in written and hasattr(config, key)}
    older = {"torch_dtype": name, **other_names, **derived, **older_rope_keys(written)}
    again = type(config).from_dict(deepcopy({**older, **written}))  # from_dict changes its argument
    if again.to_dict().get("rope_parameters") != config.to_dict().get("rope_parameters"):
        del older["rope_scaling"]  # most families of transformers 5 apply it to all layer types
    path.write_text(json.dumps({**older, **written}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class _WeightWriter:
    """Writes tensors into safetensors files of at most `MAX_FILE_BYTES`, each once it is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # by file
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; nobody may change it afterwards."""
        held_bytes = sum(held.nbytes for held in self._tensors.values())
        if self._tensors and held_bytes + tensor.nbytes > MAX_FILE_BYTES:
            self._write()
        self._tensors[name] = tensor
        self._total_bytes += tensor.nbytes

    @property
    def names(self) -> list[str]:
        """Names of the tensors, complete after `close`."""
        return [name for names in self._names for name in names]

    def close(self) -> None:
        """Write the last file, give all files their names, and write the index if there are several."""
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
        show_progress()
        path = self._unnamed(len(self._names))
        _save(self._tensors, path)
        self._names.append(list(self._tensors))
        self._tensors = {}

    def _unnamed(self, index: int) -> Path:
        return self._folder / f"{index}.safetensors"


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors renames a temporary file that only its owner may read


def export_tokenizer(settings: TokenizerConfig, folder: Path) -> None:
    """Write the run's tokenizer: its own files unchanged, with the run's chat template.

    All of its named templates are written, unless `settings` has a template, which the run then used for everything.

    Args:
        settings: `name` is a folder or a hub's name.
        folder: Folder for the files.

    Raises:
        UserError: A file of a hub's tokenizer cannot be fetched.
    """
    tokenizer = load_tokenizer(settings)
    for name in sorted({*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()}):
        if (file := find_file(settings.name, name)) is not None:
            shutil.copyfile(file, folder / name)
    if (own_template := template_text(settings.chat_template)) is None:
        config_file = find_file(settings.name, _TOKENIZER_CONFIG)
        templates = [] if config_file is None else (config_file.parent / _TEMPLATES_FOLDER).glob("*.jinja")
        for template in templates:
            (folder / _TEMPLATES_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(template, folder / _TEMPLATES_FOLDER / template.name)
        return
    (folder / _TEMPLATE_FILE).write_text(own_template, encoding="utf-8")
    config_file = folder / _TOKENIZER_CONFIG
    if config_file.is_file():
        config = json.loads(config_file.read_text(encoding="utf-8"))
        config.pop(_TEMPLATE_KEY, None)
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
