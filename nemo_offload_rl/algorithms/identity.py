"""The identity of a run, so that a checkpoint is not continued with another model, tokenizer or chat template.

Names are not enough: a model folder can be moved, or hold other weights under its old name. So each entry has a name
for people and a digest of its contents. If both runs have a digest, the digests decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_offload_rl.backends.hf.model_folder import is_hub_name
from nemo_offload_rl.backends.hf.weight_files import WeightFiles
from nemo_offload_rl.errors import CheckpointError
from nemo_offload_rl.utils.checksums import bytes_checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_offload_rl.keys.master import RolloutConfig, SupervisedConfig

type Identity = Mapping[str, Mapping[str, str]]
"""The `name` and `digest` of each configuration key; the digest is "" if the contents are not available."""

_NUM_TENSORS, _NUM_ELEMENTS = 256, 256  # limits: tensors to read, elements of each
_TEXT = "The 1st of 12,345 tests:\n\tnaïve café 世界 x_i = -3.14e-2 == f(a, b); 🙂 don't"
_SHORT = 60


def run_identity(config: RolloutConfig | SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> Identity:
    """Return the identity of a run; empty if it saves no checkpoints.

    Args:
        config: The run.
        tokenizer: As loaded for the run.

    Raises:
        UserError: The weights of a model folder cannot be read.
    """
    if not config.checkpointing.enabled:
        return {}
    model_name, settings = config.policy.model_name, config.policy.tokenizer
    template = settings.chat_template or "default"
    return {
        "policy.model_name": {"name": model_name, "digest": _weights_digest(model_name)},
        "policy.tokenizer.name": {"name": settings.name, "digest": _tokenizer_digest(tokenizer)},
        "policy.tokenizer.chat_template": {
            "name": template if len(template) <= _SHORT else f"{template[:_SHORT]!r}...",
            "digest": _digest(tokenizer.chat_template),  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        },
    }


def check_identity(folder: Path, recorded: Identity, mine: Identity) -> None:
    """Refuse to continue a checkpoint of another identity; only entries that both have are compared.

    Raises:
        CheckpointError: Names the first difference.
    """
    for key in (key for key in recorded if key in mine):
        theirs, ours = recorded[key], mine[key]
        by = "digest" if theirs["digest"] and ours["digest"] else "name"
        if theirs[by] == ours[by]:
            continue
        if theirs["name"] == ours["name"]:
            fault = f"was trained from {key}={ours['name']}, whose contents have changed since"
        else:
            fault = f"was trained from {key}={theirs['name']}, and this run has {ours['name']}, which is another one"
        raise CheckpointError(
            f"{folder} {fault}; set it as it was to go on, or use another checkpointing.checkpoint_dir to start anew"
        )


def _weights_digest(model_name: str) -> str:
    """Digest a model folder's weights: all names and shapes, and some values of some tensors.

    The digest does not depend on how tensors are split among files. It is "" for a model of the hub, whose files may
    not be downloaded yet.
    """
    if is_hub_name(model_name):
        return ""
    files = WeightFiles(model_name)
    names = sorted(files.shapes)
    found = [json.dumps([[name, list(files.shapes[name])] for name in names]).encode()]
    with files.held_open():
        for name in names[:: -(-len(names) // _NUM_TENSORS)]:
            *rows, columns = files.shapes[name] or (1,)
            sizes = [1] * len(rows) + [min(columns, _NUM_ELEMENTS)]
            offsets = [size // 2 for size in rows] + [0]
            is_scalar = not files.shapes[name]
            values = files.read(name, [] if is_scalar else offsets, [] if is_scalar else sizes)
            found.append(values.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return bytes_checksum(b"".join(found))


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest the vocabulary and the tokens of a text."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    untyped: Any = tokenizer
    return _digest([vocabulary, tokenizer.eos_token_id, untyped.encode(_TEXT, add_special_tokens=False)])


def _digest(value: object) -> str:
    return bytes_checksum(json.dumps(value, sort_keys=True).encode())
