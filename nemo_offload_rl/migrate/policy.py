"""Conversions of keys of devices, engine, placement and training, and facts about a model by its name."""

import json
import math
import re
from pathlib import Path

from nemo_offload_rl.generation.vllm.allowed_args import ALLOWED, OWN_KEYS, REFUSED
from nemo_offload_rl.keys.generation import KEPT_LAYERS
from nemo_offload_rl.migrate.draft import Draft, converts
from nemo_offload_rl.models.families import FAMILIES
from nemo_offload_rl.models.towers import WHOLE_MODELS, language_config

_FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
_ROUTER_LOSS = "router_aux_loss_coef"
_AUTOMODEL_KERNELS = (
    *("_target_", "attn", "linear", "rms_norm", "experts", "dispatcher", "enable_deepep"),
    *("enable_hf_state_dict_adapter", "rope_fusion", "enable_fsdp_optimizations", "gate_precision"),
)
# Automodel's routers at commit 24b47e856, which NeMo-RL pins: none is frozen. The first train as Hugging Face's do; the
# second too, but add config.json's auxiliary loss; the others differ as told.
_PLAIN_ROUTERS = ("glm4_moe", "glm4_moe_lite", "minimax_m2", "nemotron_h")
_ROUTERS_WITH_LOSS = ("gpt_oss", "qwen3_5_moe", "qwen3_moe", "qwen3_next")
_OTHER_ROUTERS = {
    "deepseek_v3": "expert biases that move after each step (Automodel's deepseek_v3)",
    "gemma4": "experts with their scale in the weights (Automodel's gemma4)",
}
_KERNELS = ("moe_backend", "kernel_config", "mm_processor_cache_gb")


@converts(
    "cluster.num_nodes cluster.gpus_per_node policy.generation.colocated.resources "
    "policy.generation.colocated.resources.*"
)
def _cluster(draft: Draft) -> None:
    nodes, gpus = draft.number("cluster.num_nodes", 1), draft.number("cluster.gpus_per_node", 1)
    where = "policy.generation.colocated"
    of_engine = "resources.gpus_per_node", "resources.num_nodes"
    engine_gpus, engine_nodes = (draft.number(f"{where}.{name}") for name in of_engine)
    if not draft.samples or draft.get(f"{where}.enabled", True):
        draft.keep("cluster.num_nodes", nodes)
        draft.keep("cluster.gpus_per_node", gpus)
        for name in of_engine:
            if draft.has(f"{where}.{name}"):
                draft.convert(f"{where}.{name}", None, "engines share the trainer's devices")
        return
    note = "the trainer's part of the cluster, without the devices of engines"
    engine_gpus = gpus if engine_gpus is None and nodes > 1 else engine_gpus
    engine_nodes = 1 if engine_nodes is None and nodes == 1 else engine_nodes
    if engine_gpus is None or engine_nodes is None:
        draft.missing(f"{where}.resources", "engines with their own devices but without a size")
        return
    trainer = (nodes, gpus - engine_gpus) if nodes == 1 else (nodes - engine_nodes, gpus)
    draft.convert("cluster.num_nodes", trainer[0], note)
    draft.convert("cluster.gpus_per_node", trainer[1], note)
    draft.keep(f"{where}.resources.gpus_per_node", engine_gpus)
    draft.keep(f"{where}.resources.num_nodes", engine_nodes)


@converts(
    "policy.generation.vllm_cfg.expert_parallel_size",
    algorithms="grpo distillation",
    reads="policy.generation.vllm_cfg.tensor_parallel_size",
)
def _engine_size(draft: Draft) -> None:
    key, of_experts = (f"policy.generation.vllm_cfg.{name}_parallel_size" for name in ("tensor", "expert"))
    size, experts = draft.number(key), draft.number(of_experts, 1)
    if size is not None and size > (draft.number("cluster.gpus_per_node") or size):
        draft.missing(key, "an engine over several hosts")
    if experts not in (1, size or 1):
        draft.missing(of_experts, "engines that share experts (expert_parallel_size above tensor_parallel_size)")
    else:
        draft.keep(of_experts, experts)


