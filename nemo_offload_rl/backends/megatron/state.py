"""What a Megatron worker keeps on the device between calls, by state group.

- params: parameters, module buffers, and the flat buffers that the parameters are views into; with adapters, theirs.
- base: with adapters, everything that is frozen, and module buffers.
- grads: the flat gradient buffers, and those outside of them.
- optimizer: fp32 masters wherever the optimizer's flavour keeps them, its state tensors, scales of 8-bit states.

Groups are listed in this order, and a storage that several list belongs to the first: without fp32 masters, the
optimizer's own parameters are views of the parameter buffers and stay where those are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from nemo_offload_rl.backends.megatron.optim import sub_optimizers
from nemo_offload_rl.protocols.optimizer import OptimizerSpec
from nemo_offload_rl.residency import (
    BASE,
    PARAMS,
    StateGroup,
    TensorGroup,
    aligned,
    storage_bytes,
    storage_key,
    unique_storages,
)

type NamedTensors = Iterator[tuple[str, Tensor]]

MASTER = "/master"


def _buffers(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Megatron's flat buffers, those of experts included."""
    for index, chunk in enumerate(chunks):
        for kind, buffers in (("dense", chunk.buffers), ("expert", chunk.expert_parallel_buffers)):
            for number, buffer in enumerate(buffers):
                yield f"chunk{index}/{kind}{number}", buffer


type NamedModules = Sequence[tuple[str, nn.Module]]


def named_modules(chunks: Sequence[Any]) -> NamedModules:
    """All modules by a prefix for names of their tensors. Groups walk them once: of a mixture there are thousands."""
    return [
        (f"chunk{index}/{name}{'.' if name else ''}", module)
        for index, chunk in enumerate(chunks)
        for name, module in chunk.module.named_modules()
    ]


def param_tensors(chunks: Sequence[Any], modules: NamedModules) -> NamedTensors:
    """Parameter buffers, parameters and module buffers."""
    return chain(_flat_parameters(chunks), _parameters(modules), _module_buffers(modules))


def _flat_parameters(chunks: Sequence[Any]) -> NamedTensors:
    for name, buffer in _buffers(chunks):
        if buffer.param_data is not None:
            yield f"{name}/param_data", buffer.param_data


def _parameters(modules: NamedModules) -> NamedTensors:
    for prefix, module in modules:
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield prefix + name, tensor


def _module_buffers(modules: NamedModules) -> NamedTensors:
    for prefix, module in modules:
        for name, tensor in module._buffers.items():
            if tensor is not None:
                yield prefix + name, tensor


def trainable_tensors(chunks: Sequence[Any], modules: NamedModules) -> NamedTensors:
    """Of `param_tensors`, what training writes."""
    trained = ((name, tensor) for name, tensor in _parameters(modules) if tensor.requires_grad)
    return chain(_flat_parameters(chunks), trained)


def frozen_tensors(modules: NamedModules) -> NamedTensors:
    """Of `param_tensors`, what nothing writes: frozen parameters, and module buffers."""
    frozen = ((name, tensor) for name, tensor in _parameters(modules) if not tensor.requires_grad)
    return chain(frozen, _module_buffers(modules))


def weight_groups(chunks: Sequence[Any], *, has_adapters: bool) -> tuple[StateGroup, ...]:
    """`params`, and with adapters `base` too, which arrive layer by layer. No module may be added afterwards."""
    modules = named_modules(chunks)
    layers = [module for _, module in modules if isinstance(module, TransformerLayer)]
    if _may_gather_in_passes(chunks):
        layers = []
    if not has_adapters:
        return (TensorGroup(PARAMS, lambda: param_tensors(chunks, modules), layers=layers),)
    return (
        TensorGroup(PARAMS, lambda: trainable_tensors(chunks, modules), layers=layers),
        TensorGroup(BASE, lambda: frozen_tensors(modules), layers=layers),
    )


def _may_gather_in_passes(chunks: Sequence[Any]) -> bool:
    """Whether a forward pass may gather parameters over ranks, whole buckets of layers, before a layer's own forward.

    It does where no update came before: Megatron's buckets then count as not gathered.
    """
    shared = any(buffer.data_parallel_world_size > 1 for _, buffer in _buffers(chunks))
    return shared and any(chunk.ddp_config.overlap_param_gather for chunk in chunks)


