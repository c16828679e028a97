"""What happens to a bucket inside vLLM's worker process: tensors are copied into the model and ticked off.

`model.load_weights` is used rather than vLLM's layerwise reload, which keeps references to the tensors until a layer is
complete: with reused buffers that corrupts weights without an error. The checks here cover what `load_weights` accepts
in silence: parameters that never came, and parts of a fused parameter (q of qkv) that never came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nemo_offload_rl.weight_sync.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from nemo_offload_rl.weight_sync.errors import RefitError, listed
from nemo_offload_rl.weight_sync.interfaces import WeightBucket
from nemo_offload_rl.weight_sync.nccl import NcclGroup, NcclReceiver
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryReceiver


class RefitSession:
    """One refit of one vLLM worker: load every bucket, then `finish`.

    Args:
        model: vLLM's model; it has `load_weights` and, with fused parameters, `packed_modules_mapping`.
        group: The communicator over which buckets come, where engine and policy do not share devices.
    """

    def __init__(self, model: nn.Module, group: NcclGroup | None = None) -> None:
        self._group = group
        self._model: Any = model
        self._packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        self._parameters = {name for name, _ in model.named_parameters()}
        self._received: set[str] = set()
        self._loaded: set[str] = set()
        self._receiver: SharedMemoryReceiver | CudaIpcReceiver | NcclReceiver | None = None

    def load(self, bucket: WeightBucket) -> None:
        """Copy the bucket into the model; its buffer may be overwritten afterwards.

        Raises:
            RefitError: The model has no such tensor, or one of another shape.
        """
        names = [piece.name for piece in bucket.slices]
        twice = self._received.intersection(names)
        if twice:
            raise RefitError(f"These tensors came twice in one refit: {listed(twice)}")
        ignored = [name for name in names if self._would_be_ignored(name)]
        if ignored:
            raise RefitError(f"The engine's model has no {listed(ignored)}")
        self._received.update(names)
        current: list[str] = []
        try:
            self._loaded.update(self._model.load_weights(self._observed(bucket, current)))
        except (ValueError, AssertionError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RefitError(f"The engine cannot load {listed(current[-1:])}: {reason}") from error
        if torch.cuda.is_available():
            # The copies are only asked for so far, and the sender refills the buffer once this has returned.
            torch.cuda.synchronize()

    def finish(self) -> None:
        """End the refit.

        Raises:
            RefitError: Parameters, or parts of fused parameters, never came.
        """
        self.close()
        missing = (self._parameters - self._loaded) | self._missing_parts()
        if missing:
            raise RefitError(
                f"The refit left these weights of the engine as they were: {listed(missing)}. The policy has none of "
                "that name; do settings of the engine (policy.generation.vllm_kwargs) make it another model?"
            )

    def close(self) -> None:
        """Let go of the sender's buffers."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _observed(self, bucket: WeightBucket, current: list[str]) -> Iterator[tuple[str, Tensor]]:
        if self._receiver is None:
            self._receiver = self._new_receiver(bucket.transport)
        for name, tensor in self._receiver.tensors(bucket):
            current.append(name)
            yield name, tensor

    def _new_receiver(self, transport: str) -> SharedMemoryReceiver | CudaIpcReceiver | NcclReceiver:
        if transport == CudaIpcSender.transport:
            return CudaIpcReceiver()
        if self._group is not None:
            return NcclReceiver(self._group)
        return SharedMemoryReceiver()

    def _would_be_ignored(self, name: str) -> bool:
        # load_weights drops unknown biases (GPTQ checkpoints have some); for us they mean another architecture.
        return name.endswith(".bias") and self._fused_name(name) not in self._parameters

    def _fused_name(self, name: str) -> str:
        for fused, parts in self._packed.items():
            for part in parts:
                if f".{part}." in name:
                    return name.replace(f".{part}.", f".{fused}.")
        return name

    def _missing_parts(self) -> set[str]:
        missing: set[str] = set()
        for parameter in self._loaded:
            for fused, parts in self._packed.items():
                if f".{fused}." not in parameter:
                    continue
                expected = {parameter.replace(f".{fused}.", f".{part}.") for part in parts}
                # A checkpoint that stores the parameter fused sends it under its own name.
                if expected & self._received:
                    missing |= expected - self._received
        return missing
