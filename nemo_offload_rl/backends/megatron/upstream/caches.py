"""State that Megatron-core and Transformer Engine keep between passes: caches, and scales of 8-bit layers.

Caches are smaller than the parameters, but fragment memory when parameters leave; 8-bit copies of weights take half the
size of the weights. The next pass recreates all of them.

With `fp8_recipe: delayed` a tensor's scale comes from the largest values of earlier steps, so a resumed run needs the
scales; other recipes keep no state. Transformer Engine saves scales as a pickle (`_extra_state`), and reads it only if
an environment variable allows that. Here they are saved as tensors. Names are those of megatron-core 0.19.2 and
Transformer Engine 2.20.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from nemo_offload_rl.keys.megatron import MegatronFp8Config

_DISPATCHER_TENSORS = (
    "dispatched_indices",
    "dispatched_probs",
    "dispatched_routing_map",
    "local_map",
    "local_probs",
    "num_global_tokens_per_local_expert",
    "pad_offsets",
    "probs",
    "reversed_local_input_permutation_mapping",
    "reversed_mapping_for_combine",
    "routing_map",
    "token_indices",
    "token_probs",
    "tokens_per_expert",
)
_SHARED_EXPERT_TENSORS = ("cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output", "gate_score")
_GEMM_CACHES = ("get_cublas_workspace", "_get_grouped_gemm_setup_workspace", "_get_grouped_cublas_workspace")
_CONTEXT_PARALLEL_CACHES = (
    "_cu_seqlens_info_with_cp_cache",
    "_seq_chunk_ids_cache_for_reordering_before_attn",
    "_seq_chunk_ids_cache_for_reordering_after_attn",
    "_softmax_offset_chunk_ids_cache",
)


def clear_memory_caches(chunks: Sequence[nn.Module]) -> None:
    """Free rotary embeddings, token dispatchers' tensors of the last pass, and Transformer Engine's workspaces.

    Args:
        chunks: The model's chunks. No pass may be open, since a backward pass reads some of these tensors.
    """
    clear_rotary_caches(chunks)
    clear_dispatchers(chunks)
    clear_workspaces()


def clear_rotary_caches(chunks: Sequence[nn.Module]) -> None:
    """Free rotary embeddings: up to 32 lengths are kept, and with packing each micro-batch has another length."""
    for module in _modules(chunks):
        if isinstance(module, RotaryEmbedding):
            # The method has one cache for all instances of the class.
            _cache_of(type(module).forward).cache_clear()
        elif isinstance(module, GPTModel):
            vars(module)["rotary_pos_emb_cache"].clear()


def clear_dispatchers(chunks: Sequence[nn.Module]) -> None:
    """Free routing maps, probabilities and permutations of the last pass in every mixture-of-experts layer."""
    for module in _modules(chunks):
        if isinstance(module, MoELayer):
            dispatcher = module.token_dispatcher
            # The flexible dispatcher keeps its tensors in a communication manager.
            for owner in (dispatcher, vars(dispatcher).get("_comm_manager")):
                _forget(owner, _DISPATCHER_TENSORS)
        elif isinstance(module, SharedExpertMLP):
            _forget(module, _SHARED_EXPERT_TENSORS)


def forget_failed_pass(chunks: Sequence[nn.Module]) -> None:
    """Free the activations of a pass that raised, which its layers would keep until they run again.

    A layer keeps its activations, and through them the graph of all layers before it, from the start of its MLP to the
    end, and while their recomputation is due.
    """
    clear_dispatchers(chunks)
    for module in _modules(chunks):
        if isinstance(module, TransformerLayer):
            module.mlp_norm_manager = None
        for checkpoint in vars(module).values():
            if isinstance(checkpoint, CheckpointWithoutOutput):
                checkpoint.ctx = checkpoint.outputs = checkpoint.run_function = None


def clear_workspaces() -> None:
    """Free Transformer Engine's workspaces of matrix products (32 MiB each on Hopper), placeholders, index buffers."""
    gemm = sys.modules.get("transformer_engine.pytorch.cpp_extensions.gemm")
    if gemm is not None:
        for name in _GEMM_CACHES:
            _cache_of(vars(gemm)[name]).cache_clear()
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is not None:
        vars(base)["_dummy_wgrads"].clear()
    permutation: Any = sys.modules.get("transformer_engine.pytorch.permutation")
    if permutation is not None:
        permutation._moe_permute_index_map_workspace = None
        permutation._moe_permute_index_map_max_expanded_token_num = 0
    ring = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.context_parallel")
    if ring is not None:
        for name in _CONTEXT_PARALLEL_CACHES:
            vars(ring)[name].clear()


def clear_fp8_caches(chunks: Sequence[nn.Module]) -> None:
    """Free the 8-bit copies of weights that Transformer Engine keeps between micro-batches."""
    base: Any = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is None:
        return
    for module in _modules(chunks):
        if isinstance(module, base.TransformerEngineBaseModule):
            vars(module)["_fp8_workspaces"].clear()


def _modules(chunks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for chunk in chunks:
        yield from chunk.modules()


def _forget(owner: Any, names: Sequence[str]) -> None:
    """Set attributes that hold tensors to None."""
    if owner is None:
        return
    held = vars(owner)
    for name in names:
        if name in held and isinstance(held[name], Tensor):
            setattr(owner, name, None)


def _cache_of(function: Any) -> functools._lru_cache_wrapper[Any]:
    if not isinstance(function, functools._lru_cache_wrapper):
        raise TypeError(f"{function!r} no longer keeps a cache; adapt this module to the installed release")
    return function


def keeps_scales(cfg: MegatronFp8Config) -> bool:
    """Return whether training depends on the scales of earlier steps."""
    return cfg.enabled and cfg.fp8_recipe == "delayed"


def fp8_scales(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """Copy scales and histories of largest values to the CPU, by layer; a layer has none before its first pass."""
    found = {}
    for name, layer in _engine_layers(chunks):
        by_direction = layer.get_fp8_meta_tensors()
        if by_direction is not None:
            on_cpu = {key: [tensor.cpu() for tensor in tensors] for key, tensors in by_direction.items()}
            found[name] = {"num_gemms": layer.fp8_meta["num_gemms"], "tensors": on_cpu}
    return found


def set_fp8_scales(chunks: Sequence[nn.Module], saved: Mapping[str, Any], recipe: Any) -> None:
    """Restore the result of `fp8_scales`.

    Args:
        chunks: The model.
        saved: Scales and histories by layer.
        recipe: Transformer Engine's recipe for the next pass.
    """
    for name, layer in _engine_layers(chunks):
        if name in saved:
            layer.fp8_meta |= {"num_gemms": saved[name]["num_gemms"], "recipe": recipe}
            layer.init_fp8_meta_tensors(recipe)
            layer.reset_fp8_meta_tensors(saved[name]["tensors"])


def _engine_layers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    base: Any = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is None:
        return
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, base.TransformerEngineBaseModule):
                yield f"{index}/{name}", module