def grad_tensors(chunks: Sequence[Any]) -> NamedTensors:
    """Gradient buffers, and gradients that Megatron keeps outside of them."""
    for name, buffer in _buffers(chunks):
        yield f"{name}/grad_data", buffer.grad_data
        for number, extra in enumerate(buffer.extra_main_grads):
            yield f"{name}/extra_main_grad{number}", extra


def updated_parameters(mcore: Any) -> NamedTensors:
    """What one of Megatron's optimizers hands to its torch optimizers: masters, or parts of the parameters."""
    for inner in _inner_optimizers(mcore.optimizer):
        for index, group in enumerate(inner.param_groups):
            for number, parameter in enumerate(group["params"]):
                yield f"{index}.{number}", parameter


def optimizer_tensors(mcore: Any, members: Sequence[tuple[str, Tensor]]) -> NamedTensors:
    """Masters and states of every flavour; those that are views of parameters are among them.

    Args:
        mcore: One of Megatron's optimizers.
        members: Of its `updated_parameters`. Nothing else is looked at: parts are many where parameters are.
    """
    for inner in _inner_optimizers(mcore.optimizer):
        states, scales = inner.state, getattr(inner, "_scales", {})
        for name, parameter in members:
            yield name + MASTER, parameter
            # Not `states[parameter]`: that would make an entry for one that has none yet.
            own = states.get(parameter, {})
            for key, value in own.items():
                # Scalars (Adam's `step`) cost nothing on the host, where torch keeps them.
                if isinstance(value, Tensor) and value.dim() > 0:
                    yield f"{name}/{key}", value
            for key, value in scales.get(parameter, {}).items() if scales else ():
                if own[key].dtype is torch.bfloat16:
                    continue  # made, and never read
                yield f"{name}/{key}_scale", value


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that hold states on the device; what Megatron's hybrid optimizer has on the host is its own."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        return [] if optimizer.gpu_optimizer is None else [optimizer.gpu_optimizer]
    return [optimizer]


class MegatronGrads(StateGroup):
    """Gradient buffers: their memory is given up between steps, and comes back zeroed; views of them stay valid."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        super().__init__("grads")
        self._chunks = chunks
        self._sizes_bytes: dict[int, int] = {}

    def tensors(self) -> NamedTensors:
        return grad_tensors(self._chunks)

    def free(self) -> None:
        for key, record in unique_storages(self.tensors()).items():
            if record.storage.nbytes():
                self._sizes_bytes[key] = record.storage.nbytes()
                record.storage.resize_(0)

    def materialize(self) -> None:
        for key, record in unique_storages(self.tensors()).items():
            if not record.storage.nbytes():
                record.storage.resize_(self._sizes_bytes[key])
                storage_bytes(record.storage, self._sizes_bytes[key]).zero_()


def weight_bytes(chunks: Sequence[Any], *, has_adapters: bool) -> dict[str, int]:
    """Host bytes of each of `weight_groups`."""
    return {
        group.name: sum(aligned(record.storage.nbytes()) for record in unique_storages(group.tensors()).values())
        for group in weight_groups(chunks, has_adapters=has_adapters)
    }


def state_bytes(chunks: Sequence[Any], optimizer: Any, spec: OptimizerSpec) -> dict[Tensor, int]:
    """Host bytes of masters and states of each of `updated_parameters`, once all of the lazy state is there.

    Args:
        chunks: The model.
        optimizer: Megatron's optimizer.
        spec: What it keeps.
    """
    params = unique_storages(param_tensors(chunks, named_modules(chunks)))
    sizes: dict[Tensor, int] = {}
    for mcore in sub_optimizers(optimizer):
        if mcore.is_stub_optimizer:
            continue
        for _, parameter in updated_parameters(mcore):
            kept, storage = list(spec.states.values()), parameter.untyped_storage()
            # What is no view of a parameter is a master itself. Of parameters, the optimizer makes masters as states.
            is_master = storage_key(storage) not in params
            if not is_master and parameter.dtype in spec.masters:
                kept.append(spec.masters[parameter.dtype])
            sizes[parameter] = sum(aligned(dtype.itemsize * parameter.numel()) for dtype in kept)
            sizes[parameter] += aligned(storage.nbytes()) if is_master else 0
    return sizes
