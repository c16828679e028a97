"""Builds Megatron model chunks, wrapped for data parallelism, from a Hugging Face folder."""

import copy
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from nemo_offload_rl.backends.alternatives import advice, other_backend
from nemo_offload_rl.backends.delta_kernels import gradients_problem
from nemo_offload_rl.backends.hf.export import load_config
from nemo_offload_rl.backends.megatron.folder_match import ModelFolder, check_names, check_values
from nemo_offload_rl.backends.megatron.lora import add_adapters
from nemo_offload_rl.backends.megatron.supported import (
    adapters_problem,
    missing_kernels,
    states_problem,
    tensor_parallel_problem,
    unsupported,
)
from nemo_offload_rl.backends.megatron.upstream.balancing import (
    ExpertBiases,
    adds_router_loss,
    weigh_losses_by_real_tokens,
)
from nemo_offload_rl.backends.megatron.upstream.bridge import PlainWeights, complete_bridge, complete_provider
from nemo_offload_rl.backends.megatron.upstream.grouped_products import use_grouped_products
from nemo_offload_rl.backends.megatron.upstream.hybrid import process_outputs
from nemo_offload_rl.backends.megatron.upstream.imports import import_auto_bridge
from nemo_offload_rl.backends.megatron.upstream.local_layers import (
    PROVIDER_FIELDS,
    let_experts_add_biases,
    local_block,
)
from nemo_offload_rl.backends.megatron.upstream.packed_attention import check_packed_attention
from nemo_offload_rl.backends.megatron.upstream.rope import (
    check_fusion,
    provider_fields,
    rotation_of,
    set_rotation,
    without_scaling,
)
from nemo_offload_rl.backends.megatron.upstream.storages import wrapped_for_16_bits
from nemo_offload_rl.errors import ConfigError, UserError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.models.families import MEGATRON, state_mixer
from nemo_offload_rl.models.towers import PART_OF
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES

logger = logging.getLogger(__name__)

# Activations for which Megatron-core has a fused kernel with bias; it has none for Gemma's and Nemotron's.
_FUSED_ACTIVATIONS = (F.gelu, F.silu, quick_gelu)


@dataclass(frozen=True)
class BuiltModel:
    """A model and its conversion to Hugging Face's names.

    Attributes:
        chunks: Megatron's data-parallel wrappers, one for each virtual pipeline stage (here always one). A frozen
            model's chunks are not wrapped.
        bridge: Megatron-Bridge's `AutoBridge`.
        hf_config: The Hugging Face config, overrides included.
        config: Megatron's transformer config.
        folder: Source of the weights.
        biases: The experts' biases.
    """

    chunks: Sequence[Any]
    bridge: Any
    hf_config: Any
    config: Any
    folder: ModelFolder
    biases: ExpertBiases


def build_model(settings: PolicySettings, cfg: MegatronConfig, *, is_frozen: bool = False) -> BuiltModel:
    """Load the weights of `policy.model_name` into a Megatron model; every rank calls it.

    A frozen model is not wrapped for data parallelism, since the wrapper allocates gradients.

    Raises:
        UserError: The folder's config or weights cannot be used, or adapters cannot be added to the model.
        ConfigError: The model cannot be converted, or no attention supports its packed rows.
    """
    auto_bridge = complete_bridge(import_auto_bridge())
    hf_config = load_config(settings.model_name, settings.hf_config_overrides)
    _check_config(settings.model_name, hf_config, cfg)
    if not is_frozen:
        check_packed_attention(hf_config.num_attention_heads, settings, cfg)
    rotation = rotation_of(hf_config)
    check_fusion(hf_config, rotation, is_fused=cfg.apply_rope_fusion and cfg.transformer_impl != "local")
    try:
        bridge = auto_bridge.from_hf_pretrained(settings.model_name)
        bridge.hf_pretrained.config = without_scaling(hf_config)
        provider = bridge.to_megatron_provider(load_weights=False)
    except ValueError as error:
        raise UserError(
            f"policy.model_name={settings.model_name} is a model that Megatron-Bridge cannot convert "
            f"({' '.join(str(error).split())}); {advice(hf_config.to_dict(), MEGATRON)}"
        ) from error
    bridge.hf_pretrained.config, is_part = _without_predictions(hf_config), hasattr(hf_config, PART_OF)
    folder = ModelFolder(
        bridge.hf_pretrained.state.source,
        settings.model_name,
        _tied_names(hf_config),
        _predicting_layers(hf_config),
        other_backend(hf_config.to_dict(), MEGATRON),
        hf_config if is_part else None,
    )
    if folder.files.are_packed or is_part:
        bridge.hf_pretrained.state.source = PlainWeights(folder.files)
    _configure(provider, settings, cfg)
    complete_provider(provider, hf_config)
    for name, value in provider_fields(rotation).items():
        setattr(provider, name, value)
    provider.perform_initialization = False  # the folder has all parameters
    provider.register_pre_wrap_hook(partial(_load_weights, bridge=bridge, folder=folder))
    provider.register_pre_wrap_hook(process_outputs)
    if cfg.transformer_impl == "local":
        provider.register_pre_wrap_hook(let_experts_add_biases)
    if cfg.freeze_moe_router:
        provider.register_pre_wrap_hook(_freeze_routers)
    if cfg.peft.enabled:
        if (problem := adapters_problem(cfg, has_experts=bool(provider.num_moe_experts))) is not None:
            raise ConfigError(problem)
        # Follows the hook that loads the weights, which does not support adapters.
        provider.register_pre_wrap_hook(
            partial(add_adapters, settings=cfg.peft, seed=settings.seed, recomputes=cfg.activation_checkpointing)
        )
    provider.finalize()
    with warnings.catch_warnings():
        # The warning recommends a builder that the conversions of 0.6.2 do not use yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        chunks = provider.provide_distributed_model(
            ddp_config=None if is_frozen else _ddp_config(cfg),
            wrap_with_ddp=not is_frozen,
            data_parallel_random_init=False,
            mixed_precision_wrapper=_wrapper_for_16_bits(cfg, is_frozen=is_frozen),
        )
    if not is_frozen:
        hook_in_this_stream(chunks)
    set_rotation(chunks, rotation)
    if cfg.transformer_impl != "local" and not cfg.fp8_cfg.enabled:
        use_grouped_products(chunks)
    config = chunks[0].config
    biases = ExpertBiases(chunks, 0.0 if is_frozen else cfg.moe_router_bias_update_rate)
    if adds_router_loss(cfg):
        weigh_losses_by_real_tokens(chunks)
    if not is_frozen:
        config.no_sync_func = chunks[0].no_sync
        config.finalize_model_grads_func = partial(_finalize_gradients, biases)
    return BuiltModel(chunks, bridge, hf_config, config, folder, biases)