_OF_8_BITS = ("use_deep_gemm", *KEPT_LAYERS)


@converts(
    " ".join(f"policy.generation.vllm_cfg.{name}" for name in _OF_8_BITS),
    algorithms="grpo distillation",
    reads="policy.generation.vllm_cfg.precision",
)
def _eight_bit_weights(draft: Draft) -> None:
    section = "policy.generation.vllm_cfg"
    for key in (f"{section}.{name}" for name in _OF_8_BITS if draft.has(f"{section}.{name}")):
        if draft.get(f"{section}.precision") == "fp8":
            draft.keep(key, draft.get(key))
        else:
            draft.ignore(key, "is read with precision: fp8 only")


@converts("policy.generation.vllm_kwargs.*", algorithms="grpo distillation")
def _vllm_kwargs(draft: Draft) -> None:
    section = "policy.generation.vllm_kwargs"
    kept = dict(draft.ours["policy"]["generation"]["vllm_kwargs"])
    for name, value in draft.section(section).items():
        key = f"{section}.{name}"
        if name == "kv_cache_memory_bytes":
            draft.rename(key, "policy.generation.vllm_cfg.kv_cache_memory_gib", draft.number(key, 0) / 2**30, "in GiB")
        elif name == "language_model_only" and value is True:
            draft.ignore(key, "the engine builds the language model alone")
        elif name in _KERNELS:
            draft.ignore(key, "chooses kernels; here vLLM chooses them")
        elif name in ALLOWED and name not in REFUSED and name not in OWN_KEYS:
            kept[name] = value
        else:
            draft.missing(key)
    draft.keep(section, kept)


@converts(
    "policy.generation.top_p policy.generation.top_k policy.generation.val_top_p policy.generation.val_top_k",
    algorithms="grpo distillation",
)
def _top(draft: Draft) -> None:
    for name in ("top_p", "top_k", "val_top_p", "val_top_k"):
        key = f"policy.generation.{name}"
        draft.keep_unless(draft.get(key) == -1, key, None, "null keeps all")


@converts("policy.megatron_cfg.defer_fp32_logits")
def _deferred_logits(draft: Draft) -> None:
    key = "policy.megatron_cfg.defer_fp32_logits"
    is_unused = draft.get(key) and draft.get("policy.logprob_chunk_size") is None
    draft.keep_unless(is_unused, key, False, "needs logprob_chunk_size, which is null; the numbers are the same")


@converts("policy.make_sequence_length_divisible_by")
def _divisible(draft: Draft) -> None:
    key = "policy.make_sequence_length_divisible_by"
    given, megatron = draft.number(key, 1), draft.section("policy.megatron_cfg")
    pieces = 1
    if megatron.get("enabled"):
        context = draft.number("policy.megatron_cfg.context_parallel_size", 1)
        pieces = 2 * context if context > 1 else 1
        if megatron.get("sequence_parallel"):
            pieces *= draft.number("policy.megatron_cfg.tensor_model_parallel_size", 1)
    if int(given) % pieces:
        draft.convert(key, math.lcm(int(given), pieces), "devices share each row in equal parts")
    else:
        draft.keep(key, given)


