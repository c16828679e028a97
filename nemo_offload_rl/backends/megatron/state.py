"""State groups: the tensors that a Megatron worker keeps on the device between calls.

- params: parameters, module buffers, and the flat buffers that the parameters are views into. With adapters, only the
  adapters' parameters and flat buffers.
- base: frozen parameters and module buffers; exists only with adapters.
- grads: the flat gradient buffers, and gradients outside of them.
- optimizer: fp32 masters (each kind of optimizer stores them differently), state tensors, scales of 8-bit states.

Groups are listed in this order. A storage in several groups belongs to the first: without fp32 masters, the
optimizer's parameters are views of the parameter buffers and move with these.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from nemo_offload_rl.backends.megatron.optim import sub_optimizers
from nemo_offload_rl.protocols.optimizer import OptimizerSpec
from nemo_offload_rl.residency import (
    BASE,
    PARAMS,
    StateGroup,
    aligned,
    storage_bytes,
    storage_key,
    unique_storages,
)

type NamedTensors = Iterator[tuple[str, Tensor]]

MASTER = "/master"


def _buffers(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield Megatron's flat buffers, including the experts'."""
    for index, chunk in enumerate(chunks):
        for kind, buffers in (("dense", chunk.buffers), ("expert", chunk.expert_parallel_buffers)):
            for number, buffer in enumerate(buffers):
                yield f"chunk{index}/{kind}{number}", buffer


type NamedModules = Sequence[tuple[str, nn.Module]]


def named_modules(chunks: Sequence[Any]) -> NamedModules:
    """List all modules with a prefix for their tensors' names. It is made once: a mixture has thousands of modules."""
    return [
        (f"chunk{index}/{name}{'.' if name else ''}", module)
        for index, chunk in enumerate(chunks)
        for name, module in chunk.module.named_modules()
    ]


def param_tensors(chunks: Sequence[Any], modules: NamedModules) -> NamedTensors:
    """Yield parameter buffers, parameters and module buffers."""
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
    """Yield the tensors of `param_tensors` that training writes."""
    trained = ((name, tensor) for name, tensor in _parameters(modules) if tensor.requires_grad)
    return chain(_flat_parameters(chunks), trained)


def frozen_tensors(modules: NamedModules) -> NamedTensors:
    """Yield the tensors of `param_tensors` that nothing writes: frozen parameters and module buffers."""
    frozen = ((name, tensor) for name, tensor in _parameters(modules) if not tensor.requires_grad)
    return chain(frozen, _module_buffers(modules))


def weight_groups(chunks: Sequence[Any], *, has_adapters: bool) -> tuple[StateGroup, ...]:
    """Return `params`, and `base` with adapters; both load layer by layer. No module may be added afterwards."""
    modules = named_modules(chunks)
    layers = [module for _, module in modules if isinstance(module, TransformerLayer | MambaLayer)]
    if _may_gather_in_passes(chunks):
        layers = []
    if not has_adapters:
        return (StateGroup(PARAMS, lambda: param_tensors(chunks, modules), layers=layers),)
    return (
        StateGroup(PARAMS, lambda: trainable_tensors(chunks, modules), layers=layers),
        StateGroup(BASE, lambda: frozen_tensors(modules), layers=layers),
    )


def _may_gather_in_passes(chunks: Sequence[Any]) -> bool:
    """Return whether a forward pass may gather buckets of several layers' parameters before these layers run.

    This happens before the first update, when Megatron's buckets count as not gathered.
    """
    shared = any(buffer.data_parallel_world_size > 1 for _, buffer in _buffers(chunks))
    return shared and any(chunk.ddp_config.overlap_param_gather for chunk in chunks)


def grad_tensors(chunks: Sequence[Any]) -> NamedTensors:
    """Yield gradient buffers, and gradients that Megatron keeps outside of them."""
    for name, buffer in _buffers(chunks):
        yield f"{name}/grad_data", buffer.grad_data
        for number, extra in enumerate(buffer.extra_main_grads):
            yield f"{name}/extra_main_grad{number}", extra


def updated_parameters(mcore: Any) -> NamedTensors:
    """Yield the tensors that one of Megatron's optimizers passes to torch's: masters, or parts of parameters."""
    for inner in _inner_optimizers(mcore.optimizer):
        for index, group in enumerate(inner.param_groups):
            for number, parameter in enumerate(group["params"]):
                yield f"{index}.{number}", parameter


def optimizer_tensors(mcore: Any, members: Sequence[tuple[str, Tensor]]) -> NamedTensors:
    """Yield masters and states of any kind of optimizer, including masters that are views of parameters.

    Args:
        mcore: One of Megatron's optimizers.
        members: Some of its `updated_parameters`. No others are visited, since a large model has many parts.
    """
    for inner in _inner_optimizers(mcore.optimizer):
        states, scales = inner.state, getattr(inner, "_scales", {})
        for name, parameter in members:
            yield name + MASTER, parameter
            # `states[parameter]` would create an entry.
            own = states.get(parameter, {})
            for key, value in own.items():
                # Skips scalars such as Adam's `step`, which torch keeps on the host.
                if isinstance(value, Tensor) and value.dim() > 0:
                    yield f"{name}/{key}", value
            for key, value in scales.get(parameter, {}).items() if scales else ():
                if own[key].dtype is torch.bfloat16:
                    continue  # this scale is never read
                yield f"{name}/{key}_scale", value


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers with states on the device; Megatron's hybrid optimizer manages its host states itself."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        return [] if optimizer.gpu_optimizer is None else [optimizer.gpu_optimizer]
    return [optimizer]


class MegatronGrads(StateGroup):
    """Gradient buffers. Their memory is freed between steps and comes back zeroed; views stay valid."""

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
    """Return the host bytes of each of `weight_groups`."""
    return {
        group.name: sum(aligned(record.storage.nbytes()) for record in unique_storages(group.tensors()).values())
        for group in weight_groups(chunks, has_adapters=has_adapters)
    }


def state_bytes(chunks: Sequence[Any], optimizer: Any, spec: OptimizerSpec) -> dict[Tensor, int]:
    """Return the host bytes of the masters and states of each of `updated_parameters`, with all lazy states made."""
    params = unique_storages(param_tensors(chunks, named_modules(chunks)))
    sizes: dict[Tensor, int] = {}
    for mcore in sub_optimizers(optimizer):
        if mcore.is_stub_optimizer:
            continue
        for _, parameter in updated_parameters(mcore):
            kept, storage = list(spec.states.values()), parameter.untyped_storage()
            # A tensor that is not a view of a parameter is itself a master. For views, masters are optimizer states.
            is_master = storage_key(storage) not in params
            if not is_master and parameter.dtype in spec.masters:
                kept.append(spec.masters[parameter.dtype])
            sizes[parameter] = sum(aligned(dtype.itemsize * parameter.numel()) for dtype in kept)
            sizes[parameter] += aligned(storage.nbytes()) if is_master else 0
    return sizes
