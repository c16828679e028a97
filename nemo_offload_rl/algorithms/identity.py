"""The identity of a run, so that a checkpoint is not continued with another model, tokenizer or chat template.

An evaluation has one too: all that its answers depend on.

Names are not enough: a model folder can be moved, or hold other weights under its old name. So each entry has a name
for people and a digest of its contents. If both runs have a digest, the digests decide.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from nemo_offload_rl.backends.hf.model_folder import is_hub_name
from nemo_offload_rl.backends.hf.weight_files import WeightFiles
from nemo_offload_rl.errors import CheckpointError, UserError
from nemo_offload_rl.utils.checksums import bytes_checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_offload_rl.data.records import Prompt
    from nemo_offload_rl.keys.data import TokenizerConfig
    from nemo_offload_rl.keys.master import EvalConfig, RolloutConfig, SupervisedConfig
    from nemo_offload_rl.targets import UserCode

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
    model_name = config.policy.model_name
    model = {"name": model_name, "digest": _weights_digest(model_name)}
    tokenizer_entries = _of_tokenizer(config.policy.tokenizer, tokenizer, "policy.tokenizer")
    return {"policy.model_name": model, **tokenizer_entries}


def evaluation_identity(
    config: EvalConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    code: Mapping[str, Sequence[UserCode]],
) -> Identity:
    """Return all that the answers of an evaluation and their scores depend on.

    Args:
        config: The evaluation.
        tokenizer: As loaded for it.
        prompts: Its prompts, in order.
        code: The code of the user's environments, by name.
    """
    settings = {key: value for key, value in _flat(config.resolved) if not _IS_FREE.match(key)}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    found = {key: {"name": text, "digest": ""} for key, text in texts.items()}
    for name, parts in code.items():
        sources = [_source_of(part.value) for part in parts]
        key = f"env.{name}.target"
        found[key] = {"name": found.get(key, {}).get("name", name), "digest": _digest(sources)}
    asked = [[prompt.text, prompt.reference_answer, prompt.env_name, prompt.data_set] for prompt in prompts]
    found["data"] = {"name": f"{len(prompts)} prompts", "digest": _digest(asked)}
    try:
        weights = _weights_digest(config.engine.model_name)
    except UserError:  # not safetensors; the engine may read them nevertheless
        weights = ""
    model = {"name": config.engine.model_name, "digest": weights}
    return {**found, "generation.model_name": model, **_of_tokenizer(config.tokenizer, tokenizer, "tokenizer")}


# Keys that change no answer and no score, or are covered by digests.
_IS_FREE = re.compile(
    r"(data|cluster|tokenizer)\.|eval\.(save_path|metric|k_value)$|env\.\w+\.num_workers$|"
    r"generation\.(num_prompts_per_step|vllm_cfg\.(gpu_memory_utilization|kv_cache_memory_gib|max_restarts))$"
)


def _flat(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(cast("Mapping[str, Any]", value), f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _source_of(value: Any) -> str:
    """The text of the file that defines a function or class; "" without one."""
    try:
        is_definition = inspect.isroutine(value) or inspect.isclass(value)
        path = inspect.getsourcefile(cast("Any", value if is_definition else type(value)))
        return "" if path is None else Path(path).read_text(encoding="utf-8", errors="replace")
    except (TypeError, OSError):
        return ""


def _of_tokenizer(
    settings: TokenizerConfig, tokenizer: PreTrainedTokenizerBase, section: str
) -> dict[str, dict[str, str]]:
    template = settings.chat_template or "default"
    return {
        f"{section}.name": {"name": settings.name, "digest": _tokenizer_digest(tokenizer)},
        f"{section}.chat_template": {
            "name": template if len(template) <= _SHORT else f"{template[:_SHORT]!r}...",
            "digest": _digest(tokenizer.chat_template),  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        },
    }


def first_difference(recorded: Identity, mine: Identity) -> str | None:
    """Return the first key of both whose contents differ, or whose names do if the contents are unknown."""
    for key in (key for key in recorded if key in mine):
        by = "digest" if recorded[key]["digest"] and mine[key]["digest"] else "name"
        if recorded[key][by] != mine[key][by]:
            return key
    return None


def check_identity(folder: Path, recorded: Identity, mine: Identity) -> None:
    """Refuse to continue a checkpoint of another identity; only entries that both have are compared.

    Raises:
        CheckpointError: Names the first difference.
    """
    if (key := first_difference(recorded, mine)) is None:
        return
    theirs, ours = recorded[key], mine[key]
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