def hook_in_this_stream(chunks: Sequence[Any]) -> None:
    """Recreate the autograd nodes that accumulate gradients in the current stream, in which passes run.

    Megatron-Bridge wraps a model in a separate stream, for CUDA graphs. A node belongs to the stream that created it,
    so each parameter's gradient would need an event to cross streams. Call this before anything else holds the nodes,
    such as an optimizer's views of the parameters.
    """
    for chunk in chunks:
        chunk.grad_accs.clear()  # drops the last references to the old nodes and their hooks
        for parameter in chunk.module.parameters():
            if parameter.requires_grad:
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                node.register_hook(chunk._make_backward_post_hook(parameter))
                chunk.grad_accs.append(node)


def _check_config(model_name: str, hf_config: Any, cfg: MegatronConfig) -> None:
    """Apply the rules on a local folder's config, which run before Ray starts, to models of a hub too."""
    if (reason := unsupported(hf_config.to_dict())) is not None:
        raise ConfigError(f"the model {model_name} has {reason}; {advice(hf_config.to_dict(), MEGATRON)}")
    is_local = cfg.transformer_impl == "local"
    config = hf_config.to_dict()
    problem = tensor_parallel_problem(config, cfg.tensor_model_parallel_size, is_local=is_local)
    if (problem := problem or states_problem(config, cfg) or missing_kernels(config, cfg)) is not None:
        raise ConfigError(problem)
    if not is_local and state_mixer(config) == "GatedDeltaNet" and (problem := gradients_problem()) is not None:
        raise ConfigError(
            f"{problem}; or use policy.dtensor_cfg, which then computes these layers by torch's operations"
        )


def _predicting_layers(hf_config: Any) -> range:
    """Return the layers for multi-token prediction after the model's own; they are neither used nor trained."""
    first = hf_config.num_hidden_layers
    return range(first, first + (getattr(hf_config, "num_nextn_predict_layers", None) or 0))


def _without_predictions(hf_config: Any) -> Any:
    """Copy a config without layers for multi-token prediction, which the bridge would export too (GLM-4.7)."""
    own = copy.deepcopy(hf_config)
    if getattr(own, "num_nextn_predict_layers", None):
        own.num_nextn_predict_layers = 0
    return own


def _tied_names(hf_config: Any) -> tuple[str, str] | None:
    """Return the names of the output layer's and the embeddings' weight if the model ties them, else None."""
    if not hf_config.tie_word_embeddings:
        return None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    ((output, embedding),) = model_class._tied_weights_keys.items()
    return output, embedding


