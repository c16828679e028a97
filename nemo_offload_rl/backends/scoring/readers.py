"""Functions of the last hidden states: scores of tokens, a teacher's top-k, divergences from a teacher.

For all backends, logits exist only here, for one chunk of positions at a time.

Shape suffixes: N positions, V this rank's part of the vocabulary, K tokens of a top-k, H hidden size.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_offload_rl.backends.scoring.divergence import TopK, full_divergence, topk_divergence, topk_logprobs
from nemo_offload_rl.backends.scoring.logprobs import TokenScores, chunked_scores, drawn_scores, measured_loss
from nemo_offload_rl.data.batch import HiddenStatesBatch, LossNorm, SampledBatch, TopKBatch, TrainBatch
from nemo_offload_rl.protocols.loss import (
    Divergence,
    DivergenceLoss,
    DivergenceScores,
    LossFn,
    ReferenceLoss,
    TokenStat,
)
from nemo_offload_rl.protocols.scoring import Head, OutputLayer, Positions, Reader, TeacherHead, capped


@dataclass(frozen=True)
class ReadScores:
    """A `Reader` of the tokens' logprobs, and of a stat of the distribution there.

    Attributes:
        stat: The stat; None for none.
        with_whole: If there is a filter, also read logprobs over the whole vocabulary.
        only_whole: Ignore the filter: read logprobs over the whole vocabulary only.
    """

    stat: TokenStat | None = None
    with_whole: bool = False
    only_whole: bool = False

    def __call__(self, output_layer: OutputLayer, positions: Positions, head: Head) -> TokenScores:
        return chunked_scores(
            output_layer,
            positions.hidden,
            positions.targets,
            temperature=head.temperature,
            chunk_size=head.chunk_size,
            shard=head.shard,
            stat=self.stat,
            kept=None if self.only_whole else head.kept,
            with_whole=self.with_whole,
        )


@dataclass(frozen=True)
class ReadTopK:
    """A `Reader` of the k most likely tokens at each token's position."""

    k: int

    def __call__(self, output_layer: OutputLayer, positions: Positions, head: Head) -> TopK:
        found = [
            topk_logprobs(output_layer(piece.hidden), self.k, head.temperature, head.shard)
            for piece in positions.split(head.chunk_size)
        ]
        return TopK(*(torch.cat(values) for values in zip(*found, strict=True)))


class HiddenStates(NamedTuple):
    """[N, H] last hidden states."""

    hidden: Tensor


@dataclass(frozen=True)
class ReadHiddenStates:
    """A `Reader` that returns the last hidden states themselves."""

    def __call__(self, output_layer: OutputLayer, positions: Positions, head: Head) -> HiddenStates:
        return HiddenStates(positions.hidden)


@dataclass(frozen=True)
class ReadDivergences:
    """Reads divergences of the student from the teacher's data in a batch.

    Args:
        divergence: The divergence to compute.
        batch: The micro-batch, on the device.
        teacher_head: Needed for a `HiddenStatesBatch`.
    """

    divergence: Divergence
    batch: SampledBatch
    teacher_head: TeacherHead | None

    def __call__(self, output_layer: OutputLayer, positions: Positions, head: Head) -> DivergenceScores:
        """See `Reader`; backward computes each chunk's logits again."""

        def read(piece: Positions) -> DivergenceScores:
            logits_NV = output_layer(piece.hidden)
            with torch.no_grad():
                logprobs_N = drawn_scores(logits_NV, piece.targets, head.temperature, head.shard, kept=head.kept)[0]
            divergence_N, mass_N = self._compare(logits_NV, piece.places, head)
            return DivergenceScores(divergence_N, logprobs_N, mass_N)

        def read_again_in_backward(piece: Positions) -> DivergenceScores:
            return checkpoint(read, piece, use_reentrant=False)  # pyright: ignore[reportReturnType]

        again = head.chunk_size is not None and torch.is_grad_enabled()
        found = [(read_again_in_backward if again else read)(piece) for piece in positions.split(head.chunk_size)]
        return DivergenceScores(*(torch.cat(values) for values in zip(*found, strict=True)))

    def _compare(self, logits_NV: Tensor, places_N: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        """Return [N] divergences, and [N] the known share of the teacher's distribution."""

        def at_places(value_BSK: Tensor) -> Tensor:
            return value_BSK.flatten(0, 1)[places_N]

        match self.batch:
            case TopKBatch(teacher_logprobs=logprobs_BSK, teacher_ids=ids_BSK):
                teacher = TopK(at_places(logprobs_BSK), at_places(ids_BSK))
                mass_N = teacher.logprobs.exp().sum(-1)
                return topk_divergence(logits_NV, teacher, self.divergence, head.temperature, head.shard), mass_N
            case HiddenStatesBatch(teacher_hidden=hidden_BSH):
                teacher_head = self.teacher_head
                assert teacher_head is not None, "the batch has hidden states, and there is no teacher's output layer"
                found_N = full_divergence(
                    logits_NV,
                    capped(F.linear(at_places(hidden_BSH), teacher_head.weight), teacher_head.softcap),
                    self.divergence,
                    head.temperature,
                    head.shard,
                    teacher_temperature=teacher_head.temperature,
                )
                return found_N, torch.ones_like(found_N)
            case _:
                raise TypeError(f"{type(self.batch).__name__} has no data of a teacher")


def reader_for(loss_fn: LossFn, batch: TrainBatch, teacher_head: TeacherHead | None) -> Reader:
    """Return the reader that a loss needs for a micro-batch, which is on the device."""
    if not isinstance(loss_fn, DivergenceLoss):
        return ReadScores(loss_fn.token_stat, with_whole=isinstance(loss_fn, ReferenceLoss) and loss_fn.reads_whole)
    assert isinstance(batch, SampledBatch), type(batch)
    return ReadDivergences(loss_fn.divergence, batch, teacher_head)


def read_loss(loss_fn: LossFn, scores_BS: Any, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute loss and metrics of a micro-batch from the [B, S] results of `reader_for`'s reader."""
    if not isinstance(loss_fn, DivergenceLoss):
        return measured_loss(loss_fn, TokenScores(*scores_BS), batch, norm)
    scores_BS = DivergenceScores(*scores_BS)
    loss, metrics = loss_fn(scores_BS.divergence, batch, norm)
    return loss, {**metrics, **loss_fn.measure(scores_BS, batch, norm)}
