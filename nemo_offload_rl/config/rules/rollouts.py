"""Rules on sampling, engine, data and environments."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from nemo_offload_rl.config.rules.base import DATA_RULES, sources
from nemo_offload_rl.generation.vllm.allowed_args import ALLOWED, OWN_KEYS, REFUSED
from nemo_offload_rl.keys.data import BUILT_IN
from nemo_offload_rl.keys.generation import SERVING_CHAT_KWARGS, engine_devices_problem
from nemo_offload_rl.keys.master import GrpoMasterConfig, RolloutMasterConfig, rules_in
from nemo_offload_rl.utils.sockets import is_loopback


def prompts_leave_room_for_a_response(cfg: RolloutMasterConfig) -> str | None:
    """The longest prompt leaves room for at least one token in the engine and the policy."""
    prompt = cfg.data.max_input_seq_length
    limits = {
        "policy.max_total_sequence_length": cfg.policy.max_total_sequence_length,
        "policy.generation.vllm_cfg.max_model_len": cfg.policy.generation.vllm_cfg.max_model_len,
    }
    for key, limit in limits.items():
        if prompt >= limit:
            return (
                f"data.max_input_seq_length {prompt} is not below {key} {limit}, so a prompt could leave no room for a "
                "response; lower it or raise the limit"
            )
    return None


def rollouts_fit_the_policy(cfg: RolloutMasterConfig) -> str | None:
    """`vllm_cfg.max_model_len` is at most `policy.max_total_sequence_length`."""
    limit, engine = cfg.policy.max_total_sequence_length, cfg.policy.generation.vllm_cfg.max_model_len
    if engine > limit:
        return (
            f"policy.generation.vllm_cfg.max_model_len {engine} is above policy.max_total_sequence_length {limit}, so "
            f"rollouts could be longer than what is trained on; lower it to {limit}"
        )
    return None


def further_turns_answer_something(cfg: RolloutMasterConfig) -> str | None:
    """Rollouts have several turns if and only if an environment answers between them."""
    (name, section), data = cfg.algorithm, cfg.data
    turns = section.max_rollout_turns
    retrying = sorted(name for name, section in cfg.env.items() if section.retry_message is not None)
    answering = {*retrying, *(name for name, env in cfg.env.items() if env.target is not None or name not in BUILT_IN)}
    named = {source.env_name or data.default.env_name for _, source in sources(data.train, "data.train")}
    if turns > 1 and not named.intersection(answering):
        return (
            f"{name}.max_rollout_turns is {turns}, but no environment of data.train answers a response; "
            f"set env.{min(named)}.retry_message, or max_rollout_turns to 1"
        )
    if turns == 1 and retrying:
        return (
            f"env.{retrying[0]}.retry_message is set, but {name}.max_rollout_turns is 1 and leaves no turn to answer "
            "it; raise it, or set retry_message to null"
        )
    return None


def endpoint_can_be_served(cfg: RolloutMasterConfig) -> str | None:
    """An HTTP server needs `async_engine`, and an address that other hosts reach if engines run there."""
    vllm, section = cfg.policy.generation.vllm_cfg, "policy.generation.vllm_cfg"
    if not vllm.expose_http_server:
        if vllm.http_server_serving_chat_kwargs:
            return (
                f"{section}.http_server_serving_chat_kwargs is set, but expose_http_server is false; set that to true, "
                "or the other to null"
            )
        return None
    if not vllm.async_engine:
        return (
            f"{section}.expose_http_server is true, but async_engine is false, and that engine answers only whole "
            "batches, one after the other; set async_engine to true"
        )
    unknown = sorted({*(vllm.http_server_serving_chat_kwargs or {})} - {*SERVING_CHAT_KWARGS})
    if unknown:
        return (
            f"{section}.http_server_serving_chat_kwargs.{unknown[0]} cannot be set; the keys are "
            f"{', '.join(SERVING_CHAT_KWARGS)}; the chat template is that of policy.tokenizer"
        )
    if max(cfg.cluster.num_nodes, cfg.policy.generation.colocated.resources.num_nodes or 1) > 1 and is_loopback(
        vllm.http_server_host
    ):
        return (
            f"{section}.http_server_host={vllm.http_server_host} can be reached only from its own host, but engines "
            "run on several; set it to 0.0.0.0, and the environment variable NEMO_OFFLOAD_RL_TOKEN"
        )
    return None


def rollouts_are_not_greedy(cfg: RolloutMasterConfig) -> str | None:
    """Rollouts are sampled, not greedy."""
    temperature, group = cfg.policy.generation.temperature, cfg.algorithm[1].num_generations_per_prompt
    if temperature == 0:
        told = f"all {group} responses of a group are the same and every advantage is 0"
        told = told if isinstance(cfg, GrpoMasterConfig) else "there is no distribution to learn from"
        return f"policy.generation.temperature is 0, so {told}; set it above 0 (val_temperature may be 0)"
    return None


def vllm_kwargs_are_allowed(cfg: RolloutMasterConfig) -> str | None:
    """`vllm_kwargs` sets nothing that has a key, or that would change the model, its devices or its samples."""
    return vllm_kwargs_problem(cfg.policy.generation.vllm_kwargs, "policy.generation.vllm_kwargs")


def vllm_kwargs_problem(arguments: Mapping[str, Any], key: str) -> str | None:
    """Refuse further arguments of vLLM, given at `key`, that this package sets or does not support."""
    for name in arguments:
        if name in OWN_KEYS:
            return f"{key}.{name} would be set twice; remove it and use {OWN_KEYS[name]}"
        if name in REFUSED:
            return f"{key}.{name} is refused, because {REFUSED[name]}; remove it"
        if name not in ALLOWED:
            near = get_close_matches(name, ALLOWED, n=1)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            return f"{key}.{name} is not an argument of vLLM's engine; {hint}"
    return None


def only_engines_in_8_bits_keep_layers(cfg: RolloutMasterConfig) -> str | None:
    """`use_deep_gemm` and keys of layers that stay in bfloat16 need `vllm_cfg.precision: fp8`."""
    problem = cfg.policy.generation.vllm_cfg.problem_of_precision
    return None if problem is None else f"policy.generation.vllm_cfg.{problem}"


def every_environment_exists(cfg: RolloutMasterConfig) -> str | None:
    """Every environment that data names is in `env`."""
    data = cfg.data
    for where, section in (("train", data.train), ("validation", data.validation)):
        for place, source in sources(section, f"data.{where}"):
            name = source.env_name or data.default.env_name
            if name not in cfg.env:
                key = f"{place}.env_name" if source.env_name is not None else "data.default.env_name"
                known = ", ".join(sorted(cfg.env)) or "none"
                return f"{key} is {name}, which `env` does not have; use one of {known}"
    return None


def weights_belong_to_a_list_of_rewards(cfg: RolloutMasterConfig) -> str | None:
    """`weights` has a number for each function; `kwargs` needs a `target`."""
    for name, section in cfg.env.items():
        has_weights = section.weights is not None
        if section.target is None and has_weights and section.kwargs is None and name not in BUILT_IN:
            continue  # functions that Python gives; `load_code` counts them
        if section.target is None and (has_weights or section.kwargs is not None):
            key = "weights" if has_weights else "kwargs"
            return f"env.{name}.{key} is set, but env.{name}.target, which it is for, is not; set it, or {key} to null"
        targets = (section.target,) if isinstance(section.target, str) else section.target or ()
        if section.target == ():
            return f"env.{name}.target is an empty list, so there is no reward; name at least one function"
        if section.weights is not None and len(section.weights) != len(targets):
            return (
                f"env.{name}.weights has {len(section.weights)} numbers, but target names {len(targets)} "
                "functions; write one weight for each"
            )
    return None


def engines_have_devices(cfg: RolloutMasterConfig) -> str | None:
    """Engines have devices of their own if and only if they do not share the trainer's."""
    colocated = cfg.policy.generation.colocated
    resources = colocated.resources
    counts = (resources.gpus_per_node, resources.num_nodes)
    where = "policy.generation.colocated.resources.gpus_per_node and num_nodes"
    if colocated.enabled and counts != (None, None):
        return f"{where} are set, but with policy.generation.colocated.enabled engines share devices; set them to null"
    if not colocated.enabled and None in counts:
        return f"{where} are not both set, but colocated.enabled is false and engines need their own; set both"
    return None


def engine_fits_a_host_of_its_own(cfg: RolloutMasterConfig) -> str | None:
    """The tensor-parallel size of engines with devices of their own divides a host's number of such devices."""
    generation = cfg.policy.generation
    size, count = generation.vllm_cfg.tensor_parallel_size, generation.colocated.resources.gpus_per_node
    if generation.colocated.enabled or count is None:
        return None
    return engine_devices_problem(size, count, devices="devices of policy.generation.colocated.resources.gpus_per_node")


RULES = (*rules_in(__name__, RolloutMasterConfig), *DATA_RULES)
