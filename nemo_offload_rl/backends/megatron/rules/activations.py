"""Rules on the Megatron backend's activation offloading, recomputation and CUDA graphs.

Megatron-core's own front ends check some of this, but a worker that builds the model itself does not use them.
Unchecked mistakes fail deep inside a training step, or silently move nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_offload_rl.backends.hf.local_config import local_model_config
from nemo_offload_rl.backends.megatron.rules.section import megatron_section
from nemo_offload_rl.keys.master import PolicyRun, Rule
from nemo_offload_rl.keys.megatron import OFFLOAD_VARIABLE, MegatronConfig
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.utils.config import nearest_key

KEY = "policy.megatron_cfg"
DENSE_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
EXPERT_MODULES = ("expert_fc1", "moe_act")
EXPERT_RECOMPUTATION = ("moe", "moe_act", "shared_experts")
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "mla_up_proj", "moe", "moe_act", "shared_experts")


def activation_offloading_names_its_modules(cfg: PolicyRun) -> str | None:
    """Activation offloading names modules."""
    megatron = _offloading(cfg)
    if megatron is not None and not megatron.offload_modules:
        return (
            f"{KEY}.fine_grained_activation_offloading is true, but offload_modules names nothing to "
            "move; set it, for instance to [core_attn,attn_proj]"
        )
    return None


def activation_offloading_knows_its_modules(cfg: PolicyRun) -> str | None:
    """Activation offloading names modules that megatron-core moves."""
    megatron = megatron_section(cfg)
    known = (*DENSE_MODULES, *EXPERT_MODULES)
    return None if megatron is None else _unknown_name("offload_modules", megatron.offload_modules or (), known)


def recomputation_knows_its_modules(cfg: PolicyRun) -> str | None:
    """Recomputation names modules that megatron-core recomputes."""
    megatron = megatron_section(cfg)
    if megatron is None:
        return None
    return _unknown_name("recompute_modules", megatron.recompute_modules or (), RECOMPUTE_MODULES)


def recomputed_modules_exist(cfg: PolicyRun) -> str | None:
    """Recomputation of modules names some, and the model has them."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None or not megatron.activation_checkpointing or megatron.recompute_granularity != "selective":
        return None
    if megatron.recompute_modules == ():
        return (
            f"{KEY}.recompute_modules is empty, but recompute_granularity selective recomputes what it names; set it, "
            "for instance to [mlp], or to null for [core_attn]"
        )
    if "moe_act" in (megatron.recompute_modules or ()) and megatron.transformer_impl == "local":
        return (
            f"{KEY}.recompute_modules has moe_act, but megatron-core recomputes it where one kernel computes all "
            "experts and transformer_impl is local; set that to transformer_engine, or name moe"
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


def offloaded_projection_needs_its_attention(cfg: PolicyRun) -> str | None:
    """The attention's projection is offloaded only together with its core."""
    megatron = _offloading(cfg)
    modules = _modules(megatron)
    if "attn_proj" in modules and "core_attn" not in modules:
        return (
            f"{KEY}.offload_modules has attn_proj without core_attn, but the input of the first is the "
            "output of the second; add core_attn"
        )
    return None


def offloaded_experts_exist(cfg: PolicyRun) -> str | None:
    """Activations of experts are offloaded only in a mixture-of-experts model."""
    model = local_model_config(cfg)
    found = sorted(_modules(_offloading(cfg)) & {*EXPERT_MODULES})
    if found and model is not None and ModelShape.of(model).num_experts == 0:
        return (
            f"{KEY}.offload_modules has {' and '.join(found)}, but config.json of {cfg.policy.model_name} has no "
            "experts; remove it"
        )
    return None


def offloaded_norms_exist(cfg: PolicyRun) -> str | None:
    """Norms are offloaded only where Transformer Engine has not fused them into the product behind them."""
    model, modules = local_model_config(cfg), _modules(_offloading(cfg))
    if model is None:
        return None
    fused = [
        ("attn_norm", "qkv_linear", "kv_lora_rank" not in model),
        ("mlp_norm", "core_attn", ModelShape.of(model).num_experts == 0),
    ]
    for name, instead, is_fused in fused:
        if is_fused and name in modules:
            return (
                f"{KEY}.offload_modules has {name}, but in this model Transformer Engine "
                f"computes that norm inside the product behind it and nothing would move; remove it, or name {instead}"
            )
    return None


def activation_offloading_needs_transformer_engine(cfg: PolicyRun) -> str | None:
    """Activation offloading needs Transformer Engine's layers."""
    megatron = _offloading(cfg)
    if megatron is not None and megatron.transformer_impl != "transformer_engine":
        return (
            f"{KEY}.fine_grained_activation_offloading is true, but it works through Transformer Engine and "
            f"transformer_impl is {megatron.transformer_impl}; set that to transformer_engine or this to false"
        )
    return None


def activation_offloading_excludes_full_recomputation(cfg: PolicyRun) -> str | None:
    """Activation offloading excludes recomputing whole layers."""
    megatron = _offloading(cfg)
    if megatron is None or not megatron.activation_checkpointing:
        return None
    if megatron.recompute_granularity == "full":
        return (
            f"{KEY}.fine_grained_activation_offloading is true, but activation_checkpointing with "
            "recompute_granularity full keeps no activations that could move; set recompute_granularity to selective, "
            "or one of the first two to false"
        )
    return None


def recomputed_modules_are_not_offloaded(cfg: PolicyRun) -> str | None:
    """A module is offloaded or recomputed, not both."""
    megatron = _offloading(cfg)
    if megatron is None or not megatron.activation_checkpointing:
        return None
    recomputed = {"core_attn"} if megatron.recompute_modules is None else {*megatron.recompute_modules}
    modules = _modules(megatron)
    if "moe" in recomputed and modules & {*EXPERT_MODULES}:
        return (
            f"{KEY}.offload_modules has modules inside the experts, but recompute_modules has moe, which "
            "throws their activations away; remove one of them"
        )
    if both := sorted(recomputed & modules):
        return (
            f"{KEY}.offload_modules and recompute_modules (null stands for core_attn) both have {' and '.join(both)}, "
            "but what is computed again need not be kept; remove it from one of them"
        )
    return None


def offload_variable_is_left_alone(cfg: PolicyRun) -> str | None:
    """The environment variable that activation offloading needs is not set to something else."""
    megatron = _offloading(cfg)
    if megatron is None or megatron.env_vars is None or OFFLOAD_VARIABLE not in megatron.env_vars:
        return None
    value = megatron.env_vars[OFFLOAD_VARIABLE]
    if value != "1":
        return (
            f"{KEY}.env_vars.{OFFLOAD_VARIABLE} is {value}, but fine_grained_activation_offloading needs it to be 1 "
            "and the workers set it so; remove it"
        )
    return None


def megatron_cuda_graphs_are_off(cfg: PolicyRun) -> str | None:
    """CUDA graphs are off: the memory that they captured moves."""
    megatron = megatron_section(cfg)
    if megatron is not None and megatron.cuda_graph_impl != "none":
        return (
            f"{KEY}.cuda_graph_impl is {megatron.cuda_graph_impl}, but a captured graph holds the addresses of "
            "parameters and activations, and those change when they come back from the host; set it to none"
        )
    return None


def _offloading(cfg: PolicyRun) -> MegatronConfig | None:
    megatron = megatron_section(cfg)
    return megatron if megatron is not None and megatron.fine_grained_activation_offloading else None


def _modules(megatron: MegatronConfig | None) -> set[str]:
    return set() if megatron is None else {*(megatron.offload_modules or ())}


def _unknown_name(key: str, names: Sequence[str], known: tuple[str, ...]) -> str | None:
    for name in names:
        if name not in known:
            near = nearest_key(name, known)
            hint = f"did you mean {near}?" if near else f"use some of {', '.join(known)}"
            return f"{KEY}.{key} has {name}, which is no module there; {hint}"
    return None


RULES: tuple[Rule[PolicyRun], ...] = (
    activation_offloading_names_its_modules,
    activation_offloading_knows_its_modules,
    recomputation_knows_its_modules,
    recomputed_modules_exist,
    offloaded_projection_needs_its_attention,
    offloaded_experts_exist,
    offloaded_norms_exist,
    activation_offloading_needs_transformer_engine,
    activation_offloading_excludes_full_recomputation,
    recomputed_modules_are_not_offloaded,
    offload_variable_is_left_alone,
    megatron_cuda_graphs_are_off,
)
