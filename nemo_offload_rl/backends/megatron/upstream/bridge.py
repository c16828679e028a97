"""Completes Megatron-Bridge 0.6.2: settings of some families, and names of parameters that it does not map.

All bridges map the experts of Transformer Engine's grouped layers, but only some map those of Megatron-core's local
layers, which have one module for each expert. Qwen3-MoE's bridge lacks dense layers between layers with experts.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from fnmatch import fnmatch
from functools import partial, wraps
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from nemo_offload_rl.backends.hf.weight_files import LanguageModelFiles, WeightFiles
from nemo_offload_rl.backends.megatron.upstream.hybrid import complete_hybrid
from nemo_offload_rl.backends.megatron.upstream.local_layers import local_block

_DENSE = "decoder.layers.*.mlp.linear_fc"
_GROUPED, _LOCAL = ".mlp.experts.linear_", ".mlp.experts.local_experts.*.linear_"


def complete_provider(provider: Any, hf_config: Any) -> None:
    """Set fields of the bridge's provider.

    Args:
        provider: The provider, with the run's settings already applied.
        hf_config: The model's config.
    """
    completions = {
        "deepseek_v2": _set_latent_attention,
        "deepseek_v3": _set_latent_attention,
        "exaone_moe": _set_biases_and_rotation,
        "glm4_moe": _set_shared_experts,
        "glm4_moe_lite": _set_latent_attention,
        "minimax_m2": _set_whole_norms,
        "nemotron_h": complete_hybrid,
        "olmoe": _set_whole_norms,
        "qwen3_moe": _set_dense_layers,
    }
    if hf_config.model_type in completions:
        completions[hf_config.model_type](provider, hf_config)


def _set_dense_layers(provider: Any, hf_config: Any) -> None:
    """Set the dense layers of Qwen3-MoE between its layers with experts, which the bridge ignores."""
    step, dense = hf_config.decoder_sparse_step, hf_config.mlp_only_layers or ()
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(hf_config.num_hidden_layers)]
    if not all(has_experts):
        provider.moe_layer_freq = [int(has) for has in has_experts]
        if provider.transformer_layer_spec is not local_block:
            provider.transformer_layer_spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)


def _set_whole_norms(provider: Any, hf_config: Any) -> None:
    """Set norms over all heads of queries and of keys: the bridge's norm for OLMoE assumes as many keys as queries."""
    from megatron.bridge.models.minimax_m2.minimax_m2_provider import FullDimKNorm, FullDimQNorm

    def set_norms(attention: Any) -> None:
        attention.module = SelfAttention
        attention.submodules.q_layernorm, attention.submodules.k_layernorm = FullDimQNorm, FullDimKNorm

    _change_attention(provider, set_norms)


def _change_attention(provider: Any, change: Callable[[Any], None]) -> None:
    """Change the spec of each layer's attention in place, whenever the provider makes specs."""
    make_layers = provider.transformer_layer_spec

    @wraps(make_layers)
    def make_changed_layers(*args: Any, **kwargs: Any) -> Any:
        layers = make_layers(*args, **kwargs)
        for layer in getattr(layers, "layer_specs", None) or [layers]:
            change(layer.submodules.self_attention)
        return layers

    provider.transformer_layer_spec = make_changed_layers


def _set_biases_and_rotation(provider: Any, hf_config: Any) -> None:
    """Enable the biases of EXAONE's experts and, in models without windows, rotation in all layers."""
    provider.moe_router_enable_expert_bias = True
    if hf_config.sliding_window is None:
        provider.no_rope_freq = None


def _set_shared_experts(provider: Any, hf_config: Any) -> None:
    """Set the size of all shared experts of a layer together: the bridge for GLM-4.5 has the size of one."""
    provider.moe_shared_expert_intermediate_size = hf_config.n_shared_experts * hf_config.moe_intermediate_size


