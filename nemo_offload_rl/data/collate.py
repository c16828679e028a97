"""From lists of token ids to padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import PolicyGradientBatch, TokenBatch, TrainBatch
from nemo_offload_rl.data.records import Demonstration
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
        self, *, advantages: Tensor, prev_logprobs: Tensor, reference_logprobs: Tensor | None
    ) -> PolicyGradientBatch:
        """The batch that the policy-gradient loss takes.

        Args:
            advantages: [B] one per sample, or [B, S] one per token.
            prev_logprobs: [B, S] of the policy before the step's updates.
            reference_logprobs: [B, S], or None for zeros.
        """
        per_token = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(self.token_mask)
        return PolicyGradientBatch(
            input_ids=self.input_ids,
            input_lengths=self.input_lengths,
            token_mask=self.token_mask,
            sample_mask=self.sample_mask,
            advantages=per_token.to(torch.float32).contiguous(),
            prev_logprobs=prev_logprobs,
            generation_logprobs=self.generation_logprobs,
            reference_logprobs=torch.zeros_like(prev_logprobs) if reference_logprobs is None else reference_logprobs,
        )


def collate_tokens(sequences: Sequence[Sequence[int]], *, pad_id: int, multiple: int = 1) -> TokenBatch:
    """Right-pad token ids to the longest sequence, rounded up to `multiple`.

    Raises:
        DataError: There are no sequences, or one is empty.
    """
    return TokenBatch(input_ids=_pad_ids(sequences, pad_id, multiple), input_lengths=_lengths(sequences))


def collate_demonstrations(
    demonstrations: Sequence[Demonstration], *, pad_id: int, multiple: int = 1, max_length: int | None = None
) -> TrainBatch:
    """Prompts with their responses; the loss counts the responses.

    Raises:
        DataError: One is longer than `max_length`, or there are none.
    """
    for row in demonstrations:
        length = len(row.prompt_ids) + len(row.response_ids)
        if max_length is not None and length > max_length:
            raise DataError(
                f"a demonstration has {length} tokens, more than policy.max_total_sequence_length={max_length}; raise "
                f"the limit or take the row out"
            )
    sequences = [[*row.prompt_ids, *row.response_ids] for row in demonstrations]
    masks = [[0] * len(row.prompt_ids) + [1] * len(row.response_ids) for row in demonstrations]
    input_ids = _pad_ids(sequences, pad_id, multiple)
    return TrainBatch(
        input_ids=input_ids,
        input_lengths=_lengths(sequences),
        token_mask=_pad_mask(masks, input_ids.shape[1]),
        sample_mask=torch.ones(len(sequences), dtype=torch.float32),
    )


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
        generation_logprobs=_pad_rows(
            [sequence.generation_logprobs for sequence in sequences], width, 0.0, torch.float32
        ),
    )


def _pad_ids(sequences: Sequence[Sequence[int]], pad_id: int, multiple: int) -> Tensor:
    if not sequences or not all(sequences):
        raise DataError("a batch needs at least one sequence, and each at least one token; check for empty rows")
    longest = max(len(sequence) for sequence in sequences)
    return _pad_rows(sequences, -(-longest // multiple) * multiple, pad_id, torch.int64)


def _pad_mask(masks: Sequence[Sequence[int]], width: int) -> Tensor:
    mask = _pad_rows(masks, width, 0, torch.float32)
    mask[:, 0] = 0  # the first token has no logprob
    return mask


def _pad_rows[N: (int, float)](rows: Sequence[Sequence[N]], width: int, fill: N, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


def _lengths(sequences: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