@converts(
    "policy.megatron_cfg.moe_router_load_balancing_type policy.megatron_cfg.moe_aux_loss_coeff "
    "policy.megatron_cfg.moe_router_bias_update_rate policy.megatron_cfg.moe_router_enable_expert_bias"
)
def _routers(draft: Draft) -> None:
    section, model = "policy.megatron_cfg", draft.get("policy.model_name")
    kind, coefficient, rate, biases = (
        f"{section}.moe_{name}"
        for name in (
            "router_load_balancing_type",
            "aux_loss_coeff",
            "router_bias_update_rate",
            "router_enable_expert_bias",
        )
    )
    if not draft.section(section).get("enabled"):
        return
    given, without_experts = draft.get(kind), has_experts(model) is False
    if given in ("none", None) or without_experts:
        note = "off" if given in ("none", None) else "the model has no experts"
        draft.convert(kind, "none", note) if given not in ("none",) else draft.keep(kind, "none")
        if draft.has(coefficient):
            draft.ignore(coefficient, "there is no auxiliary loss")
    elif draft.get(coefficient) is None:
        draft.missing(kind, "an auxiliary loss of routers whose weight is left to the model (moe_aux_loss_coeff)")
    else:
        draft.keep(kind, given)
        draft.keep(coefficient)
    if not draft.number(rate, 0) or without_experts:
        draft.convert(rate, 0.0, "off, or the model has no experts")
    elif has_expert_biases(model):
        draft.keep(rate)
    else:
        draft.missing(rate, "updates of expert biases (of a model that is not known to have them)")
    if draft.get(biases) and not has_expert_biases(model):
        draft.missing(biases, "biases of experts (of a model that is not known to have them)")
    elif draft.has(biases):
        draft.ignore(biases, "the model's config.json says whether it has them")


@converts("policy.optimizer policy.optimizer.* policy.scheduler policy.scheduler.*")
def _optimizer(draft: Draft) -> None:
    if not draft.get("policy.dtensor_cfg.enabled", False):
        for key in ("policy.optimizer", "policy.scheduler"):
            draft.convert(key, None, "Megatron's is in megatron_cfg")
        return
    optimizer = draft.section("policy.optimizer")
    if optimizer.get("name") == _FUSED_ADAM:
        _fused_adam(draft)
        draft.keep("policy.scheduler", draft.get("policy.scheduler"))
        return
    if not str(optimizer.get("name", "")).startswith("torch.optim."):
        draft.missing("policy.optimizer.name", f"optimizer {optimizer.get('name')}")
        return
    for key in ("name", "kwargs"):
        draft.keep(f"policy.optimizer.{key}", optimizer.get(key, {}))
    entries = draft.get("policy.scheduler")
    draft.keep("policy.scheduler", entries)


