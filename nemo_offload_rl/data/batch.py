"""Typed batches that travel from the driver to the workers, and their collation from lists of token ids.

Shape suffixes: B samples, S positions (right-padded), V vocabulary.

Routing, in arrays [..., layers, experts per token]: the experts that the engine chose for each token, in every decoder
layer. Layers without experts, and tokens whose experts are unknown, have zeros: a token whose experts in a layer are
not distinct has no routing there, and the model chooses its experts. The type is uint8, or int16 above 256 experts.

Logprob convention, everywhere in this package: `logprobs_BS[b, t]` is log p(token t | tokens before t) and column 0
is 0, so that logprobs, masks and advantages of a token share its index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from nemo_offload_rl.data.records import Example, ExamplePair
from nemo_offload_rl.errors import DataError

# The CUDA driver puts pieces of this size from pageable memory into the stream's commands. A larger copy, or one from
# page-locked memory, takes the copy engine, which runs the copies of all streams in the order of their calls.
PIECE_BYTES = 64 << 10
MOST_BYTES = 4 << 20  # that are copied in pieces, of 0.03 ms each


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Right-padded token sequences.

    Attributes:
        rows_per_group: Class variable: this many neighbouring rows stay in one micro-batch.
        input_ids: [B, S] int64, padded with any valid id.
        input_lengths: [B] int64, real tokens of each row, 1..S.
        routed_experts: [B, S, layers, experts per token], the routing that the model takes over (see the module); None
            if it chooses all experts itself.
    """

    rows_per_group: ClassVar[int] = 1

    input_ids: Tensor
    input_lengths: Tensor
    routed_experts: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the rows by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """Rows by index, in the order given."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        return replace(self, **{name: tensor[index] for name, tensor in self.tensors().items()})

    def to(self, device: torch.device | str) -> Self:
        """The same batch on `device`; tensors that are there already are shared, not copied."""
        return replace(self, **{name: on_device(tensor, device) for name, tensor in self.tensors().items()})

    def as_kind[B: TokenBatch](self, kind: type[B], **added: Any) -> B:
        """The rows as a batch of another class, with its tensors of the same names and those that are `added`."""
        tensors: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(kind) if f.name not in added}
        return kind(**tensors, **added)

    def trim(self, multiple: int = 1) -> Self:
        """Cut columns so that S is the longest row rounded up to `multiple`; S never grows."""
        width = self.input_ids.shape[1]
        wanted = min(width, -(-int(self.input_lengths.max()) // multiple) * multiple)
        if wanted == width:
            return self
        return replace(self, **{name: value[:, :wanted] for name, value in self.tensors().items() if value.dim() >= 2})

    def num_tokens(self, *, packed: bool) -> int:
        """Tokens that a model computes for these rows: the real ones if it packs rows, else padding too."""
        return int(self.input_lengths.sum()) if packed else self.input_ids.numel()

    def is_scored(self) -> Tensor:
        """[B, S] bool: tokens whose logprobs are wanted, here every real one but the first of its row."""
        position_S = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return (position_S > 0) & (position_S < self.input_lengths.unsqueeze(1))


def routing_or(experts: Tensor, own: Tensor) -> Tensor:
    """Experts [..., K] of each token: its routing, and the model's `own` choice where there is none."""
    is_known = experts[..., :1] != experts[..., 1:2]
    return torch.where(is_known, experts.to(own.dtype), own)


@dataclass(frozen=True, kw_only=True)
class TrainBatch(TokenBatch):
    """Inputs of every loss.

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
        """Counted tokens of samples whose reward is above 0; 0 if there are no rewards."""
        return 0.0

    def is_scored(self) -> Tensor:
        """[B, S] bool: tokens whose logprobs are wanted, here those that the loss counts."""
        return super().is_scored() & (self.loss_mask != 0)


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(TrainBatch):
    """Inputs of the DPO loss: pairs of rows, the better response first.

    Attributes:
        reference_sums: [B] float64, the sum of the frozen reference's logprobs over the tokens that the loss counts.
    """

    rows_per_group: ClassVar[int] = 2

    reference_sums: Tensor


@dataclass(frozen=True, kw_only=True)
class SampledBatch(TrainBatch):
    """Rollouts.

    Attributes:
        generation_logprobs: [B, S] float32, the engine's logprobs at the sampling temperature and after top-k and
            top-p; 0 where nothing was sampled.
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
        return self.as_kind(
            PolicyGradientBatch,
            rewards=torch.zeros(len(self)) if rewards is None else rewards.to(torch.float32),
            advantages=per_token.to(torch.float32).contiguous(),
            prev_logprobs=zeros if prev_logprobs is None else prev_logprobs,
            reference_logprobs=zeros if reference_logprobs is None else reference_logprobs,
        )


