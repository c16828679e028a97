"""Chooses `policy.train_micro_batch_size` and `policy.logprob_batch_size` where they are `auto`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import RunConfig
from nemo_offload_rl.keys.policy import AUTO, AUTO_KEYS
from nemo_offload_rl.memory.account import TOLERANCE, Account
from nemo_offload_rl.residency import Phase

CPU_ROWS = 4
"""Sequences of a micro-batch on a CPU, or the largest number below it that divides a worker's share."""
_MOST_TOKENS = 65536
"""Tokens of the largest micro-batch. Passes of a small model launch too little work with fewer: Megatron's logprobs of
0.6 B took 2.7 s in batches of 16,640 tokens and 1.7 s of 33,280 (benchmarks/results/grpo_{auto,bound}_megatron.json).
"""


def choose_batch_sizes(account: Account, keys: Collection[str]) -> dict[str, int]:
    """Choose the largest sizes that fit the GPUs with a margin, of up to 65,536 tokens.

    Args:
        account: The run, with a 1 at each of these keys.
        keys: The keys of `policy` that are `auto`.

    Raises:
        ConfigError: What passes need is not known.
    """
    cfg, chosen = account.cfg, dict[str, int]()
    for key in (key for key in AUTO_KEYS if key in keys):
        sizes = sorted(_sizes(cfg), reverse=True)
        if not cfg.cluster.gpus_per_node:
            chosen[key] = next(size for size in sizes if size <= CPU_ROWS)
        elif not account.phases or any(use.pass_bytes is None for use in account.phases if use.phase in _phases(key)):
            raise ConfigError(
                f"policy.{key} is {AUTO}, but what passes need of the GPU is not known: policy.model_name="
                f"{cfg.policy.model_name} is no local folder with a model whose code runs without data, or this "
                "machine has no GPU; give a number"
            )
        else:
            chosen[key] = next((size for size in sizes if _fits(account, key, size)), 1)
    return chosen


def _sizes(cfg: RunConfig) -> Iterator[int]:
    """Yield the sizes that divide a worker's share of the batch."""
    policy = cfg.policy
    workers = max(1, cfg.cluster.world_size // policy.backend.model_parallel.ranks_per_copy)
    rows = max(1, policy.train_global_batch_size // workers)
    most = max(1, min(rows, _MOST_TOKENS // policy.max_total_sequence_length))
    yield from (size for size in range(1, most + 1) if rows % size == 0)


def _phases(key: str) -> tuple[Phase, ...]:
    return (Phase.TRAINING,) if key == "train_micro_batch_size" else (Phase.LP_INFERENCE,)


def _fits(account: Account, key: str, size: int) -> bool:
    policy, phases = account.cfg.policy, _phases(key)
    overrides = [f"policy.{key}={size}"]
    # Budgets of tokens that follow from the number of rows.
    tokens = "train_mb_tokens" if key == "train_micro_batch_size" else "logprob_mb_tokens"
    for section in ("sequence_packing", "dynamic_batching"):
        if getattr(getattr(policy, section), tokens) == policy.max_total_sequence_length:
            overrides.append(f"policy.{section}.{tokens}={size * policy.max_total_sequence_length}")
    tried = account.with_keys(" ".join(overrides))
    return all(use.left_bytes >= TOLERANCE * use.gpu_bytes for use in tried.phases if use.phase in phases)
