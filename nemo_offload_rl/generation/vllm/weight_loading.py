"""Loads buckets inside vLLM's worker process: copies tensors into the model and records every write.

`stacked_experts.py` writes stacked experts, `fp8_loading.py` quantizes for layers in 8 bits; vLLM's
`model.load_weights` writes everything else. vLLM's layerwise reload is not used: it keeps references to tensors until a
layer is complete, which silently corrupts weights, since buffers are reused. `load_weights` does not report missing
tensors or experts, or tensors that it ignores or reads in part. Counting finds them: every element of every parameter
must be written, and every element of every tensor read.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nemo_offload_rl.generation.vllm.fp8_loading import SCALES, QuantizedWeights, derived, is_quantized
from nemo_offload_rl.generation.vllm.stacked_experts import PARAMETERS, StackedExperts, local_experts, place_of
from nemo_offload_rl.generation.vllm.write_recorder import Span, WriteRecorder, gaps, merged
from nemo_offload_rl.protocols.refit import RefitError, TensorSlice, WeightBucket, listed
from nemo_offload_rl.weight_sync.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from nemo_offload_rl.weight_sync.nccl import NcclGroup, NcclReceiver
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryReceiver

type _TensorKind = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and type, which decide where vLLM loads a tensor."""


class BucketReader:
    """Reads the tensors of a refit's buckets, by whatever transport they come.

    Args:
        group: The communicator that brings buckets, if engine and policy do not share devices.
    """

    def __init__(self, group: NcclGroup | None = None) -> None:
        self._group = group
        self._receiver: SharedMemoryReceiver | CudaIpcReceiver | NcclReceiver | None = None

    def tensors(self, bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, which are views of the sender's buffer."""
        if self._receiver is None:
            if bucket.transport == CudaIpcSender.transport:
                self._receiver = CudaIpcReceiver()
            else:
                self._receiver = SharedMemoryReceiver() if self._group is None else NcclReceiver(self._group)
        return self._receiver.tensors(bucket)

    def close(self) -> None:
        """Close the sender's buffers."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


@dataclass(frozen=True)
class _Load:
    spans: tuple[Span, ...]
    num_read: int  # of the tensor's elements


@dataclass
class SeenLoads:
    """Memory that each tensor's first load wrote; later loads write the same memory.

    Recording costs about as much as loading, so it is done once for each tensor and engine.
    """

    addresses: tuple[int, ...] = ()
    loads: dict[_TensorKind, _Load] = field(default_factory=dict)

    def is_new_for(self, model: nn.Module) -> bool:
        """Tell whether nothing is recorded of the model; forget all records if a parameter's memory has changed."""
        addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
        if addresses != self.addresses:
            self.addresses, self.loads = addresses, {}
        return not self.loads


class RefitSession:
    """One refit of one vLLM worker: load every bucket, then `finish`.

    Args:
        model: vLLM's model; it has `load_weights`.
        seen: Records of earlier refits of this model.
        reader: Reads buckets; `finish` and `close` close it.

    Raises:
        RefitError: vLLM has derived something from the model's weights that loading does not renew.
    """

    def __init__(self, model: nn.Module, seen: SeenLoads, reader: BucketReader) -> None:
        self._reader = reader
        self._model: Any = model
        self._experts = StackedExperts(model)
        self._quantized = QuantizedWeights(model)
        self._seen = seen
        if seen.is_new_for(model):
            _refuse_derived_weights(model)
        self._received: dict[str, _TensorKind] = {}

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
            tensors = list(self._reader.tensors(bucket))
            with self._quantized.loadable(), recorder or nullcontext():
                self._model.load_weights(self._observed(tensors, current, recorder))
        except (ValueError, AssertionError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RefitError(f"The engine cannot load {listed(current[-1:])}: {reason}") from error
        if torch.cuda.is_available():
            # The copies have only been launched, and the sender refills the buffer once this returns.
            torch.cuda.synchronize()

    def finish(self) -> dict[str, tuple[int, int]]:
        """End the refit.

        Returns:
            For each tensor that this worker read in part: elements read, and all elements. Other workers may have read
            the rest.

        Raises:
            RefitError: Elements of parameters were not written.
        """
        self.close()
        self._quantized.release()
        loads = {name: self._seen.loads[kind] for name, kind in self._received.items()}
        written = merged(span for load in loads.values() for span in load.spans)
        missing = _missing_weights(self._model, written)
        if missing:
            raise RefitError(
                f"The refit did not change these weights of the engine: {listed(missing)}. The policy has none of that "
                "name, because vLLM builds this model in another way; choose a model that vLLM and the "
                "policy build in the same way."
            )
        sizes = {name: torch.Size(shape).numel() for name, shape, _ in self._received.values()}
        return {name: (load.num_read, sizes[name]) for name, load in loads.items() if load.num_read < sizes[name]}

    def close(self) -> None:
        """Close the sender's buffers."""
        self._reader.close()

    def _observed(
        self, tensors: list[tuple[str, Tensor]], current: list[str], recorder: WriteRecorder | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors to vLLM, which has loaded one when it asks for the next; load stacked experts here."""
        for name, tensor in tensors:
            current.append(name)
            if self._experts.takes(name):
                self._experts.load(name, tensor)
            else:
                yield name, tensor
            if recorder is not None:
                spans, num_read = recorder.take()
                self._seen.loads[self._received[name]] = _Load(spans, min(num_read, tensor.numel()))


def _kind(piece: TensorSlice) -> _TensorKind:
    return piece.name, piece.shape, piece.dtype


def _refuse_derived_weights(model: nn.Module) -> None:
    """Refuse a model if vLLM 0.25.1 keeps packed, quantized, fused or derived weights next to its parameters.

    Scales of an 8-bit KV cache are allowed: without a quantized checkpoint they stay 1.

    Raises:
        RefitError: There are such weights; the message names the module and the reason.
    """
    for name, module in model.named_modules():
        if (derived := _derived(module)) is not None:
            raise RefitError(
                f"The engine cannot take new weights: {name} {derived} once after loading, which no refit renews; "
                "choose another model"
            )


def _derived(module: nn.Module) -> str | None:
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.hpc.hpc_module import HpcModule
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if is_quantized(module):
        return derived(module)
    if isinstance(module, MLAAttention):
        return "derives weights of its latent attention"
    if isinstance(module, HpcModule):
        return "packs weights"
    if isinstance(module, MoERunner) and module._fse_fuse_gate:
        return "fuses the gates of its experts"
    method = getattr(module, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod):
        backends = UnquantizedMoeBackend
        plain = (backends.TRITON, backends.BATCHED_TRITON, backends.CPU)
        return None if method.unquantized_backend in plain else "reformats the weights of its experts"
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    if isinstance(method, QuantizeMethodBase) and type(method) not in plain:
        return f"computes what {type(method).__name__} needs"
    return None


def _missing_weights(model: nn.Module, written: list[Span]) -> list[str]:
    """Name all weights with an element outside the merged spans, as the policy would have sent them."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    modules = dict(model.named_modules())
    missing: list[str] = []
    for name, parameter in model.named_parameters():  # tied parameters come once
        if name.endswith(SCALES):  # written with their weights
            continue
        if holes := gaps(parameter, written):
            place, _, own_name = name.rpartition(".")
            parts = list(_parts(modules[place], place, own_name, parameter, packed))
            found = [part for part, (begin, end) in parts if any(first < end and begin < last for first, last in holes)]
            if len(found) == len(parts):
                found = _stacked(place, own_name) or found
            missing += found or [name]
    return [name for name in missing if not _is_never_read(name, modules)]


def _is_never_read(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Tell whether a weight makes keys or values of a layer that takes those of an earlier one (Gemma 4 E2B)."""
    place, _, own_name = name.rpartition(".")[0].rpartition(".")
    is_sharing = getattr(modules.get(place), "is_kv_shared_layer", False)
    return is_sharing and own_name in ("k_proj", "v_proj", "k_norm", "v_norm")


def _stacked(place: str, own_name: str) -> list[str]:
    """Name of the stacked tensor for a parameter of experts; empty for other parameters."""
    return [f"{place_of(place)}.{kind}" for kind, parameter in PARAMETERS.items() if parameter == own_name]


def _parts(
    module: nn.Module, place: str, own_name: str, parameter: nn.Parameter, packed: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Span]]:
    """Yield name and memory of each policy tensor in a fused parameter; nothing for other parameters."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    if not parameter.is_contiguous():
        return
    row_bytes = parameter.stride(0) * parameter.element_size() if parameter.dim() else 0
    start = parameter.data_ptr()
    if isinstance(module, RoutedExperts) and parameter.dim() == 3:
        gate, up, down = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
        names = [gate, up] if own_name.startswith("w13") else [down]
        for expert, local in local_experts(module):
            begin, num_bytes = start + local * row_bytes, row_bytes // len(names)
            for index, name in enumerate(names):
                span = (begin + index * num_bytes, begin + (index + 1) * num_bytes)
                yield f"{place_of(place)}.{expert}.{name}.weight", span
    elif isinstance(module, ColumnParallelLinear):
        parent, _, fused = place.rpartition(".")
        names = packed.get(fused, ())
        if len(names) == len(module.output_partition_sizes):
            for name, num_rows in zip(names, module.output_partition_sizes, strict=True):
                yield f"{parent}.{name}.{own_name}", (start, start + num_rows * row_bytes)
                start += num_rows * row_bytes
