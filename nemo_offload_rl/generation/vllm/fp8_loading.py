"""Quantizes the weights of a refit, in the worker that receives them, for layers that an engine keeps in 8 bits.

The policy sends 16- or 32-bit weights, as to any engine. The receiver quantizes, because it knows which layers are in 8
bits: no list of layers has to be sent. On a shared GPU no bytes cross a link. Between GPUs (NCCL) 16-bit weights take
twice the bytes of 8-bit ones.

vLLM's own loaders do the rest: they split, fuse and shard a quantized tensor and its scales as those of a checkpoint
that was quantized block by block. So the weights are bit for bit those of an engine that loads such a checkpoint, and
they are written in place: CUDA graphs and sleep mode do not see a difference. vLLM's `layerwise` reload would allocate
a second copy of each layer and keep references to buffers that the sender overwrites.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from nemo_offload_rl.generation.vllm.write_recorder import reads_not_counted

METHOD = "fp8_refit"
"""Name under which vLLM knows `fp8_config.RefitFp8Config`."""
BLOCK = 128
"""Rows and columns of a block with one scale."""
SCALES = "_scale_inv"
"""Suffix of a weight's name that makes the name of its scales in vLLM."""
_SMALLEST = 1e-4  # the largest value of a block counts as at least this, as in vLLM
_CHUNK_ELEMENTS = 2**23  # quantized at once
QUANTIZING_BYTES = 12 * _CHUNK_ELEMENTS
"""Temporary device memory of quantizing, about: two float32 copies and the 16-bit and 8-bit ones of a piece."""


def quantization(kept_layers: Sequence[int], kept_names: Sequence[str], *, of_files: bool) -> dict[str, Any]:
    """Return the `quantization_config` of a model whose layers are in 8 bits, all but those named.

    Args:
        kept_layers: Numbers of layers that stay in bfloat16.
        kept_names: Parts of names of modules that stay in bfloat16.
        of_files: vLLM quantizes weights of the model's files, and there are no refits.
    """
    return {
        "quant_method": METHOD,
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "kept_layers": list(kept_layers),
        "kept_names": list(kept_names),
        "of_files": of_files,
    }


