"""Logprobs of a frozen reference on disk, so that a resumed run does not compute them again."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nemo_offload_rl.backends.hf.model_folder import WEIGHT_PATTERNS
from nemo_offload_rl.backends.saving.folders import not_written, partial_of, sync_folder
from nemo_offload_rl.data.records import ExamplePair, Splits
from nemo_offload_rl.errors import CheckpointError
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.utils.checksums import bytes_checksum

logger = logging.getLogger(__name__)

FILE_NAME = "reference_logprobs.safetensors"
_KEY, _CHECKSUM = "fingerprint", "checksum"


def fingerprint(pairs: Splits[ExamplePair], policy: PolicySettings) -> str:
    """Hash what the logprobs depend on: tokens and masks of all rows in order, the model and its precision.

    Files of a model folder are identified by name, size and time of change, because reading them would take as long as
    computing the logprobs. A model of a hub is identified by its name.
    """
    folder = Path(policy.model_name)
    patterns = ("config.json", *WEIGHT_PATTERNS)
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    model = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files] or policy.model_name
    sizes = (len(pairs.train), len(pairs.validation))
    known = hashlib.sha256(json.dumps([model, policy.precision, dict(policy.hf_config_overrides), sizes]).encode())
    for pair in (*pairs.train, *pairs.validation):
        for example in (pair.chosen, pair.rejected):
            known.update(len(example.token_ids).to_bytes(8, "little"))
            known.update(example.token_ids.tobytes())
            known.update(example.token_mask.tobytes())
    return known.hexdigest()


class ReferenceFile:
    """One safetensors file of named tensors, valid for one fingerprint.

    Args:
        path: The file; its folder must exist when it is written.
        fingerprint: Hash of what the tensors depend on.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self._fingerprint = fingerprint

    def read(self) -> dict[str, Tensor] | None:
        """Return the tensors, or None if there is no file. A damaged or outdated file gives a warning and None."""
        if not self.path.exists():
            return None
        try:
            opened: Any = safe_open(self.path, framework="pt")  # has no types
            with opened as file:
                about: dict[str, str] = file.metadata() or {}
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            logger.warning("%s cannot be read (%s): reference logprobs are computed anew", self.path, error)
            return None
        if about.get(_CHECKSUM, "") not in ("", bytes_checksum(save(tensors))):
            logger.warning("%s has changed since it was written: reference logprobs are computed anew", self.path)
            return None
        if about.get(_KEY) != self._fingerprint:
            logger.warning("%s is of other data or another model: reference logprobs are computed anew", self.path)
            return None
        logger.info("reference logprobs read from %s", self.path)
        return tensors

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the file atomically.

        Raises:
            CheckpointError: The file cannot be written; an older one is unchanged.
        """
        partial = partial_of(self.path)
        about = {_KEY: self._fingerprint, _CHECKSUM: bytes_checksum(save(dict(tensors)))}
        try:
            with partial.open("wb") as file:
                file.write(save(dict(tensors), metadata=about))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise CheckpointError(f"{not_written(error, self.path)} (checkpointing.checkpoint_dir)") from error