def _set_latent_attention(provider: Any, hf_config: Any) -> None:
    """Set rotary embeddings that accept frequencies and have no fused kernel, and the factor of attention scores."""
    rope = hf_config.rope_parameters
    provider.rope_type = "rope"
    provider.apply_rope_fusion = False
    provider.rotary_scaling_factor = rope.get("factor") or 1.0
    provider.mscale_all_dim = rope.get("mscale_all_dim") or 0.0
    provider.num_query_groups = provider.num_attention_heads
    if provider.q_lora_rank is None:
        _change_attention(provider, _project_plainly)


def _project_plainly(attention: Any) -> None:
    attention.module = PlainQueries


class PlainQueries(MLASelfAttention):
    """Latent attention with queries projected from hidden states, as in DeepSeek-V2-Lite and Moonlight.

    Megatron-core 0.19.2 would put a norm before this projection, which the models do not have.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        like_others = copy(self.config)
        like_others.q_lora_rank = self.config.kv_lora_rank  # only asked whether it is None
        found = QKNormConfigResolver(like_others, submodules).resolve()
        queries = {"linear_q_proj": submodules.linear_q_proj, "linear_q_up_proj": IdentityOp, "q_layernorm": IdentityOp}
        return {**found, **queries}


def complete_bridge(auto_bridge: Any) -> Any:
    """Return a subclass of Megatron-Bridge's `AutoBridge` that also converts this module's parameters."""

    class CompleteBridge(auto_bridge):
        @property
        def _model_bridge(self) -> Any:
            bridge = super()._model_bridge
            own_registry = bridge.mapping_registry

            def mapping_registry() -> Any:
                registry = own_registry()
                return type(registry)(*registry.mappings, *_missing(registry.mappings))

            bridge.mapping_registry = mapping_registry
            return bridge

    return CompleteBridge


def _missing(mappings: list[Any]) -> Iterator[Any]:
    known = {mapping.megatron_param for mapping in mappings}
    for mapping in mappings:
        name = mapping.megatron_param
        if _GROUPED in name and name.endswith("*"):
            local = name.replace(_GROUPED, _LOCAL).removesuffix("*")
            if local not in known:
                yield _renamed(mapping, local)
    if any(_GROUPED in name for name in known) and _DENSE + "1.weight" not in known:
        yield from _dense_layers()


def _dense_layers() -> Iterator[Any]:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

    place = "model.layers.*"
    gate, up = (f"{place}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    yield GatedMLPMapping(f"{_DENSE}1.weight", gate=gate, up=up)
    yield AutoMapping(f"{_DENSE}2.weight", f"{place}.mlp.down_proj.weight")
    yield AutoMapping(f"{_DENSE}1.layer_norm_weight", f"{place}.post_attention_layernorm.weight")


def _renamed(mapping: Any, name: str) -> Any:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

    kind: Any = type(mapping)
    if issubclass(kind, GatedMLPMapping):
        return kind(name, **mapping.hf_param)
    if not issubclass(kind, AutoMapping):
        raise TypeError(f"{mapping} of {mapping.megatron_param} is no mapping of one tensor or of two halves")
    options = [mapping.transpose_on_export] if hasattr(mapping, "transpose_on_export") else []
    return kind(name, mapping.hf_param, mapping.permute_dims, *options)


class PlainWeights:
    """The bridge's source of a model's tensors (a `StateSource`); tensors of 8 or 4 bits are read as bfloat16.

    Args:
        files: The model's files.
    """

    def __init__(self, files: WeightFiles | LanguageModelFiles) -> None:
        self._files = files

    def get_all_keys(self) -> list[str]:
        """Return the tensors' names."""
        return sorted(self._files.shapes)

    def load_tensors(self, keys: Sequence[str]) -> dict[str, Any]:
        """Read whole tensors."""
        return {key: self._files.read_whole(key) for key in keys}

    def has_glob(self, pattern: str) -> bool:
        """Tell whether a name fits a pattern."""
        return any(fnmatch(name, pattern) for name in self._files.shapes)