@torch.no_grad()
def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize matrices block by block; the same bits as `vllm.utils.deep_gemm.per_block_cast_to_fp8`.

    Args:
        weight: [..., rows, columns], of a floating-point type.

    Returns:
        The e4m3 weights of the same shape, and the float32 scales [..., rows / 128, columns / 128], rounded up, which
        multiply them.
    """
    *stacked, rows, columns = weight.shape
    matrices = weight.reshape(-1, rows, columns)
    rows_at_once = max(1, _CHUNK_ELEMENTS // max(1, columns) // BLOCK) * BLOCK
    at_once = max(1, _CHUNK_ELEMENTS // max(1, rows * columns))
    done = [[_quantize(part) for part in few.split(rows_at_once, dim=1)] for few in matrices.split(at_once)]
    data, scales = (torch.cat([torch.cat([part[i] for part in parts], dim=1) for parts in done]) for i in range(2))
    return data.view(weight.shape), scales.view(*stacked, *scales.shape[1:])


def _quantize(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [number, rows, columns] at once."""
    number, rows, columns = matrices.shape
    padded = nn.functional.pad(matrices, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(number, padded.shape[1] // BLOCK, BLOCK, padded.shape[2] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(2, 4), keepdim=True).float().clamp(_SMALLEST)
    # By a tensor on the same device: CUDA multiplies by the rounded inverse of a number.
    scales = largest / torch.full_like(largest, torch.finfo(torch.float8_e4m3fn).max)
    data = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn)
    return data.view(padded.shape)[:, :rows, :columns].contiguous(), scales[:, :, 0, :, 0]


@dataclass(frozen=True)
class _Quantized:
    """A weight in 8 bits and its scales, by their names in a module."""

    module: nn.Module
    weight: str
    scales: str


class QuantizedWeights:
    """The 8-bit weights of a worker's model; without any, nothing here has an effect.

    vLLM replaces the parameters of such layers after loading by plain ones, which its loaders do not accept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = [
            _Quantized(module, name.removesuffix(SCALES), name)
            for module in model.modules()
            if is_quantized(module)
            for name, _ in module.named_parameters(recurse=False)
            if name.endswith(SCALES)
        ]

    def release(self) -> None:
        """Return the device memory that quantizing took to the driver; an engine's share does not include it."""
        if self._found and torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextmanager
    def loadable(self) -> Iterator[None]:
        """Let `model.load_weights` take plain weights for the layers in 8 bits, within the `with` block."""
        parameters = [dict(found.module._parameters) for found in self._found]
        try:
            for found in self._found:
                _make_loadable(found)
            yield
        finally:
            for found, before in zip(self._found, parameters, strict=True):
                found.module._parameters.update({name: before[name] for name in (found.weight, found.scales)})


def _make_loadable(found: _Quantized) -> None:
    """Put parameters with vLLM's loaders in the place of a module's, in the same memory."""
    scales, weight = _with_loader(found.module, found.scales), _with_loader(found.module, found.weight)
    weight.weight_loader = partial(_load_quantized, weight.weight_loader, scales)
    found.module._parameters.update({found.weight: weight, found.scales: scales})


def _with_loader(module: nn.Module, name: str) -> Any:
    """Return a parameter's memory as the parameter that vLLM had created, with its class, attributes and loader."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    created = get_layerwise_info(module).restore_metadata[0][name]
    parameter: Any = getattr(module, name).data
    parameter.__class__ = type(created)
    parameter.__dict__ = dict(created.__dict__)
    return restore_layer_refs(parameter, module)


def _load_quantized(loader: Callable[..., Any], scales: Any, *args: Any, **kwargs: Any) -> Any:
    """Quantize a tensor, and have vLLM's loader put it into a weight and its scales; arguments are the loader's."""
    call = signature(loader).bind(*args, **kwargs)
    call.arguments["loaded_weight"], its_scales = quantize_blocks(call.arguments["loaded_weight"])
    result = loader(*call.args, **call.kwargs)
    call.arguments |= {"param": scales, "loaded_weight": its_scales}
    if "weight_name" in call.arguments:  # by which loaders of experts know scales
        call.arguments["weight_name"] += SCALES
    with reads_not_counted():
        scales.weight_loader(*call.args, **call.kwargs)
    return result


def is_quantized(module: nn.Module) -> bool:
    """Tell whether a module of vLLM's model has weights that refits quantize."""
    config: Any = getattr(getattr(module, "quant_method", None), "quant_config", None)
    return config is not None and config.get_name() == METHOD


def derived(module: nn.Module) -> str | None:
    """Say what vLLM's kernel for an 8-bit layer keeps besides the weights as they are loaded; None if nothing.

    Args:
        module: A module for which `is_quantized` is True.
    """
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFp8BlockScaledMMKernel
    from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
    from vllm.model_executor.kernels.linear.scaled_mm.flashinfer import FlashInferFp8DeepGEMMDynamicBlockScaledKernel
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    method: Any = module.quant_method
    if isinstance(module, RoutedExperts):
        backend = method.fp8_backend
        if backend not in (Fp8MoeBackend.TRITON, Fp8MoeBackend.BATCHED_TRITON, Fp8MoeBackend.CPU):
            return f"reformats the weights of its experts for {backend.value}"
    else:
        kernel = method.fp8_linear
        deep_gemm = getattr(kernel, "fallback", kernel)
        plain = (CutlassFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel, DeepGemmFp8BlockScaledMMKernel)
        is_plain = isinstance(kernel, (*plain, FlashInferFp8DeepGEMMDynamicBlockScaledKernel))
        is_plain = is_plain or getattr(kernel, "keeps_weights", False)
        if not is_plain or getattr(deep_gemm, "use_deep_gemm_e8m0", False):
            return f"reformats its 8-bit weights for {type(kernel).__name__}"
    created: Mapping[str, Tensor] = get_layerwise_info(module).restore_metadata[0]
    for name, parameter in module.named_parameters(recurse=False):
        before = created.get(name)
        if before is None or before.shape != parameter.shape or before.dtype != parameter.dtype:
            return f"changes its {name}"
    return None
