"""GPU memory that deterministic attention of packed rows needs on a Hopper GPU, as read in Transformer Engine 2.20.2.

To repeat, cuDNN's backward pass of packed rows writes a whole matrix for each head, of the pack by the pack and not of
each row by itself: `2 * B * heads * T * T` bytes, for B sequences of T tokens (cuDNN 9.25 has another way, which is
newer than torch's). From 2**30 scores on, Transformer Engine does not call cuDNN. It keeps all scores in memory, or,
where a sequence is split over devices, has no attention at all. Padded rows, other GPUs and passes without
gradients are not affected.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass

import torch

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings

logger = logging.getLogger(__name__)

HOPPER = (9, 0)
_GIB = 2**30
_MOST_SCORES = 2**30  # heads times rows times the square of the longest: as many and more are not left to cuDNN
_WARNED_OF_BYTES = _GIB


@dataclass(frozen=True)
class AttentionNeed:
    """What one layer takes for a pack that rows of the longest length fill.

    Attributes:
        uses_cudnn: In cuDNN's backward pass, else for the scores of Transformer Engine's unfused attention.
        num_bytes: Of the former for the time of its backward pass; of the scores once, of which several copies are
            held. None where there is no attention to compute them.
    """

    uses_cudnn: bool
    num_bytes: int | None


def attention_need(num_heads: int, pack_tokens: int, longest: int, context_parallel_size: int) -> AttentionNeed:
    """For 16-bit attention that repeats, on a Hopper GPU without FlashAttention.

    Args:
        num_heads: Attention heads of a tensor-parallel rank.
        pack_tokens: Of a training micro-batch, at most.
        longest: Tokens of the longest row.
        context_parallel_size: Devices that each row is split over.
    """
    longest = min(longest, pack_tokens)
    num_rows = pack_tokens // longest
    num_scores = num_heads * num_rows * _power_of_two(longest) ** 2  # rows are bounded by a power of two in `layout`
    if num_scores < _MOST_SCORES:
        # The sizes for which Transformer Engine makes cuDNN's kernels; beyond 512 rows and 32k tokens it has steps.
        num_tokens = max(1024, _power_of_two(-(-pack_tokens // context_parallel_size)))
        return AttentionNeed(True, 2 * max(32, _power_of_two(num_rows)) * num_heads * num_tokens**2)
    return AttentionNeed(False, None if context_parallel_size > 1 else 2 * num_scores)


def _power_of_two(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()


def is_affected(settings: PolicySettings, capability: tuple[int, int]) -> bool:
    """Whether a training run packs rows, has to repeat, and computes in 16 bits on a GPU of that kind."""
    packs = settings.sequence_packing.enabled and settings.precision != "float32"
    return packs and settings.deterministic and capability == HOPPER


def check_packed_attention(num_heads: int, settings: PolicySettings, cfg: MegatronConfig) -> None:
    """Refuse packs for which there is no attention on this process's GPU; warn of what others take.

    Args:
        num_heads: The model's attention heads.
        settings: The policy's settings.
        cfg: `settings.backend`.

    Raises:
        ConfigError: There is no attention for them.
    """
    if not torch.cuda.is_available():
        return
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    if not is_affected(settings, (gpu.major, gpu.minor)):
        return
    need = attention_need(
        num_heads // cfg.tensor_model_parallel_size,
        settings.sequence_packing.train_mb_tokens,
        settings.max_total_sequence_length,
        cfg.context_parallel_size,
    )
    avoids_cudnn = not need.uses_cudnn or os.environ.get("NVTE_FUSED_ATTN") == "0"
    if avoids_cudnn and importlib.util.find_spec("flash_attn") is not None:
        return
    if (problem := refusal(need, settings)) is not None:
        raise ConfigError(problem)
    if (message := warning(need, settings)) is not None:
        logger.warning(message)


def refusal(need: AttentionNeed, settings: PolicySettings) -> str | None:
    """Why nothing can train on such packs and what to change, in one line; None if something may."""
    if need.num_bytes is not None:
        return None
    reason = "Transformer Engine has no attention that splits them over devices and repeats"
    return f"{_packs(settings)}: on a Hopper GPU {reason}; {_CHANGES}."


def warning(need: AttentionNeed, settings: PolicySettings) -> str | None:
    """What training on such packs takes of the GPU, in one line; None if that is little."""
    if need.num_bytes is None or need.num_bytes < _WARNED_OF_BYTES:
        return None
    what = f"takes about {need.num_bytes / _GIB:.1f} GiB in each layer's backward pass to repeat"
    if not need.uses_cudnn:
        what = f"keeps scores of about {need.num_bytes / _GIB:.1f} GiB for each layer, more than once, to repeat"
    return f"{_packs(settings)}: on a Hopper GPU attention {what}. If memory runs out, {_CHANGES}."


_CHANGES = (
    "set policy.deterministic=false, make policy.sequence_packing.train_mb_tokens or policy.max_total_sequence_length "
    "smaller, or set policy.sequence_packing.enabled=false"
)


def _packs(settings: PolicySettings) -> str:
    tokens, longest = settings.sequence_packing.train_mb_tokens, settings.max_total_sequence_length
    return f"policy.deterministic is true with packs of {tokens} tokens and rows of up to {longest}"
