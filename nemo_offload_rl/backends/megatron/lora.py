"""Low-rank adapters (arXiv 2106.09685) by Megatron-Bridge; only they have gradients and optimizer states.

Adapters are added before the data-parallel wrapper allocates its buffers, so the buffers hold only adapters. Frozen
weights form the state group `base`. The bridge merges adapters in float32 during export.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nemo_offload_rl.backends.hf.export import Adapters
from nemo_offload_rl.backends.megatron.supported import PEFT
from nemo_offload_rl.backends.megatron.upstream.imports import import_lora
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MEGATRON_ADAPTED_LAYERS, MegatronLoraConfig


def add_adapters(chunks: list[nn.Module], settings: MegatronLoraConfig, seed: int, recomputes: bool) -> list[nn.Module]:
    """Add adapters to linear layers in place, and freeze everything else.

    Args:
        chunks: The model with its weights, before it is wrapped.
        settings: Settings with `enabled` true.
        seed: Seed of the adapters' initial values, equal on data-parallel ranks.
        recomputes: Activations are recomputed in the backward pass.

    Returns:
        The same chunks.

    Raises:
        ConfigError: No layer matches the requested names.
    """
    targets = list(settings.target_modules) or [
        name for name in MEGATRON_ADAPTED_LAYERS if name not in settings.exclude_modules
    ]
    adapt = import_lora()(
        target_modules=targets,
        dim=settings.dim,
        alpha=settings.alpha,
        dropout=settings.dropout,
        dropout_position=settings.dropout_position,
        lora_A_init_method=settings.lora_A_init_method,
        lora_B_init_method=settings.lora_B_init_method,
    )
    # GPU values come from Megatron's own random state, which is equal on data-parallel ranks.
    random_state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        adapt(chunks)
    finally:
        torch.default_generator.set_state(random_state)
    if not any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()):
        raise ConfigError(
            f"{PEFT}.target_modules is {', '.join(targets)}, which fits no layer of the model; name some of "
            f"{', '.join(MEGATRON_ADAPTED_LAYERS)}, or leave it empty for all of them"
        )
    if recomputes:
        for chunk in chunks:
            _require_input_gradients(chunk)
    return chunks


def exported_adapters(bridge: Any, chunks: list[nn.Module], settings: MegatronLoraConfig) -> Adapters:
    """Return the adapters for an export; their weights are a collective."""
    exported = bridge.export_adapter_weights(chunks, cpu=False, show_progress=False)
    weights = ((name, value.detach()) for name, value in exported)
    return Adapters(weights, settings.dim, settings.alpha, settings.dropout)


def _require_input_gradients(chunk: Any) -> None:
    """Make the output of frozen embeddings require a gradient.

    Megatron runs a recomputed block's backward pass only if the block's input requires a gradient.
    """

    def mark(_module: nn.Module, _inputs: Any, embedded: Tensor) -> None:
        if torch.is_grad_enabled():
            embedded.requires_grad_()

    chunk.embedding.register_forward_hook(mark)
