"""Keys of devices, engine and training that mean another thing here, or depend on others: one function each."""

from __future__ import annotations

import math

from nemo_offload_rl.generation.vllm.allowed_args import ALLOWED, OWN_KEYS, REFUSED
from nemo_offload_rl.migrate.conversion import Conversion
from nemo_offload_rl.migrate.draft import Draft
from nemo_offload_rl.migrate.model_names import has_expert_biases, has_experts

_KERNELS = ("moe_backend", "kernel_config", "mm_processor_cache_gb")


def _cluster(draft: Draft) -> None:
    nodes, gpus = draft.number("cluster.num_nodes", 1), draft.number("cluster.gpus_per_node", 1)
    where = "policy.generation.colocated"
    of_engine = "resources.gpus_per_node", "resources.num_nodes"
    engine_gpus, engine_nodes = (draft.number(f"{where}.{name}") for name in of_engine)
    if not draft.samples or draft.get(f"{where}.enabled", True):
        draft.keep("cluster.num_nodes", "cluster.num_nodes", nodes)
        draft.keep("cluster.gpus_per_node", "cluster.gpus_per_node", gpus)
        for name in of_engine:
            if draft.has(f"{where}.{name}"):
                draft.convert(f"{where}.{name}", f"{where}.{name}", None, "engines share the trainer's devices")
        return
    note = "the trainer's part of the cluster: engines have theirs beside it"
    engine_gpus = gpus if engine_gpus is None and nodes > 1 else engine_gpus
    engine_nodes = 1 if engine_nodes is None and nodes == 1 else engine_nodes
    if engine_gpus is None or engine_nodes is None:
        draft.missing(f"{where}.resources", "engines of their own without a size")
        return
    trainer = (nodes, gpus - engine_gpus) if nodes == 1 else (nodes - engine_nodes, gpus)
    draft.convert("cluster.num_nodes", "cluster.num_nodes", trainer[0], note)
    draft.convert("cluster.gpus_per_node", "cluster.gpus_per_node", trainer[1], note)
    draft.keep(f"{where}.resources.gpus_per_node", f"{where}.resources.gpus_per_node", engine_gpus)
    draft.keep(f"{where}.resources.num_nodes", f"{where}.resources.num_nodes", engine_nodes)


def _engine_size(draft: Draft) -> None:
    key = "policy.generation.vllm_cfg.tensor_parallel_size"
    size = draft.number(key)
    if size is not None and size > (draft.number("cluster.gpus_per_node") or size):
        draft.missing(key, "an engine over several hosts")


def _vllm_kwargs(draft: Draft) -> None:
    section = "policy.generation.vllm_kwargs"
    kept = dict(draft.ours["policy"]["generation"]["vllm_kwargs"])
    for name, value in draft.section(section).items():
        key = f"{section}.{name}"
        if name == "kv_cache_memory_bytes":
            draft.rename(key, "policy.generation.vllm_cfg.kv_cache_memory_gib", draft.number(key, 0) / 2**30, "in GiB")
        elif name in _KERNELS:
            draft.ignore(key, "which kernels compute, not what; vLLM chooses")
        elif name in ALLOWED and name not in REFUSED and name not in OWN_KEYS:
            kept[name] = value
        else:
            draft.missing(key, f"vllm_kwargs.{name}")
    draft.keep(section, section, kept)


def _top(draft: Draft) -> None:
    for name in ("top_p", "top_k", "val_top_p", "val_top_k"):
        key = f"policy.generation.{name}"
        if draft.has(key):
            if draft.get(key) == -1:
                draft.convert(key, key, None, "null is all")
            else:
                draft.keep(key, key, draft.get(key))


