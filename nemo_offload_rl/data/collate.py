"""From lists of token ids to padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from nemo_offload_rl.data.batch import PolicyGradientBatch, PreferenceBatch, TokenBatch, TrainBatch
from nemo_offload_rl.data.records import Example, ExamplePair
from nemo_offload_rl.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """Prompt and sampled tokens of one rollout, in one list.

    Attributes:
        token_ids: [T] prompt, then everything that followed.
        token_mask: [T] 1 for tokens that the policy sampled, 0 for the prompt and for what an environment wrote.
        generation_logprobs: [T] the sampler's logprobs; 0 where the mask is 0.
        sample_mask: 0 leaves the whole sequence out of the loss.
    """

    token_ids: Sequence[int]
    token_mask: Sequence[int]
    generation_logprobs: Sequence[float]
    sample_mask: float


@dataclass(frozen=True, kw_only=True)
class SampledBatch(TrainBatch):
    """Rollouts before the policy's own logprobs are known.

    Attributes:
        generation_logprobs: [B, S] float32, the sampler's; 0 where nothing was sampled.
    """

    generation_logprobs: Tensor

    def with_policy_gradient_inputs(
        self,
        *,
        advantages: Tensor,
        prev_logprobs: Tensor | None,
        reference_logprobs: Tensor | None,
        rewards: Tensor | None = None,
    ) -> PolicyGradientBatch:
        """The batch that the policy-gradient loss takes.

        Args:
            advantages: [B] one per sample, or [B, S] one per token.
            prev_logprobs: [B, S] of the policy before the step's updates, or None for zeros.
            reference_logprobs: [B, S], or None for zeros.
            rewards: [B] after scaling and shaping, or None for zeros.
        """
        per_token = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(self.token_mask)
        zeros = torch.zeros_like(self.generation_logprobs)
        return PolicyGradientBatch(
            input_ids=self.input_ids,
            input_lengths=self.input_lengths,
            token_mask=self.token_mask,
            sample_mask=self.sample_mask,
            rewards=torch.zeros(len(self)) if rewards is None else rewards.to(torch.float32),
            advantages=per_token.to(torch.float32).contiguous(),
            prev_logprobs=zeros if prev_logprobs is None else prev_logprobs,
            generation_logprobs=self.generation_logprobs,
            reference_logprobs=zeros if reference_logprobs is None else reference_logprobs,
        )


def collate_tokens(sequences: Sequence[Sequence[int]], *, pad_id: int, multiple: int = 1) -> TokenBatch:
    """Right-pad token ids to the longest sequence, rounded up to `multiple`.

    Raises:
        DataError: There are no sequences, or one is empty.
    """
    return TokenBatch(input_ids=_pad_ids(sequences, pad_id, multiple), input_lengths=_lengths(sequences))


def collate_examples(examples: Sequence[Example], *, pad_id: int, multiple: int = 1) -> TrainBatch:
    """Right-pad tokenized sequences to the longest one, rounded up to `multiple`; masked ones do not count."""
    token_ids = [example.token_ids for example in examples]
    input_ids = _pad_ids(token_ids, pad_id, multiple)
    return TrainBatch(
        input_ids=input_ids,
        input_lengths=_lengths(token_ids),
        token_mask=_pad_rows([example.token_mask for example in examples], input_ids.shape[1], 0, np.float32),
        sample_mask=torch.tensor([example.loss_multiplier for example in examples], dtype=torch.float32),
    )


def collate_pairs(
    pairs: Sequence[ExamplePair], *, pad_id: int, multiple: int = 1, reference_sums: Tensor | None = None
) -> PreferenceBatch:
    """Two rows for each pair, the better response first.

    Args:
        pairs: Tokenized pairs.
        pad_id: Fills rows up.
        multiple: Of the width.
        reference_sums: [B] see `PreferenceBatch`; None for zeros, where they are not known yet.
    """
    batch = collate_examples(
        [example for pair in pairs for example in (pair.chosen, pair.rejected)], pad_id=pad_id, multiple=multiple
    )
    sums = torch.zeros(len(batch), dtype=torch.float64) if reference_sums is None else reference_sums
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return PreferenceBatch(**tensors, reference_sums=sums)


def collate_samples(sequences: Sequence[SampledSequence], *, pad_id: int, multiple: int = 1) -> SampledBatch:
    """Rollouts as a batch; the loss counts what the policy sampled.

    Raises:
        DataError: There are no sequences, or one is empty.
    """
    token_ids = [sequence.token_ids for sequence in sequences]
    input_ids = _pad_ids(token_ids, pad_id, multiple)
    width = input_ids.shape[1]
    return SampledBatch(
        input_ids=input_ids,
        input_lengths=_lengths(token_ids),
        token_mask=_pad_mask([sequence.token_mask for sequence in sequences], width),
        sample_mask=torch.tensor([sequence.sample_mask for sequence in sequences], dtype=torch.float32),
        generation_logprobs=_pad_rows([sequence.generation_logprobs for sequence in sequences], width, 0, np.float32),
    )


def _pad_ids(sequences: Sequence[Sequence[int] | np.ndarray], pad_id: int, multiple: int) -> Tensor:
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or min(lengths) == 0:
        raise DataError("a batch needs at least one sequence, and each at least one token; check for empty rows")
    return _pad_rows(sequences, -(-max(lengths) // multiple) * multiple, pad_id, np.int64)


def _pad_mask(masks: Sequence[Sequence[int]], width: int) -> Tensor:
    mask = _pad_rows(masks, width, 0, np.float32)
    mask[:, 0] = 0  # the first token has no logprob
    return mask


def _pad_rows(rows: Sequence[Sequence[float] | np.ndarray], width: int, fill: float, dtype: type[np.generic]) -> Tensor:
    # Row by row into NumPy, which takes a list several times faster than torch takes nested ones.
    padded = np.full((len(rows), width), fill, dtype=dtype)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return torch.from_numpy(padded)


def _lengths(sequences: Sequence[Sequence[int] | np.ndarray]) -> Tensor:
    return torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
