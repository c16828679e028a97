"""What happens to a bucket inside vLLM's worker process: tensors are copied into the model, and every write counted.

Stacked experts are written by `stacked_experts.py`, everything else by vLLM: by `model.load_weights` rather than its
layerwise reload, which keeps references to the tensors until a layer is complete: with reused buffers that corrupts
weights without an error. What `load_weights` accepts in silence (a missing tensor, a missing expert, a tensor that it
ignores or takes a part of) is found by counting: every element of every parameter has to be written, every element of
every tensor to be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nemo_offload_rl.generation.vllm.derived_weights import check_nothing_is_derived
from nemo_offload_rl.generation.vllm.missing_weights import missing_weights
from nemo_offload_rl.generation.vllm.stacked_experts import StackedExperts
from nemo_offload_rl.generation.vllm.write_recorder import Span, WriteRecorder, merged
from nemo_offload_rl.protocols.refit import RefitError, TensorSlice, WeightBucket, listed
from nemo_offload_rl.weight_sync.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from nemo_offload_rl.weight_sync.nccl import NcclGroup, NcclReceiver
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryReceiver

type _TensorKind = tuple[str, tuple[int, ...], torch.dtype]
"""What decides where vLLM loads a tensor: name, shape and type."""


@dataclass(frozen=True)
class _Load:
    spans: tuple[Span, ...]
    num_read: int  # elements, at most those of the tensor


@dataclass
class SeenLoads:
    """Where each tensor went when it was loaded for the first time; it goes there each time.

    Recording costs about as much as loading, so that it is done once for each tensor and engine.
    """

    addresses: tuple[int, ...] = ()
    loads: dict[_TensorKind, _Load] = field(default_factory=dict)

    def is_new_for(self, model: nn.Module) -> bool:
        """Whether it knows nothing of the model; everything is forgotten if a parameter lies elsewhere by now."""
        addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
        if addresses != self.addresses:
            self.addresses, self.loads = addresses, {}
        return not self.loads


class RefitSession:
    """One refit of one vLLM worker: load every bucket, then `finish`.

    Args:
        model: vLLM's model; it has `load_weights`.
        seen: What earlier refits of this model have recorded.
        group: The communicator over which buckets come, where engine and policy do not share devices.

    Raises:
        RefitError: vLLM has computed something from the model's weights that loading does not renew.
    """

    def __init__(self, model: nn.Module, seen: SeenLoads, group: NcclGroup | None = None) -> None:
        self._group = group
        self._model: Any = model
        self._experts = StackedExperts(model)
        self._seen = seen
        if seen.is_new_for(model):
            check_nothing_is_derived(model)
        self._received: dict[str, _TensorKind] = {}
        self._receiver: SharedMemoryReceiver | CudaIpcReceiver | NcclReceiver | None = None

    def load(self, bucket: WeightBucket) -> None:
        """Copy the bucket into the model; its buffer may be overwritten afterwards.

        Raises:
            RefitError: The model has no such tensor, or one of another shape.
        """
        kinds = {piece.name: _kind(piece) for piece in bucket.slices}
        twice = self._received.keys() & kinds.keys()
        if twice:
            raise RefitError(f"These tensors came twice in one refit: {listed(twice)}")
        self._received |= kinds
        current: list[str] = []
        recorder = None if self._seen.loads.keys() >= set(kinds.values()) else WriteRecorder()
        try:
            tensors = self._tensors(bucket)
            with recorder or nullcontext():
                self._model.load_weights(self._observed(tensors, current, recorder))
        except (ValueError, AssertionError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RefitError(f"The engine cannot load {listed(current[-1:])}: {reason}") from error
        if torch.cuda.is_available():
            # The copies are only asked for so far, and the sender refills the buffer once this has returned.
            torch.cuda.synchronize()

    def finish(self) -> dict[str, tuple[int, int]]:
        """End the refit.

        Returns:
            Of tensors that this worker read in part: the elements it read, and all. Its other parts may be other
            workers'.

        Raises:
            RefitError: Elements of parameters were not written.
        """
        self.close()
        loads = {name: self._seen.loads[kind] for name, kind in self._received.items()}
        written = merged(span for load in loads.values() for span in load.spans)
        missing = missing_weights(self._model, written)
        if missing:
            raise RefitError(
                f"The refit left these weights of the engine as they were: {listed(missing)}. The policy has none of "
                "that name. vLLM builds this model in another way than the policy; choose one that both build alike."
            )
        sizes = {name: torch.Size(shape).numel() for name, shape, _ in self._received.values()}
        return {name: (load.num_read, sizes[name]) for name, load in loads.items() if load.num_read < sizes[name]}

    def close(self) -> None:
        """Let go of the sender's buffers."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _tensors(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        if self._receiver is None:
            self._receiver = self._new_receiver(bucket.transport)
        return list(self._receiver.tensors(bucket))

    def _observed(
        self, tensors: list[tuple[str, Tensor]], current: list[str], recorder: WriteRecorder | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Hands out one tensor after the other; vLLM has loaded one when it asks for the next. Experts stay here."""
        for name, tensor in tensors:
            current.append(name)
            if self._experts.takes(name):
                self._experts.load(name, tensor)
            else:
                yield name, tensor
            if recorder is not None:
                spans, num_read = recorder.take()
                self._seen.loads[self._received[name]] = _Load(spans, min(num_read, tensor.numel()))

    def _new_receiver(self, transport: str) -> SharedMemoryReceiver | CudaIpcReceiver | NcclReceiver:
        if transport == CudaIpcSender.transport:
            return CudaIpcReceiver()
        if self._group is not None:
            return NcclReceiver(self._group)
        return SharedMemoryReceiver()


def _kind(piece: TensorSlice) -> _TensorKind:
    return piece.name, piece.shape, piece.dtype
