"""Chooses `policy.train_micro_batch_size` and `policy.logprob_batch_size` where they are `auto`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import RunConfig
from nemo_offload_rl.keys.policy import AUTO, AUTO_KEYS
from nemo_offload_rl.memory.account import TOLERANCE, Account
from nemo_offload_rl.memory.gpus import KNOWN
from nemo_offload_rl.memory.search import MOST_ROWS, Dimension, Judges, Search
from nemo_offload_rl.memory.seconds import step_seconds, work_of
from nemo_offload_rl.residency import Phase

CPU_ROWS = 4
"""Sequences of a micro-batch on a CPU, or the largest number below it that divides a worker's share."""
_FASTEST = KNOWN["H200"].rates  # of a GPU whose rates are unknown: a slower one is busy with fewer sequences
_PHASES = {"train_micro_batch_size": Phase.TRAINING, "logprob_batch_size": Phase.LP_INFERENCE}
_BUDGETS = {"train_micro_batch_size": "train_mb_tokens", "logprob_batch_size": "logprob_mb_tokens"}


def choose_batch_sizes(account: Account, keys: Collection[str]) -> dict[str, int]:
    """Choose the fastest sizes that fit the GPUs with a margin, as a search over all keys does.

    Args:
        account: The run, with a 1 at each of these keys.
        keys: The keys of `policy` that are `auto`.

    Raises:
        ConfigError: What passes need is not known.
    """
    cfg, automatic = account.cfg, [key for key in AUTO_KEYS if key in keys]
    if not cfg.cluster.gpus_per_node:
        return dict.fromkeys(automatic, max(size for size in _sizes(cfg) if size <= CPU_ROWS))
    for key in automatic:
        if not account.phases or any(use.pass_bytes is None for use in account.phases if use.phase is _PHASES[key]):
            raise ConfigError(
                f"policy.{key} is {AUTO}, but what passes need of the GPU is not known: policy.model_name="
                f"{cfg.policy.model_name} is no local folder with a model whose code runs without data, or this "
                "machine has no GPU; give a number"
            )
    sizes = (tuple(_overrides(cfg, key, size) for size in _sizes(cfg)) for key in automatic)
    fastest = Search(account, _judges(account), [Dimension(options, is_of_passes=True) for options in sizes]).fastest()
    policy = cfg.policy if fastest is None else fastest.account.cfg.policy
    return {key: getattr(policy, key) for key in automatic}


def _sizes(cfg: RunConfig) -> Iterator[int]:
    """Yield the sizes that divide a worker's share of the batch, up to the largest that a search tries."""
    policy = cfg.policy
    workers = max(1, cfg.cluster.world_size // policy.backend.model_parallel.ranks_per_copy)
    rows = max(1, policy.train_global_batch_size // workers)
    yield from (size for size in range(1, min(rows, MOST_ROWS) + 1) if rows % size == 0)


def _overrides(cfg: RunConfig, key: str, size: int) -> str:
    """Write overrides for a size and for budgets of tokens that follow from it."""
    policy, budget = cfg.policy, _BUDGETS[key]
    overrides = [f"policy.{key}={size}"]
    for section in ("sequence_packing", "dynamic_batching"):
        if getattr(getattr(policy, section), budget) == policy.max_total_sequence_length:
            overrides.append(f"policy.{section}.{budget}={size * policy.max_total_sequence_length}")
    return " ".join(overrides)


def _judges(given: Account) -> Judges:
    """Judge sizes alone: bytes that passes lack in addition to those that they lack with one sequence, and seconds."""
    rates, work = given.machine.rates or _FASTEST, work_of(given)
    assert rates is not None

    def lacking_bytes(account: Account) -> int:
        passes = (use for use in account.phases if use.phase in _PHASES.values())
        return sum(max(0, int(TOLERANCE * use.gpu_bytes) - use.left_bytes) for use in passes)

    def step_s(account: Account) -> float:
        return sum(stage.total_s for stage in (step_seconds(account, rates, work) or {}).values())

    least_bytes = lacking_bytes(given)
    return Judges(lambda _: True, lambda account: lacking_bytes(account) - least_bytes, step_s)
