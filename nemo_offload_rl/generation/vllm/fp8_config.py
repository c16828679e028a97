"""Chooses the layers that an engine keeps in 8 bits; vLLM imports the module in every process with a worker.

The engine is built as for a checkpoint in the format of DeepSeek-V3: e4m3 weights with one float32 scale for each
block of 128 x 128 elements, and inputs that are quantized in groups of 128. Embedding, output layer, norms and routers
stay in bfloat16. `fp8_loading.py` quantizes what a refit brings; without refits (an evaluation) vLLM's own methods
quantize what it loads, to the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerBlockOnlineMoEMethod,
)

from nemo_offload_rl.generation.vllm.fp8_loading import METHOD

_ROUTERS = ("gate", "router", "shared_expert_gate")  # vLLM 0.25.1 would quantize some routers
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@register_quantization_config(METHOD)
class RefitFp8Config(Fp8Config):
    """Block-wise 8-bit weights, as `quantization_config` of the model's config describes them.

    Attributes:
        kept_layers: Numbers of layers that stay in bfloat16.
        kept_names: Parts of names of modules that stay in bfloat16.
        of_files: vLLM quantizes weights of files as it loads them; there are no refits.
    """

    kept_layers: frozenset[int] = frozenset()
    kept_names: tuple[str, ...] = ()
    of_files: bool = False

    @classmethod
    def get_name(cls) -> Any:
        return METHOD

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability, times ten, of the first GPUs that multiply 8-bit matrices."""
        return 89

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RefitFp8Config:
        """See `QuantizationConfig`; `config` comes from `fp8_loading.quantization`."""
        found: Any = super().from_config(config)  # of this class
        found.kept_layers = frozenset(config["kept_layers"])
        found.kept_names = tuple(config["kept_names"])
        found.of_files = config["of_files"]
        return found

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """See `QuantizationConfig`. Attention has no method, so scales of an 8-bit KV cache do not come from here."""
        if not isinstance(layer, (LinearBase, RoutedExperts)):
            return None
        is_linear = isinstance(layer, LinearBase)
        if self._keeps(prefix):
            return UnquantizedLinearMethod() if is_linear else UnquantizedFusedMoEMethod(layer.moe_config)
        if not self.of_files:
            return super().get_quant_method(layer, prefix)
        return Fp8PerBlockOnlineLinearMethod() if is_linear else Fp8PerBlockOnlineMoEMethod(layer=layer)

    def _keeps(self, prefix: str) -> bool:
        """Tell whether a module stays in bfloat16: a router, or a named one; a fused one if a part of it is named."""
        if prefix.rpartition(".")[2] in _ROUTERS:
            return True
        if (found := _LAYER.search(prefix)) is not None and int(found[1]) in self.kept_layers:
            return True
        return any(name in one for one in self._names(prefix) for name in self.kept_names)

    def _names(self, prefix: str) -> Iterable[str]:
        """Name of a module, and of its parts in the checkpoint if it is fused."""
        place, _, own_name = prefix.rpartition(".")
        return prefix, *(f"{place}.{part}" for part in self.packed_modules_mapping.get(own_name, ()))
