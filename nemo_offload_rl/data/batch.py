"""Typed batches that travel from the driver to the workers.

Shape suffixes: B samples, S positions (right-padded), V vocabulary.

Logprob convention, everywhere in this package: `logprobs_BS[b, t]` is log p(token t | tokens before t) and column 0
is 0, so that logprobs, masks and advantages of a token share its index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from nemo_offload_rl.data.inputs import on_device


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Right-padded token sequences.

    Attributes:
        rows_per_group: Of the class: this many neighbouring rows belong together and stay in one micro-batch.
        input_ids: [B, S] int64, padded with any valid id.
        input_lengths: [B] int64, real tokens of each row, 1..S.
    """

    rows_per_group: ClassVar[int] = 1

    input_ids: Tensor
    input_lengths: Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """Rows by index, in the order given, as a batch of the same type."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def to(self, device: torch.device | str) -> Self:
        """The same batch on `device`; tensors that are there already are shared, not copied."""
        return replace(self, **{f.name: on_device(getattr(self, f.name), device) for f in fields(self)})

    def trim(self, multiple: int = 1) -> Self:
        """Cut or keep columns so that S is the longest row rounded up to `multiple` (never above the present S)."""
        width = self.input_ids.shape[1]
        longest = int(self.input_lengths.max())
        wanted = min(width, -(-longest // multiple) * multiple)
        if wanted == width:
            return self
        cut = {}
        for f in fields(self):
            value = getattr(self, f.name)
            cut[f.name] = value[:, :wanted] if value.dim() >= 2 else value
        return replace(self, **cut)

    def num_tokens(self, *, packed: bool) -> int:
        """Tokens that a model computes for these rows: the real ones if it packs rows, else padding too."""
        return int(self.input_lengths.sum()) if packed else self.input_ids.numel()

    def is_scored(self) -> Tensor:
        """[B, S] bool: tokens whose logprobs are wanted, here every real one but the first of its row."""
        position_S = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return (position_S > 0) & (position_S < self.input_lengths.unsqueeze(1))


@dataclass(frozen=True, kw_only=True)
class TrainBatch(TokenBatch):
    """What every loss needs.

    Attributes:
        token_mask: [B, S] float32, 1 for tokens that the loss counts (column 0 is 0), 0 for prompt and padding.
        sample_mask: [B] float32, 0 drops a whole sample (overlong filtering, padding rows).
    """

    token_mask: Tensor
    sample_mask: Tensor

    @property
    def loss_mask(self) -> Tensor:
        """[B, S] float32: 1 for tokens of kept samples that the loss counts."""
        return self.token_mask * self.sample_mask.unsqueeze(1)

    def num_positive_tokens(self) -> float:
        """Tokens that the loss counts of samples whose reward is above 0; 0 where there are no rewards."""
        return 0.0

    def is_scored(self) -> Tensor:
        """[B, S] bool: tokens whose logprobs are wanted, here those that the loss counts."""
        return super().is_scored() & (self.loss_mask != 0)


@dataclass(frozen=True, kw_only=True)
class PolicyGradientBatch(TrainBatch):
    """Inputs of the clipped policy-gradient loss; every added tensor is float32, and [B, S] but for rewards.

    Attributes:
        rewards: [B], after scaling and shaping.
        advantages: the same value on every token of a response, or per token.
        prev_logprobs: logprobs of the policy before this step's updates (zeros when unused); -inf for tokens that
            its top-k and top-p leave out.
        generation_logprobs: the engine's logprobs, at the sampling temperature and after top-k and top-p.
        reference_logprobs: logprobs of the frozen reference policy (zeros when unused).
    """

    rewards: Tensor
    advantages: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor
    reference_logprobs: Tensor

    @property
    def positive_mask(self) -> Tensor:
        """[B, S]: 1 for tokens that the loss counts of samples whose reward is above 0."""
        return self.loss_mask * (self.rewards > 0).to(self.loss_mask.dtype).unsqueeze(1)

    def num_positive_tokens(self) -> float:
        """See `TrainBatch`."""
        return float(self.positive_mask.double().sum())


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(TrainBatch):
    """Inputs of the DPO loss: pairs of rows, the better response first.

    Attributes:
        reference_sums: [B] float64, the sum of the frozen reference's logprobs over the tokens that the loss counts.
    """

    rows_per_group: ClassVar[int] = 2

    reference_sums: Tensor


@dataclass(frozen=True, kw_only=True)
class DistillationBatch(TrainBatch):
    """Inputs of a loss that compares the policy with a teacher, whose distribution before each token it has.

    Attributes:
        generation_logprobs: [B, S] float32, the engine's logprobs.
    """

    generation_logprobs: Tensor


@dataclass(frozen=True, kw_only=True)
class TopKBatch(DistillationBatch):
    """With the teacher's K most likely tokens; zeros where nothing is scored.

    Attributes:
        teacher_logprobs: [B, S, K] float32, of the whole vocabulary.
        teacher_ids: [B, S, K] int32.
    """

    teacher_logprobs: Tensor
    teacher_ids: Tensor


@dataclass(frozen=True, kw_only=True)
class HiddenStatesBatch(DistillationBatch):
    """With the teacher's last hidden states, from which its output layer makes its logits, a chunk at a time.

    Attributes:
        teacher_hidden: [B, S, H] in the teacher's compute type; those before each token.
    """

    teacher_hidden: Tensor


def logprob_inputs(batch: TokenBatch, *, counted_only: bool) -> TokenBatch:
    """What a logprob pass reads of a batch: a `TokenBatch`, or a `TrainBatch` for the counted tokens only."""
    kind = TrainBatch if counted_only else TokenBatch
    return kind(**{field.name: getattr(batch, field.name) for field in fields(kind)})


@dataclass(frozen=True)
class LossNorm:
    """Divisors over the global batch (all micro-batches, all data-parallel ranks)."""

    num_valid_seqs: float
    num_valid_tokens: float
    num_positive_tokens: float = 0.0
