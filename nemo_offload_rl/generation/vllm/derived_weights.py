"""What vLLM computes from weights once after loading. A refit writes parameters, and would leave it as it was."""

from __future__ import annotations

from torch import nn

from nemo_offload_rl.protocols.refit import RefitError


def check_nothing_is_derived(model: nn.Module) -> None:
    """Refuse a model of which vLLM 0.25.1 keeps packed, quantized, fused or derived weights beside the parameters.

    Scales of an 8-bit KV cache are no reason: without a quantized checkpoint they stay 1.

    Args:
        model: vLLM's model.

    Raises:
        RefitError: With the module and the reason.
    """
    for name, module in model.named_modules():
        reason = _derived(module)
        if reason is not None:
            raise RefitError(
                f"The engine cannot take new weights: {name} {reason} once after loading, which no refit renews; "
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
    if isinstance(method, QuantizeMethodBase) and type(method) not in (
        UnquantizedLinearMethod,
        UnquantizedEmbeddingMethod,
    ):
        return f"computes what {type(method).__name__} needs"
    return None
