"""Finds and checks the files of a Hugging Face model without a model library, for use before any worker starts."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open

from nemo_offload_rl.errors import UserError, first_line
from nemo_offload_rl.keys.master import RunConfig
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.models.towers import language_config
from nemo_offload_rl.utils.hub import looking_up

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_ONE_TOKENIZER_OF = ("tokenizer.json", "tokenizer.model", "vocab.json")
# In the order in which `transformers` looks for them; it ignores others, such as `consolidated.safetensors`.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def is_hub_name(model_name: str) -> bool:
    """Tell whether a name is a model hub's: it has the form `owner/name` and is no folder."""
    is_path = model_name.startswith((".", "/", "~")) or Path(model_name).is_dir()
    return model_name.count("/") == 1 and not is_path


def local_folder(model_name: str) -> Path | None:
    """Return this host's folder with a model's files, maybe not all; None for a hub's model that is not cached."""
    if not is_hub_name(model_name):
        return Path(model_name)
    cached = try_to_load_from_cache(model_name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def find_file(model_name: str, file_name: str) -> Path | None:
    """Return a file of a model folder or of a hub's model, downloading it if needed; None if there is none.

    Raises:
        UserError: The hub refuses the model.
    """
    if not is_hub_name(model_name):
        path = Path(model_name) / file_name
        return path if path.is_file() else None
    try:
        with looking_up(model_name):
            return Path(hf_hub_download(model_name, file_name))
    except EntryNotFoundError:  # also if neither cache nor network has it
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"policy.model_name={model_name} is not a folder, and the model hub does not provide {file_name} "
            f"({first_line(error)}); check the name, or give the folder of a downloaded model"
        ) from error


def find_weight_files(model_name: str) -> list[Path]:
    """Return the files with a model's weights, as its index names them.

    Raises:
        UserError: There are no weights, or a file that the index names is missing.
    """
    path = next((found for name in _WEIGHTS if (found := find_file(model_name, name)) is not None), None)
    if path is None:
        fix = "connect to the model hub, whose cache lacks them" if is_hub_name(model_name) else "add them"
        raise UserError(f"policy.model_name={model_name} has no weights ({', '.join(_WEIGHTS)}); {fix}")
    if path.suffix != ".json":
        return [path]
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not an index of weights ({error}); copy it again") from error
    files = {name: find_file(model_name, name) for name in names}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise UserError(f"{path} names {len(missing)} missing files, first {missing[0]}; add them")
    return [file for file in files.values() if file is not None]


def model_vocab_size(model_name: str, overrides: Mapping[str, Any]) -> int | None:
    """Return the number of a model's embeddings; None if config.json leaves it to the model library's default."""
    return ModelShape.of({**read_model_config(model_name), **overrides}).vocab_size


def read_model_config(model_name: str) -> dict[str, Any]:
    """Read the model's config.json; of a folder that reads images too, the language model's part.

    Raises:
        UserError: The file is missing or is not valid JSON.
    """
    return language_config(read_whole_config(model_name))


def read_whole_config(model_name: str) -> dict[str, Any]:
    """Read the folder's config.json as it is.

    Raises:
        UserError: The file is missing or is not valid JSON.
    """
    path = find_file(model_name, "config.json")
    if path is None and is_hub_name(model_name):
        raise UserError(
            f"policy.model_name={model_name} is not a folder, and neither the model hub nor its cache has its "
            "config.json; check the name and the network, or give the folder of a downloaded model"
        )
    if path is None:
        exports = [path.parent for name in ("hf", "step_*/hf") for path in Path(model_name).glob(f"{name}/config.json")]
        newest = max(exports, key=lambda path: (len(str(path)), path), default="the folder of a Hugging Face model")
        raise UserError(f"policy.model_name={model_name} has no config.json; set it to {newest}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_hook=plain_number)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); repair or replace it.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object; replace it.")
    return config


def plain_number(entry: dict[str, Any]) -> Any:
    """Return the number that an entry of a config.json of transformers 5 means (`{"__float__": "Infinity"}`)."""
    value = entry.get("__float__")
    return float(value) if len(entry) == 1 and isinstance(value, str) else entry


def check_model_folder(model_name: str) -> None:
    """Refuse a local folder that lacks its config, weights or tokenizer, or has a damaged weight file.

    For a hub's model only the config is checked, since workers download the rest; without the hub its weights too.

    Raises:
        UserError: The folder does not exist, or a part of the model is missing.
    """
    if is_hub_name(model_name):
        read_model_config(model_name)
        if constants.HF_HUB_OFFLINE:
            for path in find_weight_files(model_name):
                _check_whole(path)
        return
    folder = Path(model_name)
    if not folder.is_dir():
        raise UserError(f"policy.model_name={model_name} is not a folder; give the folder of a Hugging Face model")
    read_model_config(model_name)
    for path in find_weight_files(model_name):
        _check_whole(path)
    if not any((folder / name).is_file() for name in _ONE_TOKENIZER_OF):
        wanted = " or ".join(_ONE_TOKENIZER_OF)
        raise UserError(f"The model folder {folder} has no tokenizer ({wanted}); save the model's tokenizer there too.")


def _check_whole(path: Path) -> None:
    """Refuse a safetensors file shorter than its header says: a partial copy, or a pointer left by git-lfs."""
    if path.suffix != ".safetensors":
        return
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a complete safetensors file ({error}); copy it again") from error


def local_model_config(cfg: RunConfig) -> Mapping[str, Any] | None:
    """Return `local_config` of the policy's model."""
    return local_config(cfg.policy.model_name, cfg.policy.hf_config_overrides)


def local_config(model_name: str, overrides: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the model's config.json with overrides, as `read_model_config`; None for a broken folder.

    Also None for a hub's model that has not been downloaded yet.
    """
    folder = local_folder(model_name)
    try:
        config = None if folder is None else _read_json(file := folder / "config.json", file.stat().st_mtime_ns)
    except (OSError, ValueError):
        return None
    return {**language_config(config), **overrides} if isinstance(config, dict) else None


@lru_cache(maxsize=8)
def _read_json(file: Path, _changed_ns: int) -> Any:
    """Read JSON again only if its file has changed; a plan asks for it thousands of times."""
    return json.loads(file.read_text(encoding="utf-8"), object_hook=plain_number)
