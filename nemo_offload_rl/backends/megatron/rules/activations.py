"""Rules on the Megatron backend's activation offloading, recomputation and CUDA graphs.

Megatron-core's own front ends check some of this, but a worker that builds the model itself does not use them.
Unchecked mistakes fail deep inside a training step, or silently move nothing.
"""

from collections.abc import Sequence

from nemo_offload_rl.backends.hf.model_folder import local_model_config
from nemo_offload_rl.backends.megatron.rules.base import megatron_rules
from nemo_offload_rl.backends.megatron.supported import KEY
from nemo_offload_rl.keys.master import RunConfig
from nemo_offload_rl.keys.megatron import OFFLOAD_VARIABLE, MegatronConfig
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.utils.config import nearest_key

SWITCH = f"{KEY}.fine_grained_activation_offloading"
DENSE_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
EXPERT_MODULES = ("expert_fc1", "moe_act")
EXPERT_RECOMPUTATION = ("moe", "moe_act", "shared_experts")
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "mla_up_proj", "moe", "moe_act", "shared_experts")


def _offloaded(megatron: MegatronConfig) -> set[str]:
    """Return the modules whose activations are offloaded."""
    return {*(megatron.offload_modules or ())} if megatron.fine_grained_activation_offloading else set()


def activation_offloading_names_its_modules(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`fine_grained_activation_offloading` needs `offload_modules`."""
    if megatron.fine_grained_activation_offloading and not megatron.offload_modules:
        return (
            f"{SWITCH} is true, but offload_modules names nothing to move; set it, for instance to "
            "[core_attn,attn_proj]"
        )
    return None


def activation_offloading_knows_its_modules(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`offload_modules` has names of modules that megatron-core offloads."""
    return _unknown_name("offload_modules", megatron.offload_modules or (), (*DENSE_MODULES, *EXPERT_MODULES))


def recomputation_knows_its_modules(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`recompute_modules` has names of modules that megatron-core recomputes."""
    return _unknown_name("recompute_modules", megatron.recompute_modules or (), RECOMPUTE_MODULES)


def recomputed_modules_exist(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Selective recomputation names at least one module, and the model has each of them."""
    model = local_model_config(cfg)
    if not megatron.activation_checkpointing or megatron.recompute_granularity != "selective":
        return None
    if megatron.recompute_modules == ():
        return (
            f"{KEY}.recompute_modules is empty, but recompute_granularity is selective, which recomputes the modules "
            "named there; set it, for instance to [mlp], or to null for [core_attn]"
        )
    if "moe_act" in (megatron.recompute_modules or ()) and megatron.transformer_impl == "local":
        return (
            f"{KEY}.recompute_modules has moe_act, but megatron-core recomputes it only if one kernel computes all "
            "experts, and transformer_impl is local; set that to transformer_engine, or name moe"
        )
    if model is None:
        return None
    lacks = {"mla_up_proj": "latent attention"} if "kv_lora_rank" not in model else {}
    if not ModelShape.of(model).num_experts:
        lacks |= dict.fromkeys(EXPERT_RECOMPUTATION, "experts")
    for name in megatron.recompute_modules or ():
        if name in lacks:
            return (
                f"{KEY}.recompute_modules has {name}, but config.json of {cfg.policy.model_name} has no "
                f"{lacks[name]}; remove it"
            )
    return None


def offloaded_projection_needs_its_attention(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`offload_modules` with `attn_proj` needs `core_attn` too."""
    modules = _offloaded(megatron)
    if "attn_proj" in modules and "core_attn" not in modules:
        return (
            f"{KEY}.offload_modules has attn_proj without core_attn, but the input of attn_proj is the output of "
            "core_attn; add core_attn"
        )
    return None


def offloaded_experts_exist(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`offload_modules` of experts need a mixture-of-experts model."""
    model = local_model_config(cfg)
    found = sorted(_offloaded(megatron) & {*EXPERT_MODULES})
    if found and model is not None and ModelShape.of(model).num_experts == 0:
        return (
            f"{KEY}.offload_modules has {' and '.join(found)}, but config.json of {cfg.policy.model_name} has no "
            "experts; remove it"
        )
    return None


def offloaded_norms_exist(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`offload_modules` has no norm that Transformer Engine computes inside the product after it."""
    model, modules = local_model_config(cfg), _offloaded(megatron)
    if model is None:
        return None
    fused = [
        ("attn_norm", "qkv_linear", "kv_lora_rank" not in model),
        ("mlp_norm", "core_attn", ModelShape.of(model).num_experts == 0),
    ]
    for name, instead, is_fused in fused:
        if is_fused and name in modules:
            return (
                f"{KEY}.offload_modules has {name}, but in this model Transformer Engine computes that norm inside the "
                f"product after it, so nothing would move; remove it, or name {instead}"
            )
    return None


def activation_offloading_needs_transformer_engine(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`fine_grained_activation_offloading` needs `transformer_impl: transformer_engine`."""
    if megatron.fine_grained_activation_offloading and megatron.transformer_impl != "transformer_engine":
        return (
            f"{SWITCH} is true, but it works only in Transformer Engine's layers and transformer_impl is "
            f"{megatron.transformer_impl}; set that to transformer_engine, or fine_grained_activation_offloading to "
            "false"
        )
    return None


def activation_offloading_excludes_full_recomputation(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`fine_grained_activation_offloading` excludes recomputing whole layers."""
    recomputes = megatron.activation_checkpointing and megatron.recompute_granularity == "full"
    if megatron.fine_grained_activation_offloading and recomputes:
        return (
            f"{SWITCH} is true, but activation_checkpointing with recompute_granularity full keeps no activations that "
            "could be offloaded; set recompute_granularity to selective, or one of the first two to false"
        )
    return None


def recomputed_modules_are_not_offloaded(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """A module is offloaded or recomputed, not both."""
    if not megatron.activation_checkpointing:
        return None
    recomputed = {"core_attn"} if megatron.recompute_modules is None else {*megatron.recompute_modules}
    modules = _offloaded(megatron)
    if "moe" in recomputed and modules & {*EXPERT_MODULES}:
        return (
            f"{KEY}.offload_modules has modules inside the experts, but recompute_modules has moe, which drops their "
            "activations; remove one of them"
        )
    if both := sorted(recomputed & modules):
        return (
            f"{KEY}.offload_modules and recompute_modules (null stands for core_attn) both have {' and '.join(both)}, "
            "but recomputed activations are not kept; remove it from one of them"
        )
    return None


def offload_variable_is_left_alone(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`env_vars` does not change the environment variable that activation offloading needs."""
    value = (megatron.env_vars or {}).get(OFFLOAD_VARIABLE, "1")
    if megatron.fine_grained_activation_offloading and value != "1":
        return (
            f"{KEY}.env_vars.{OFFLOAD_VARIABLE} is {value}, but fine_grained_activation_offloading needs 1, and "
            "workers set that themselves; remove it"
        )
    return None


def megatron_cuda_graphs_are_off(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`cuda_graph_impl` is `none`, since offloaded memory comes back at other addresses."""
    if megatron.cuda_graph_impl != "none":
        return (
            f"{KEY}.cuda_graph_impl is {megatron.cuda_graph_impl}, but a captured graph holds the addresses of "
            "parameters and activations, and those change when they come back from the host; set it to none"
        )
    return None


def _unknown_name(key: str, names: Sequence[str], known: tuple[str, ...]) -> str | None:
    for name in names:
        if name not in known:
            near = nearest_key(name, known)
            hint = f"did you mean {near}?" if near else f"use some of {', '.join(known)}"
            return f"{KEY}.{key} has {name}, which is not the name of a module there; {hint}"
    return None


RULES = megatron_rules(__name__)
