"""Rules on backend, devices, parallelism and batches."""

from nemo_offload_rl.config.rules.base import data_parallel_size
from nemo_offload_rl.errors import division_problem, share_problem
from nemo_offload_rl.keys.generation import engine_devices_problem
from nemo_offload_rl.keys.master import RolloutMasterConfig, RunConfig, rules_in


def exactly_one_backend_is_enabled(cfg: RunConfig) -> str | None:
    """Exactly one of `dtensor_cfg` and `megatron_cfg` is enabled."""
    dtensor = cfg.policy.dtensor_cfg.enabled
    megatron = cfg.policy.megatron_cfg is not None and cfg.policy.megatron_cfg.enabled
    if dtensor == megatron:
        keys = "policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled are both"
        return f"{keys} {'true' if dtensor else 'false'}, but one backend trains the model; enable exactly one"
    return None


def engine_tensor_parallel_size_divides_a_host(cfg: RolloutMasterConfig) -> str | None:
    """The engine's tensor-parallel size divides the devices of a host."""
    generation = cfg.policy.generation
    size, per_node = generation.vllm_cfg.tensor_parallel_size, cfg.cluster.workers_per_node
    return engine_devices_problem(size, per_node) if generation.colocated.enabled else None


def port_range_is_ascending(cfg: RunConfig) -> str | None:
    """The port range is ascending."""
    low, high = cfg.cluster.master_port_range_low, cfg.cluster.master_port_range_high
    if low > high:
        return f"cluster.master_port_range_low {low} is above master_port_range_high {high}; swap them"
    return None


def rollouts_fill_whole_training_batches(cfg: RolloutMasterConfig) -> str | None:
    """The training batch divides the responses of a step."""
    name, section = cfg.algorithm
    prompts, group = section.num_prompts_per_step, section.num_generations_per_prompt
    batch = cfg.policy.train_global_batch_size
    step = f"({name}.num_prompts_per_step {prompts} x num_generations_per_prompt {group})"
    what = f"responses of a step {step}, so some would not be trained on"
    return division_problem({"policy.train_global_batch_size": batch}, prompts * group, what, "change one of the three")


def training_batch_divides_over_workers(cfg: RunConfig) -> str | None:
    """The training batch divides over the data-parallel workers."""
    size = data_parallel_size(cfg)
    return share_problem("policy.train_global_batch_size", cfg.policy.train_global_batch_size, size) if size else None


def micro_batch_divides_the_workers_share(cfg: RunConfig) -> str | None:
    """The micro-batch divides one worker's share of the training batch, unless micro-batches are formed by tokens."""
    policy, size = cfg.policy, data_parallel_size(cfg)
    if policy.dynamic_batching.enabled or policy.sequence_packing.enabled:
        return None
    batch, micro = policy.train_global_batch_size, policy.train_micro_batch_size
    if not size or batch % size:
        return None
    what = f"sequences of one worker (train_global_batch_size {batch} over {size} data-parallel workers)"
    return division_problem({"policy.train_micro_batch_size": micro}, batch // size, what, "change one of them")


def packing_and_dynamic_batching_exclude_each_other(cfg: RunConfig) -> str | None:
    """Sequence packing and dynamic batching exclude each other."""
    if cfg.policy.sequence_packing.enabled and cfg.policy.dynamic_batching.enabled:
        return (
            "policy.sequence_packing.enabled and policy.dynamic_batching.enabled are both true, but micro-batches are "
            "formed in one way; set one of them to false"
        )
    return None


def token_budgets_hold_the_longest_sequence(cfg: RunConfig) -> str | None:
    """A micro-batch that is formed by tokens holds the longest sequence, rounded up."""
    policy = cfg.policy
    batchings = {"sequence_packing": policy.sequence_packing, "dynamic_batching": policy.dynamic_batching}
    for name, section in batchings.items():
        limits = {"train_mb_tokens": section.train_mb_tokens, "logprob_mb_tokens": section.logprob_mb_tokens}
        multiple = policy.length_multiple(section)
        longest = -(-policy.max_total_sequence_length // multiple) * multiple
        for key, limit in limits.items():
            if section.enabled and limit < longest:
                rounded = "" if longest == policy.max_total_sequence_length else f" rounded up to {longest}"
                return (
                    f"policy.{name}.{key} {limit} is below policy.max_total_sequence_length "
                    f"{policy.max_total_sequence_length}{rounded}, so a long sequence would not fit a micro-batch; "
                    f"raise it to {longest} or more"
                )
    return None


def longest_sequence_is_divisible(cfg: RunConfig) -> str | None:
    """`max_total_sequence_length` is a multiple of `make_sequence_length_divisible_by`."""
    longest, multiple = cfg.policy.max_total_sequence_length, cfg.policy.make_sequence_length_divisible_by
    if longest % multiple:
        return (
            f"policy.max_total_sequence_length {longest} is not a multiple of make_sequence_length_divisible_by "
            f"{multiple}, to which batches are padded; change one of them"
        )
    return None


# Checked first: if one of these is broken, so are many others.
AVAILABILITY = (exactly_one_backend_is_enabled,)
RULES = tuple(rule for rule in rules_in(__name__, RunConfig) if rule not in AVAILABILITY)

ROLLOUT_RULES = rules_in(__name__, RolloutMasterConfig)