def _load_weights(chunks: list[nn.Module], bridge: Any, folder: ModelFolder) -> list[nn.Module]:
    tasks = bridge.get_conversion_tasks(chunks)
    check_names(folder, tasks)
    try:
        loaded = bridge.load_hf_weights(chunks)
    except (ValueError, RuntimeError) as error:
        # torch's message if heads are split before shapes are compared; other RuntimeErrors come from devices.
        if isinstance(error, RuntimeError) and "is invalid for input of size" not in str(error):
            raise
        raise UserError(
            f"policy.model_name={folder.model_name} has weights whose shapes differ from its config.json "
            f"({' '.join(str(error).split())}); correct config.json or policy.hf_config_overrides"
        ) from error
    check_values(folder, tasks)
    return loaded


def _configure(provider: Any, settings: PolicySettings, cfg: MegatronConfig) -> None:
    """Set the provider's fields, which are fields of Megatron's `TransformerConfig`."""
    dtype = COMPUTE_DTYPES[settings.precision]
    values: dict[str, Any] = {
        "tensor_model_parallel_size": cfg.tensor_model_parallel_size,
        "pipeline_model_parallel_size": cfg.pipeline_model_parallel_size,
        "num_layers_in_first_pipeline_stage": cfg.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": cfg.num_layers_in_last_pipeline_stage,
        "context_parallel_size": cfg.context_parallel_size,
        "expert_model_parallel_size": cfg.expert_model_parallel_size,
        "expert_tensor_parallel_size": cfg.expert_tensor_parallel_size,
        "sequence_parallel": cfg.sequence_parallel,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "params_dtype": dtype,
        "autocast_dtype": dtype,
        "pipeline_dtype": COMPUTE_DTYPES[cfg.pipeline_dtype],
        # Micro-batches vary in width.
        "variable_seq_lengths": cfg.pipeline_model_parallel_size > 1,
        "seq_length": settings.max_total_sequence_length,
        # Losses are already divided by counts of the global batch, so DDP and micro-batches must sum gradients.
        "calculate_per_token_loss": True,
        # Needs kernels of apex.
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "apply_rope_fusion": cfg.apply_rope_fusion,
        "bias_activation_fusion": cfg.bias_activation_fusion and provider.activation_func in _FUSED_ACTIVATIONS,
        "transformer_impl": cfg.transformer_impl,
        "attention_backend": AttnBackend.auto,
        "cuda_graph_impl": cfg.cuda_graph_impl,
        "mtp_num_layers": None,
    }
    if not settings.dropout:
        values |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    values |= _recompute(cfg) | _mixture_of_experts(cfg)
    if cfg.fine_grained_activation_offloading:
        values |= {
            "fine_grained_activation_offloading": True,
            "offload_modules": list(cfg.offload_modules or ()),
            "min_offloaded_tensor_size": cfg.min_offloaded_tensor_size,
            "activation_offload_fraction": cfg.activation_offload_fraction,
        }
    if cfg.fp8_cfg.enabled:
        values |= {"fp8": cfg.fp8_cfg.fp8, "fp8_recipe": cfg.fp8_cfg.fp8_recipe}
    if cfg.transformer_impl == "local":
        values |= PROVIDER_FIELDS | {"transformer_layer_spec": local_block}
    for name, value in values.items():
        setattr(provider, name, value)


def _recompute(cfg: MegatronConfig) -> dict[str, Any]:
    if not cfg.activation_checkpointing:
        return {}
    if cfg.recompute_granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": list(cfg.recompute_modules or ("core_attn",))}


def _mixture_of_experts(cfg: MegatronConfig) -> dict[str, Any]:
    return {
        "moe_router_dtype": cfg.moe_router_dtype,
        "moe_permute_fusion": cfg.moe_permute_fusion,
        "moe_token_dispatcher_type": cfg.moe_token_dispatcher_type,
        "moe_router_load_balancing_type": cfg.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": cfg.moe_aux_loss_coeff if adds_router_loss(cfg) else 0.0,
        "moe_router_bias_update_rate": cfg.moe_router_bias_update_rate,
        "moe_z_loss_coeff": None,
        "moe_shared_expert_overlap": False,
    }


def _ddp_config(cfg: MegatronConfig) -> DistributedDataParallelConfig:
    ddp = cfg.distributed_data_parallel_config
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        use_distributed_optimizer=cfg.optimizer.use_distributed_optimizer,
    )


def _wrapper_for_16_bits(cfg: MegatronConfig, *, is_frozen: bool) -> Any:
    # A frozen model has no flat buffers; without a distributed optimizer there are none for parameters.
    if is_frozen or not cfg.optimizer.use_distributed_optimizer:
        return Float16Module
    return partial(wrapped_for_16_bits, grads_in_fp32=cfg.distributed_data_parallel_config.grad_reduce_in_fp32)


def _freeze_routers(chunks: list[nn.Module]) -> list[nn.Module]:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".router." in name:
                parameter.requires_grad = False
    return chunks


def _finalize_gradients(biases: ExpertBiases, chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce gradients as Megatron does, but without dividing by the number of tokens: losses are already divided."""
    biases.collect()
    finalize_model_grads(chunks, None, **kwargs)