@dataclass(frozen=True, kw_only=True)
class PolicyGradientBatch(SampledBatch):
    """Inputs of the clipped policy-gradient loss; added tensors are float32, and [B, S] except rewards.

    Attributes:
        rewards: [B], after scaling and shaping.
        advantages: One value for all tokens of a response, or one per token.
        prev_logprobs: Logprobs of the policy before this step's updates (zeros when unused); -inf for tokens that
            its top-k and top-p leave out.
        reference_logprobs: Logprobs of the frozen reference policy (zeros when unused).
    """

    rewards: Tensor
    advantages: Tensor
    prev_logprobs: Tensor
    reference_logprobs: Tensor

    @property
    def positive_mask(self) -> Tensor:
        """[B, S]: 1 for counted tokens of samples whose reward is above 0."""
        return self.loss_mask * (self.rewards > 0).to(self.loss_mask.dtype).unsqueeze(1)

    def num_positive_tokens(self) -> float:
        return float(self.positive_mask.double().sum())


@dataclass(frozen=True, kw_only=True)
class TopKBatch(SampledBatch):
    """Rollouts with the teacher's K most likely tokens; zeros where nothing is scored.

    Attributes:
        teacher_logprobs: [B, S, K] float32, of the whole vocabulary.
        teacher_ids: [B, S, K] int32.
    """

    teacher_logprobs: Tensor
    teacher_ids: Tensor


@dataclass(frozen=True, kw_only=True)
class HiddenStatesBatch(SampledBatch):
    """Rollouts with the teacher's last hidden states; its output layer turns them into logits, a chunk at a time.

    Attributes:
        teacher_hidden: [B, S, H] before each token, in the teacher's compute type.
    """

    teacher_hidden: Tensor


@dataclass(frozen=True)
class LossNorm:
    """Divisors over the global batch (all micro-batches, all data-parallel ranks)."""

    num_valid_seqs: float
    num_valid_tokens: float
    num_positive_tokens: float = 0.0


def logprob_inputs(batch: TokenBatch, *, counted_only: bool, replays: bool = False) -> TokenBatch:
    """The tensors that a logprob pass reads: a `TokenBatch`, or a `TrainBatch` for the counted tokens only.

    Without `replays`, the model chooses all experts itself, as references and teachers do.
    """
    kind = TrainBatch if counted_only else TokenBatch
    return batch.as_kind(kind) if replays else batch.as_kind(kind, routed_experts=None)