def _deferred_logits(draft: Draft) -> None:
    key = "policy.megatron_cfg.defer_fp32_logits"
    if not draft.has(key):
        return
    if draft.get(key) and draft.get("policy.logprob_chunk_size") is None:
        draft.convert(key, key, False, "is about chunks, and logprob_chunk_size is null; the numbers are the same")
    else:
        draft.keep(key, key, draft.get(key))


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
        draft.convert(key, key, math.lcm(int(given), pieces), "rows are padded to the pieces that devices take")
    else:
        draft.keep(key, key, given)


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
        note = "off" if given in ("none", None) else "is about experts, and the model has none"
        draft.convert(kind, kind, "none", note) if given not in ("none",) else draft.keep(kind, kind, "none")
        if draft.has(coefficient):
            draft.ignore(coefficient, "no auxiliary loss has a weight then")
    elif draft.get(coefficient) is None:
        draft.missing(kind, "an auxiliary loss of routers whose weight is left to the model (moe_aux_loss_coeff)")
    else:
        draft.keep(kind, kind, given)
        draft.keep(coefficient, coefficient, draft.get(coefficient))
    if not draft.number(rate, 0) or without_experts:
        draft.convert(rate, rate, 0.0, "off, or about experts of a model that has none")
    elif has_expert_biases(model):
        draft.keep(rate, rate, draft.get(rate))
    else:
        draft.missing(rate, "updates of expert biases (of a model that is not known to have them)")
    if draft.get(biases) and not has_expert_biases(model):
        draft.missing(biases, "biases of experts (of a model that is not known to have them)")
    elif draft.has(biases):
        draft.ignore(biases, "the model's config.json says whether it has them")


def _optimizer(draft: Draft) -> None:
    if not draft.get("policy.dtensor_cfg.enabled", False):
        for key in ("policy.optimizer", "policy.scheduler"):
            draft.convert(key, key, None, "Megatron has its own, below megatron_cfg")
        return
    optimizer = draft.section("policy.optimizer")
    if not str(optimizer.get("name", "")).startswith("torch.optim."):
        draft.missing("policy.optimizer.name", f"optimizer {optimizer.get('name')}")
        return
    for key in ("name", "kwargs"):
        draft.keep(f"policy.optimizer.{key}", f"policy.optimizer.{key}", optimizer.get(key, {}))
    entries = draft.get("policy.scheduler")
    draft.keep("policy.scheduler", "policy.scheduler", entries)


def _megatron_schedule(draft: Draft) -> None:
    section = "policy.megatron_cfg.scheduler"
    if not draft.has(section):
        return
    warmup, decay = draft.number(f"{section}.lr_warmup_iters", 0), draft.number(f"{section}.lr_decay_iters")
    draft.keep(f"{section}.lr_warmup_iters", f"{section}.lr_warmup_iters", warmup)
    if decay is not None:
        draft.keep(f"{section}.lr_decay_iters", f"{section}.lr_decay_iters", decay)
    elif draft.get(f"{section}.lr_decay_style", "constant") == "constant":
        note = "the rate is constant after the warm-up, so that no decay has a length"
        draft.convert(f"{section}.lr_decay_iters", f"{section}.lr_decay_iters", max(1000, warmup + 1), note)
    else:
        draft.missing(f"{section}.lr_decay_iters", "a decay over the whole run (lr_decay_iters null)")


def _adapters(draft: Draft) -> None:
    names = draft.get("policy.megatron_cfg.peft.exclude_modules") or []
    if draft.get("policy.megatron_cfg.peft.enabled") and any("*" in str(name) for name in names):
        draft.missing("policy.megatron_cfg.peft.exclude_modules", "patterns in Megatron's exclude_modules")
    section = "policy.dtensor_cfg.lora_cfg"
    target, every = f"{section}.target_modules", f"{section}.match_all_linear"
    if not draft.get(f"{section}.enabled") or (draft.get(target) and not draft.get(every, False)):
        return
    # Automodel: all linear layers, the output layer too; or but those that are excluded; or, with no word, "*_proj".
    named = ["*"] if draft.get(every, False) or draft.get(f"{section}.exclude_modules") else ["*_proj"]
    draft.convert(target, target, named, "the layers that Automodel takes, the output layer among them")
    draft.convert(every, every, False, "leaves the output layer out here")


def _rope(draft: Draft) -> None:
    key, ours = "policy.hf_config_overrides.rope_scaling", "policy.hf_config_overrides.rope_parameters"
    if not draft.has(key):
        return
    if "rope_theta" in draft.section(key):
        draft.rename(key, ours, dict(draft.section(key)), "the name of transformers 5")
    else:
        draft.missing(key, "rope_scaling without rope_theta, which stays config.json's there")