def _fused_adam(draft: Draft) -> None:
    """Convert Transformer Engine's AdamW, which with master weights computes as `nemo_offload_rl.optim.AdamW`."""
    section = "policy.optimizer.kwargs"
    given = {"exp_avg_dtype": "float32", "exp_avg_sq_dtype": "float32", **draft.section(section)}
    types = {name: str(given.pop(name)).removeprefix("torch.") for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    kept = {name: given.pop(name) for name in ("lr", "betas", "eps", "weight_decay") if name in given}
    given.pop("store_param_remainders", None)  # a form of the master weights
    if given != {"master_weights": True} or not set(types.values()) <= {"float32", "bfloat16"}:
        draft.missing("policy.optimizer.name", f"optimizer {_FUSED_ADAM} with other arguments")
        return
    note = "parameters are float32, as the master weights there; 16-bit moments are rounded up or down at random"
    draft.convert("policy.optimizer.name", "nemo_offload_rl.optim.AdamW", note)
    draft.convert(section, kept | types, note)


@converts(
    "policy.dtensor_cfg.automodel_kwargs.backend policy.dtensor_cfg.automodel_kwargs.backend.*",
    reads="policy.model_name policy.hf_config_overrides",
)
def _automodel(draft: Draft) -> None:
    """Ignore the kernels of Automodel's models, unless these also train in another way than Hugging Face's."""
    section = "policy.dtensor_cfg.automodel_kwargs.backend"
    if not draft.section(section):
        return
    for name, value in draft.section(section).items():
        if name in _AUTOMODEL_KERNELS or (name == "fake_balanced_gate" and not value):
            draft.ignore(f"{section}.{name}", "kernels and transport of Automodel's models, which change rounding only")
        else:
            draft.missing(f"{section}.{name}", f"Automodel's backend.{name}")
    model, overrides = draft.get("policy.model_name"), draft.section("policy.hf_config_overrides")
    text = draft.section("policy.hf_config_overrides.text_config")
    kind, loss = str(model_type(model)), text.get(_ROUTER_LOSS, overrides.get(_ROUTER_LOSS))
    if has_experts(model) is False or kind in _PLAIN_ROUTERS or (kind in _ROUTERS_WITH_LOSS and loss == 0):
        return
    with_loss = "config.json's auxiliary loss of routers (set router_aux_loss_coef to 0 in hf_config_overrides)"
    unknown = "Automodel's model of a family whose routers are not known to train as Hugging Face's"
    draft.missing(section, with_loss if kind in _ROUTERS_WITH_LOSS else _OTHER_ROUTERS.get(kind, unknown))


@converts(reads="policy.hf_config_overrides.router_aux_loss_coef")
def _router_loss(draft: Draft) -> None:
    """Leave out an auxiliary loss of 0, which config.json of a model's part or of another version may not have."""
    if not draft.get("policy.dtensor_cfg.enabled"):
        return
    for key in ("policy.hf_config_overrides", "policy.hf_config_overrides.text_config"):
        if draft.section(key).get(_ROUTER_LOSS) == 0:
            draft.ignore(f"{key}.{_ROUTER_LOSS}", "routers have no auxiliary loss with this backend")


@converts("policy.megatron_cfg.scheduler.lr_warmup_iters policy.megatron_cfg.scheduler.lr_decay_iters")
def _megatron_schedule(draft: Draft) -> None:
    section = "policy.megatron_cfg.scheduler"
    if not draft.has(section):
        return
    warmup, decay = draft.number(f"{section}.lr_warmup_iters", 0), draft.number(f"{section}.lr_decay_iters")
    draft.keep(f"{section}.lr_warmup_iters", warmup)
    if decay is not None:
        draft.keep(f"{section}.lr_decay_iters", decay)
    elif draft.get(f"{section}.lr_decay_style", "constant") == "constant":
        note = "the rate is constant after the warm-up, so the length of the decay has no effect"
        draft.convert(f"{section}.lr_decay_iters", max(1000, warmup + 1), note)
    else:
        draft.missing(f"{section}.lr_decay_iters", "a decay over the whole run (lr_decay_iters null)")


@converts(
    reads=(
        "policy.dtensor_cfg.lora_cfg.match_all_linear policy.dtensor_cfg.lora_cfg.target_modules "
        "policy.megatron_cfg.peft.exclude_modules"
    )
)
def _adapters(draft: Draft) -> None:
    names = draft.get("policy.megatron_cfg.peft.exclude_modules") or []
    if draft.get("policy.megatron_cfg.peft.enabled") and any("*" in str(name) for name in names):
        draft.missing("policy.megatron_cfg.peft.exclude_modules", "patterns in Megatron's exclude_modules")
    section = "policy.dtensor_cfg.lora_cfg"
    target, every = f"{section}.target_modules", f"{section}.match_all_linear"
    if not draft.get(f"{section}.enabled") or (draft.get(target) and not draft.get(every, False)):
        return
    # Automodel: all linear layers with the output layer, or all except excluded ones; without any key, "*_proj".
    named = ["*"] if draft.get(every, False) or draft.get(f"{section}.exclude_modules") else ["*_proj"]
    draft.convert(target, named, "the layers that Automodel adapts, including the output layer")
    draft.convert(every, False, "true would leave out the output layer here")


@converts(reads="policy.hf_config_overrides.rope_scaling")
def _rope(draft: Draft) -> None:
    key, ours = "policy.hf_config_overrides.rope_scaling", "policy.hf_config_overrides.rope_parameters"
    if not draft.has(key):
        return
    if "rope_theta" in draft.section(key):
        draft.rename(key, ours, dict(draft.section(key)), "the name of transformers 5")
    else:
        draft.missing(key, "rope_scaling without rope_theta (NeMo-RL keeps that of config.json)")


@converts("policy.dtensor_cfg.env_vars policy.dtensor_cfg.env_vars.*")
def _dtensor_environment(draft: Draft) -> None:
    section, reason = "policy.dtensor_cfg.env_vars", "residency controls the CUDA allocator here"
    _environment(draft, section, ("PYTORCH_CUDA_ALLOC_CONF",), reason, "environment variables of DTensor workers")


@converts("policy.generation.vllm_cfg.env_vars policy.generation.vllm_cfg.env_vars.*", algorithms="grpo distillation")
def _engine_environment(draft: Draft) -> None:
    section, reason = (
        "policy.generation.vllm_cfg.env_vars",
        "transport between processes, or choice of vLLM's kernels",
    )
    prefixes = ("NCCL_", "NRL_REFIT_", "VLLM_USE_RAY_", "VLLM_USE_FLASHINFER_MOE_")
    _environment(draft, section, prefixes, reason, "environment variables of the engine")


def _environment(draft: Draft, section: str, prefixes: tuple[str, ...], reason: str, feature: str) -> None:
    """Ignore variables that begin with one of `prefixes`, and report others as missing."""
    for name in draft.section(section):
        if name.startswith(prefixes):
            draft.ignore(f"{section}.{name}", reason)
        else:
            draft.missing(f"{section}.{name}", feature)
    if draft.has(section) and not draft.get(section):
        draft.ignore(section, "sets no variable")


_SAME_NUMBERS = "the same numbers, other memory use"


@converts("policy.dtensor_cfg.cpu_offload")
def _host_held(draft: Draft) -> None:
    key, ours = "policy.dtensor_cfg.cpu_offload", "policy.dtensor_cfg.offload_optimizer_states"
    if not draft.get(key):
        draft.keep(key, False)
        return
    note = f"optimizer states are on the host except around their step; parameters stay on devices: {_SAME_NUMBERS}"
    draft.convert(key, False, note)
    draft.fill(ours, True, "replaces cpu_offload")


@converts(
    "policy.dtensor_cfg.sequence_parallel policy.dtensor_cfg.context_parallel_size policy.dtensor_cfg.dp_replicate_size"
)
def _splits(draft: Draft) -> None:
    key = "policy.dtensor_cfg.sequence_parallel"
    if draft.get(key) and draft.number("policy.dtensor_cfg.tensor_parallel_size", 1) == 1:
        draft.convert(key, False, "has no effect without tensor parallelism")
    else:
        draft.keep(key, bool(draft.get(key)))
    pieces, again = "policy.dtensor_cfg.context_parallel_size", "policy.dtensor_cfg.activation_checkpointing"
    packs = bool(draft.get("policy.sequence_packing.enabled"))
    if packs and draft.get("policy.dtensor_cfg.enabled") and draft.number(pieces, 1) > 1:
        draft.convert(pieces, 1, f"packed rows are not split over devices: {_SAME_NUMBERS}")
        draft.convert(again, True, "replaces the splitting of rows")
    else:
        draft.keep(pieces, draft.number(pieces, 1))
    copies = "policy.dtensor_cfg.dp_replicate_size"
    if draft.has(copies):
        draft.ignore(copies, f"parameters are sharded over all devices here, not over groups: {_SAME_NUMBERS}")


@converts("policy.megatron_cfg.use_fused_linear_logprobs")
def _fused_logprobs(draft: Draft) -> None:
    key, ours = "policy.megatron_cfg.use_fused_linear_logprobs", "policy.logprob_chunk_size"
    if not draft.has(key):
        return
    if draft.get(key) and draft.number(ours) is None:
        size = draft.number("policy.megatron_cfg.fused_linear_logprobs_chunk_size", 256)
        draft.convert(ours, size, "replaces the fused kernel, which never holds all logits either")
    draft.ignore(key, "a kernel that computes the same logprobs")


@converts(reads="policy.megatron_cfg.moe_token_dispatcher_type")
def _dispatcher(draft: Draft) -> None:
    key = "policy.megatron_cfg.moe_token_dispatcher_type"
    experts = draft.number("policy.megatron_cfg.expert_model_parallel_size", 1)
    is_other = draft.get(key) == "flex" or (draft.get(key) == "allgather" and experts > 1)
    draft.keep_unless(is_other, key, "alltoall", "another way to send tokens to their experts; the same numbers")


_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Patterns of names of published models, and `model_type` in their config.json; the first that matches counts.
_TYPES = (
    (r"Qwen3-\d+B-A\d+B|Qwen3-235B", "qwen3_moe"),
    (r"Qwen3-[\d.]+B", "qwen3"),
    (r"Qwen3-VL-\d+B-A", "qwen3_vl_moe"),
    (r"Qwen3-VL-", "qwen3_vl"),
    (r"Qwen2\.5-(Math-)?[\d.]+B|DeepSeek-R1-Distill-Qwen-1\.5B|DeepSeek-R1-Distill-Qwen-7B", "qwen2"),
    (r"Llama-3(\.[1-3])?-(Tulu-3-)?\d+B(?!-Vision)|DeepSeek-R1-Distill-Llama", "llama"),
    (r"Mistral-(7B|Nemo)", "mistral"),
    (r"Mistral-Small-3\.[12]|Ministral-3-", "mistral3"),
    (r"SmolLM3", "smollm3"),
    (r"gemma-3-1b", "gemma3_text"),
    (r"gemma-3-\d+b", "gemma3"),
    (r"gemma-4-", "gemma4"),
    (r"gpt-oss", "gpt_oss"),
    (r"Moonlight|DeepSeek-V3|deepseek\.md", "deepseek_v3"),
    (r"Nemotron-(3|Nano|Super)", "nemotron_h"),
    (r"Qwen3\.[56]-\d+B-A\d+B", "qwen3_5_moe"),
    (r"Qwen3\.[56]-", "qwen3_5"),
    (r"Qwen3-Next", "qwen3_next"),
    (r"GLM-4-\d+B-0414", "glm4"),
    (r"GLM-4-9B", "glm"),
    (r"GLM-4\.7-Flash", "glm4_moe_lite"),
    (r"GLM-4\.[5-9]", "glm4_moe"),
    (r"GLM-5", "glm_moe_dsa"),
    (r"MiniMax-M2", "minimax_m2"),
    (r"MiniMax", "minimax"),
)
_WITH_EXPERT_BIASES = ("deepseek_v3", "glm4_moe", "nemotron_h")
_WITHOUT_EXPERTS = (
    *("llama", "qwen2", "qwen3", "qwen3_5", "mistral", "smollm3"),
    *("gemma3", "gemma3_text", "mistral3", "qwen3_vl"),
)


def model_type(model_name: object) -> str | None:
    """Return `model_type` of a local folder's config.json or of a published model; None if it is unknown."""
    if not isinstance(model_name, str):
        return None
    config = Path(model_name).expanduser() / "config.json"
    if config.is_file():
        return str(json.loads(config.read_text(encoding="utf-8")).get("model_type"))
    found = (kind for pattern, kind in _TYPES if re.search(pattern, model_name, re.IGNORECASE))
    return next(found, None)


def has_experts(model_name: object) -> bool | None:
    """Tell whether a local folder or a known family has experts; None if that is unknown."""
    if isinstance(model_name, str) and (config := Path(model_name).expanduser() / "config.json").is_file():
        values = language_config(json.loads(config.read_text(encoding="utf-8")))
        return any(values.get(key) for key in _EXPERT_KEYS)
    return False if model_type(model_name) in _WITHOUT_EXPERTS else None


def has_expert_biases(model_name: object) -> bool:
    """Tell whether a local folder or a published model is known to choose experts with expert biases."""
    return model_type(model_name) in _WITH_EXPERT_BIASES


def is_trained(model_name: object, backend: str) -> bool:
    """Tell whether a model is known to be of a family that a backend trains.

    Args:
        model_name: A folder, or a name of the hub.
        backend: "dtensor" or "megatron".
    """
    kind = str(model_type(model_name))
    whole = WHOLE_MODELS.get(kind)
    families = [kind] if whole is None else [family for family, _ in whole.language.values()]
    return all(family in FAMILIES and backend in FAMILIES[family].trained_by for family in families)