# -- collation ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """One conversation of a rollout.

    Attributes:
        token_ids: [T] prompt, then everything that followed.
        token_mask: [T] 1 for tokens that the policy sampled, 0 for others.
        generation_logprobs: [T] the sampler's logprobs; 0 where the mask is 0.
        sample_mask: 0 leaves the whole sequence out of the loss.
        routed_experts: [up to T, layers, experts per token] the routing of the first tokens; None if it is not known.
    """

    token_ids: Sequence[int]
    token_mask: Sequence[int]
    generation_logprobs: Sequence[float]
    sample_mask: float
    routed_experts: np.ndarray | None = None


def collate_examples(examples: Sequence[Example], *, pad_id: int, multiple: int = 1) -> TrainBatch:
    """Right-pad tokenized sequences to the longest one, rounded up to `multiple`.

    Raises:
        DataError: There are no sequences, or one is empty.
    """
    return _collated(
        [example.token_ids for example in examples],
        [example.token_mask for example in examples],
        [example.loss_multiplier for example in examples],
        pad_id,
        multiple,
    )


def collate_pairs(pairs: Sequence[ExamplePair], *, pad_id: int, multiple: int = 1) -> PreferenceBatch:
    """Two rows for each pair, the better response first, with zeros for the reference's sums, which are not known yet.

    Padding and errors as in `collate_examples`.
    """
    examples = [example for pair in pairs for example in (pair.chosen, pair.rejected)]
    sums = torch.zeros(len(examples), dtype=torch.float64)
    return collate_examples(examples, pad_id=pad_id, multiple=multiple).as_kind(PreferenceBatch, reference_sums=sums)


def collate_samples(sequences: Sequence[SampledSequence], *, pad_id: int, multiple: int = 1) -> SampledBatch:
    """Rollouts as a batch; the loss counts sampled tokens. Padding and errors as in `collate_examples`."""
    batch = _collated(
        [sequence.token_ids for sequence in sequences],
        [sequence.token_mask for sequence in sequences],
        [sequence.sample_mask for sequence in sequences],
        pad_id,
        multiple,
    )
    logprobs = [sequence.generation_logprobs for sequence in sequences]
    width = batch.input_ids.shape[1]
    return batch.as_kind(
        SampledBatch,
        generation_logprobs=_pad_rows(logprobs, width, 0, np.float32),
        routed_experts=_padded_routing([sequence.routed_experts for sequence in sequences], width),
    )


def _padded_routing(rows: Sequence[np.ndarray | None], width: int) -> Tensor | None:
    known = [row for row in rows if row is not None]
    if not known:
        return None
    padded = np.zeros((len(rows), width, *known[0].shape[1:]), dtype=known[0].dtype)
    for row, routing in enumerate(rows):
        if routing is not None:
            padded[row, : len(routing)] = routing
    return torch.from_numpy(padded)


type _Rows = Sequence[Sequence[float] | np.ndarray]


def _collated(token_ids: _Rows, masks: _Rows, sample_mask: Sequence[float], pad_id: int, multiple: int) -> TrainBatch:
    lengths = [len(row) for row in token_ids]
    if not lengths or min(lengths) == 0:
        raise DataError("a batch needs at least one sequence, and each at least one token; check for empty rows")
    width = -(-max(lengths) // multiple) * multiple
    token_mask = _pad_rows(masks, width, 0, np.float32)
    token_mask[:, 0] = 0  # the first token has no logprob
    return TrainBatch(
        input_ids=_pad_rows(token_ids, width, pad_id, np.int64),
        input_lengths=torch.tensor(lengths, dtype=torch.int64),
        token_mask=token_mask,
        sample_mask=torch.tensor(sample_mask, dtype=torch.float32),
    )


def _pad_rows(rows: _Rows, width: int, fill: float, dtype: type[np.generic]) -> Tensor:
    # Row by row into NumPy, which takes a list several times faster than torch takes nested ones.
    padded = np.full((len(rows), width), fill, dtype=dtype)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return torch.from_numpy(padded)


# -- to a device -------------------------------------------------------------------------------------------------------


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device; itself where it is there. A source in pageable memory may be changed at once.

    Tensors of 64 KiB to 4 MiB go to a GPU in pieces that wait for no other copies. In one piece, an input of 72 KiB
    waits for everything that is prefetched: docs/measurements/mechanisms.md.
    """
    target = torch.device(device)
    is_small = PIECE_BYTES < tensor.nbytes <= MOST_BYTES
    if target.type != "cuda" or not is_small or tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor.to(target, non_blocking=True)
    source = tensor.contiguous()
    result = torch.empty(source.shape, dtype=source.dtype, device=target)
    copy_in_pieces(source, result)
    return result


def copy_in_pieces(source: Tensor, target: Tensor) -> None:
    """Copy between contiguous tensors of the same size and type, `PIECE_BYTES` at a time."""
    pieces = (tensor.view(-1).view(torch.uint8).split(PIECE_BYTES) for tensor in (target, source))
    for to, part in zip(*pieces, strict=True):
        to.copy_(part, non_blocking=True)