def _dtensor_environment(draft: Draft) -> None:
    section = "policy.dtensor_cfg.env_vars"
    for name in draft.section(section):
        if name == "PYTORCH_CUDA_ALLOC_CONF":
            draft.ignore(f"{section}.{name}", "how memory is allocated, which residency decides here")
        else:
            draft.missing(f"{section}.{name}", "environment variables of DTensor workers")
    if draft.has(section) and not draft.get(section):
        draft.ignore(section, "sets none")


_SAMPLING = ("grpo", "distillation")
POLICY: tuple[Conversion, ...] = (
    Conversion(
        (
            "cluster.num_nodes",
            "cluster.gpus_per_node",
            "policy.generation.colocated.resources",
            "policy.generation.colocated.resources.*",
        ),
        "devices of engines of their own are part of `cluster`",
        "they are beside `cluster`, which becomes smaller",
        _cluster,
    ),
    Conversion(
        (),
        "an engine may span hosts",
        "an engine stays on one host; refused otherwise",
        _engine_size,
        _SAMPLING,
        ("policy.generation.vllm_cfg.tensor_parallel_size",),
    ),
    Conversion(
        ("policy.generation.vllm_kwargs.*",),
        "any argument of vLLM",
        "those that change neither model, place nor samples; `kv_cache_memory_bytes` is `vllm_cfg.kv_cache_memory_gib`",
        _vllm_kwargs,
        _SAMPLING,
    ),
    Conversion(
        (
            "policy.generation.top_p",
            "policy.generation.top_k",
            "policy.generation.val_top_p",
            "policy.generation.val_top_k",
        ),
        "-1 is all",
        "null is all",
        _top,
        _SAMPLING,
    ),
    Conversion(
        ("policy.megatron_cfg.defer_fp32_logits",),
        "is needed for `logprob_chunk_size`",
        "needs it; false without",
        _deferred_logits,
    ),
    Conversion(
        (
            "policy.megatron_cfg.moe_router_load_balancing_type",
            "policy.megatron_cfg.moe_aux_loss_coeff",
            "policy.megatron_cfg.moe_router_bias_update_rate",
            "policy.megatron_cfg.moe_router_enable_expert_bias",
        ),
        "are set whether the model has experts or not; a weight that is left out is the model's",
        "are off unless the model has experts, and biases of them; a weight that is left out is refused",
        _routers,
    ),
    Conversion(
        ("policy.optimizer", "policy.optimizer.*", "policy.scheduler", "policy.scheduler.*"),
        "one tick of the schedule for each step of the run",
        "the same",
        _optimizer,
    ),
    Conversion(
        ("policy.megatron_cfg.scheduler.lr_warmup_iters", "policy.megatron_cfg.scheduler.lr_decay_iters"),
        "steps of the run; a decay of null is as long as the run",
        "the same; null only where the rate does not decay",
        _megatron_schedule,
    ),
    Conversion(
        ("policy.make_sequence_length_divisible_by",),
        "packed rows are padded further, to what sequence and context parallelism cut them into",
        "the multiple itself holds those pieces",
        _divisible,
    ),
    Conversion(
        (),
        "every layer, the output layer too, unless `target_modules` or `exclude_modules` say otherwise",
        "`match_all_linear` leaves the output layer out, `target_modules` of `*` does not; Megatron's "
        "`exclude_modules` has no patterns",
        _adapters,
        reads=(
            "policy.dtensor_cfg.lora_cfg.match_all_linear",
            "policy.dtensor_cfg.lora_cfg.target_modules",
            "policy.megatron_cfg.peft.exclude_modules",
        ),
    ),
    Conversion(
        (),
        "goes into the model's configuration, beside its `rope_theta`",
        "`rope_parameters`; refused without a `rope_theta`",
        _rope,
        reads=("policy.hf_config_overrides.rope_scaling",),
    ),
    Conversion(
        ("policy.dtensor_cfg.env_vars", "policy.dtensor_cfg.env_vars.*"),
        "variables of the workers",
        "none; that of the CUDA allocator is left out",
        _dtensor_environment,
    ),
)
