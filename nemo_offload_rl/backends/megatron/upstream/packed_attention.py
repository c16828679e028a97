"""GPU memory of deterministic attention for packed rows on a Hopper GPU, as read in Transformer Engine 2.20.2.

cuDNN's deterministic backward pass writes a matrix for each head over the whole pack, not one for each row. It takes
`2 * B * heads * T * T` bytes for B sequences of T tokens. (cuDNN 9.25 avoids this, but is newer than torch's.) From
2**30 scores on, Transformer Engine does not call cuDNN: it keeps all scores in memory, or has no attention at all if a
sequence is split over devices. Padded rows, other GPUs and passes without gradients are not affected.
"""

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
_MOST_SCORES = 2**30  # heads * rows * longest row squared; cuDNN is used only below this number
_WARNED_OF_BYTES = _GIB


@dataclass(frozen=True)
class AttentionNeed:
    """Memory that one layer needs for a pack full of rows of the longest length.

    Attributes:
        uses_cudnn: cuDNN is used; otherwise Transformer Engine's unfused attention keeps scores.
        num_bytes: With cuDNN, bytes during the backward pass. Otherwise bytes of one copy of the scores, while several
            copies are held. None if no attention is available.
    """

    uses_cudnn: bool
    num_bytes: int | None


def attention_need(num_heads: int, pack_tokens: int, longest: int, context_parallel_size: int) -> AttentionNeed:
    """Estimate the memory of deterministic 16-bit attention on a Hopper GPU without FlashAttention.

    Args:
        num_heads: Attention heads of a tensor-parallel rank.
        pack_tokens: Most tokens of a training micro-batch.
        longest: Tokens of the longest row.
        context_parallel_size: Number of devices that share each row.
    """
    longest = min(longest, pack_tokens)
    num_rows = pack_tokens // longest
    num_scores = num_heads * num_rows * _power_of_two(longest) ** 2  # `layout` rounds the bound up to a power of two
    if num_scores < _MOST_SCORES:
        # Transformer Engine makes cuDNN's kernels for these sizes; above 512 rows and 32k tokens it rounds in steps.
        num_tokens = max(1024, _power_of_two(-(-pack_tokens // context_parallel_size)))
        return AttentionNeed(True, 2 * max(32, _power_of_two(num_rows)) * num_heads * num_tokens**2)
    return AttentionNeed(False, None if context_parallel_size > 1 else 2 * num_scores)


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def is_affected(settings: PolicySettings, capability: tuple[int, int]) -> bool:
    """Return whether a run trains packed rows deterministically in 16 bits on a Hopper GPU."""
    packs = settings.sequence_packing.enabled and settings.precision != "float32"
    return packs and settings.deterministic and capability == HOPPER


def check_packed_attention(num_heads: int, settings: PolicySettings, cfg: MegatronConfig) -> None:
    """Refuse packed rows for which this process's GPU has no attention; warn if they need much memory.

    Raises:
        ConfigError: No attention supports them.
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
    """Return one line that says why such packs cannot be trained and what to change; None if they can."""
    if need.num_bytes is not None:
        return None
    reason = "Transformer Engine has no deterministic attention that splits them over devices"
    return f"{_packs(settings)}: on a Hopper GPU {reason}; {_CHANGES}."


def warning(need: AttentionNeed, settings: PolicySettings) -> str | None:
    """Return one line about the GPU memory that training on such packs needs; None if that is little."""
    if need.num_bytes is None or need.num_bytes < _WARNED_OF_BYTES:
        return None
    what = f"takes about {need.num_bytes / _GIB:.1f} GiB in each layer's backward pass"
    if not need.uses_cudnn:
        what = f"keeps several copies of each layer's scores, about {need.num_bytes / _GIB:.1f} GiB each"
    return f"{_packs(settings)}: on a Hopper GPU deterministic attention {what}. If memory runs out, {_CHANGES}."


_CHANGES = (
    "set policy.deterministic=false, make policy.sequence_packing.train_mb_tokens or policy.max_total_sequence_length "
    "smaller, or set policy.sequence_packing.enabled=false"
)


def _packs(settings: PolicySettings) -> str:
    tokens, longest = settings.sequence_packing.train_mb_tokens, settings.max_total_sequence_length
    return f"policy.deterministic is true with packs of {tokens} tokens and rows of up to {longest}"
