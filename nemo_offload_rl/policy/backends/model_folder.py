"""Checks on a Hugging Face model folder that need no model library, for use before any worker starts."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_offload_rl.errors import UserError

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


def check_model_folder(model_name: str) -> None:
    """Refuse a local folder that lacks its config, weights or tokenizer.

    A name of the form `owner/name` that is no folder is taken for a model hub's and left to the model library.

    Raises:
        UserError: The folder does not exist, or a part of the model is missing.
    """
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        if model_name.count("/") == 1 and not model_name.startswith((".", "/", "~")):
            return
        raise UserError(f"policy.model_name={model_name} is not a folder; give that of a Hugging Face model.")
    if not (folder / "config.json").is_file():
        raise UserError(f"The model folder {folder} has no config.json; it is not a Hugging Face model folder.")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
        raise UserError(f"The model folder {folder} has no weights (*.safetensors or pytorch_model*.bin); add them.")
    if not any((folder / name).is_file() for name in _ONE_TOKENIZER_OF):
        wanted = " or ".join(_ONE_TOKENIZER_OF)
        raise UserError(f"The model folder {folder} has no tokenizer ({wanted}); save the model's tokenizer there too.")
    try:
        json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'} is not valid JSON ({error}); repair or replace it.") from error
