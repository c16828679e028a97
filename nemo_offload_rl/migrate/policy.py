"""Keys of devices, engine and training that mean another thing here, or depend on others: one function each."""

from __future__ import annotations

import math

from nemo_offload_rl.generation.vllm.allowed_args import ALLOWED, OWN_KEYS, REFUSED
from nemo_offload_rl.migrate.conversion import Conversion
from nemo_offload_rl.migrate.draft import Draft
from nemo_offload_rl.migrate.model_names import has_experts

_KERNELS = ("moe_backend", "kernel_config", "mm_processor_cache_gb")


def _cluster(draft: Draft) -> None:
    nodes, gpus = draft.number("cluster.num_nodes", 1), draft.number("cluster.gpus_per_node", 1)
    where = "policy.generation.colocated"
    of_engine = "resources.gpus_per_node", "resources.num_nodes"
    engine_gpus, engine_nodes = (draft.number(f"{where}.{name}") for name in of_engine)
    if draft.algorithm != "grpo" or draft.get(f"{where}.enabled", True):
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
    for name in ("top_p", "top_k"):
        key = f"policy.generation.{name}"
        off = {"top_p": (1,), "top_k": (None, -1)}[name]
        if draft.has(key):
            if draft.get(key) in off:
                draft.keep(key, key, None if name == "top_k" else 1.0)
            else:
                draft.missing(key, "logprobs after top-p and top-k")
        key = f"policy.generation.val_{name}"
        if draft.has(key):
            draft.keep(key, key, None if draft.get(key) == -1 else draft.get(key))


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
    kind, rate = "policy.megatron_cfg.moe_router_load_balancing_type", "policy.megatron_cfg.moe_router_bias_update_rate"
    for key, off in ((kind, ("none", None)), (rate, (0, None))):
        if not draft.has(key):
            continue
        if draft.get(key) in off:
            draft.ignore(key, "off, as it always is here")
        elif has_experts(draft.get("policy.model_name")) is False:
            draft.ignore(key, "is about experts, and the model has none")
        else:
            draft.missing(key, "load balancing of experts (of a model that is not known to have none)")


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
    for section in ("policy.dtensor_cfg.lora_cfg", "policy.megatron_cfg.peft"):
        names = draft.get(f"{section}.exclude_modules") or []
        if draft.get(f"{section}.enabled") and any("*" in str(name) for name in names):
            draft.missing(f"{section}.exclude_modules", "patterns in exclude_modules")


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


_GRPO = ("grpo",)
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
        _GRPO,
        ("policy.generation.vllm_cfg.tensor_parallel_size",),
    ),
    Conversion(
        ("policy.generation.vllm_kwargs.*",),
        "any argument of vLLM",
        "those that change neither model, place nor samples; `kv_cache_memory_bytes` is `vllm_cfg.kv_cache_memory_gib`",
        _vllm_kwargs,
        _GRPO,
    ),
    Conversion(
        (
            "policy.generation.top_p",
            "policy.generation.top_k",
            "policy.generation.val_top_p",
            "policy.generation.val_top_k",
        ),
        "logprobs are those after top-p and top-k; -1 is null",
        "logprobs are those before; refused for rollouts unless off",
        _top,
        _GRPO,
    ),
    Conversion(
        ("policy.megatron_cfg.defer_fp32_logits",),
        "is needed for `logprob_chunk_size`",
        "needs it; false without",
        _deferred_logits,
    ),
    Conversion(
        ("policy.megatron_cfg.moe_router_load_balancing_type", "policy.megatron_cfg.moe_router_bias_update_rate"),
        "losses and biases that balance experts",
        "always off; refused unless the model is known to have no experts",
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
        "names of layers, or patterns",
        "names; refused with patterns",
        _adapters,
        reads=("policy.dtensor_cfg.lora_cfg.exclude_modules", "policy.megatron_cfg.peft.exclude_modules"),
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
