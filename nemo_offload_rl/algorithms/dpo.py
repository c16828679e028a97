"""DPO: the policy learns which of two responses is the better one. The loop is `algorithms/supervised.py`.

The loss compares with a frozen reference, the policy's initial weights. Its logprobs come from a host copy that is
swapped into the policy's memory in each step, or are computed once before training and saved with the checkpoints.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nemo_offload_rl.algorithms.losses import DpoLoss, counted_sums
from nemo_offload_rl.algorithms.reference_logprobs import ReferenceFile
from nemo_offload_rl.data.batch import PreferenceBatch, TrainBatch, collate_pairs
from nemo_offload_rl.data.records import ExamplePair, Splits
from nemo_offload_rl.data.tokenizer import Decode, example_text
from nemo_offload_rl.keys.supervised import DpoSectionConfig
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.protocols.loss import LossFn

logger = logging.getLogger(__name__)

_PAIRS_AT_ONCE = 256


class DpoRecipe:
    """See `Recipe`.

    Args:
        settings: The keys `dpo.*`.
        pairs: Tokenized data.
        decode: Turns token ids into text.
        pad_id: Token id of padding.
        width_multiple: Rows are padded to a multiple of this many tokens.
        saved: File of precomputed reference logprobs; None computes them at each start.
        loss: Replaces DPO's loss.
    """

    rows_per_item = 2

    def __init__(
        self,
        settings: DpoSectionConfig,
        *,
        pairs: Splits[ExamplePair],
        decode: Decode,
        pad_id: int,
        width_multiple: int,
        saved: ReferenceFile | None,
        loss: LossFn | None = None,
    ) -> None:
        self.loss: LossFn = loss or DpoLoss(settings)
        self.needs_reference = not settings.precompute_reference_logprobs
        self.data = pairs
        self._decode = decode
        self._pad_id = pad_id
        self._width_multiple = width_multiple
        self._saved = saved
        self._known_sums: dict[str, Tensor] = {}  # by "train" and "validation": [2 * pairs]

    def begin(self, policy: Policy) -> None:
        """Precompute reference logprobs if there is no reference copy: the untrained policy is the reference."""
        if self.needs_reference:
            return
        known = None if self._saved is None else self._saved.read()
        if known is None:
            known = self._compute_sums(policy)
            if self._saved is not None:
                self._saved.write(known)
        self._known_sums = known

    def _compute_sums(self, policy: Policy) -> dict[str, Tensor]:
        began = time.perf_counter()
        policy.prepare_for_lp_inference()
        known: dict[str, Tensor] = {}
        for validation, pairs in ((False, self.data.train), (True, self.data.validation)):
            sums = [torch.zeros(0, dtype=torch.float64)]
            for start in range(0, len(pairs), _PAIRS_AT_ONCE):
                items = range(start, min(start + _PAIRS_AT_ONCE, len(pairs)))
                batch = self.batch(items, validation=validation)
                sums.append(counted_sums(policy.get_logprobs(batch, counted_only=True), batch))
            known[_part(validation)] = torch.cat(sums)
        num_pairs = len(self.data.train) + len(self.data.validation)
        logger.info("reference logprobs of %d pairs computed in %.1f s", num_pairs, time.perf_counter() - began)
        return known

    def batch(self, items: Sequence[int], *, validation: bool) -> PreferenceBatch:
        source = self.data.validation if validation else self.data.train
        return collate_pairs([source[item] for item in items], pad_id=self._pad_id, multiple=self._width_multiple)

    def complete(self, policy: Policy, batch: TrainBatch, items: Sequence[int], *, validation: bool) -> PreferenceBatch:
        assert isinstance(batch, PreferenceBatch), type(batch)
        if self.needs_reference:
            sums = counted_sums(policy.get_reference_logprobs(batch, counted_only=True), batch)
        else:
            rows = [2 * item + row for item in items for row in (0, 1)]
            sums = self._known_sums[_part(validation)][rows]
        return replace(batch, reference_sums=sums)

    def weight(self, batch: TrainBatch) -> float:
        return float(batch.sample_mask.sum()) / 2

    def data_metrics(self, batch: TrainBatch, training_s: float) -> dict[str, float]:
        num_tokens = float(batch.input_lengths.sum())
        return {
            "num_tokens": num_tokens,
            "max_sequence_tokens": float(batch.input_lengths.max()),
            "training_tokens_per_s": num_tokens / training_s,
            "training_pairs_per_s": len(batch) / 2 / training_s,
            "overlong_row_rate": 1.0 - float(batch.sample_mask.mean()),
        }

    def validation_metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        return dict(means)

    def figures(self, metrics: Mapping[str, float]) -> dict[str, str]:
        margin = f"{metrics['rewards_margin_mean']:.3f}"
        return {"loss": f"{metrics['loss']:.4f}", "accuracy": f"{metrics['accuracy']:.1%}", "margin": margin}

    def sample_lines(self, num_samples: int) -> Iterator[str]:
        for pair in (self.data.validation or self.data.train)[:num_samples]:
            yield f"  better: {example_text(pair.chosen, self._decode)!r}"
            yield f"  worse:  {example_text(pair.rejected, self._decode)!r}"


def _part(validation: bool) -> str:
    return "validation" if validation else "train"
