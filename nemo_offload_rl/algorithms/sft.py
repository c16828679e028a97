"""Supervised fine-tuning: the policy imitates what the assistant wrote. The loop is `algorithms/supervised.py`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.batch import TrainBatch, collate_examples
from nemo_offload_rl.data.records import Example, Splits
from nemo_offload_rl.data.tokenizer import Decode, example_text
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.protocols.loss import LossFn


@dataclass(frozen=True, kw_only=True)
class SftRecipe:
    """See `Recipe`.

    Attributes:
        data: Tokenized examples.
        decode: Turns token ids into text.
        pad_id: Token id of padding.
        width_multiple: Rows are padded to a multiple of this many tokens.
        loss: The loss to minimise.
    """

    data: Splits[Example]
    decode: Decode
    pad_id: int
    width_multiple: int
    loss: LossFn = field(default_factory=NLLLoss)
    rows_per_item: int = 1
    needs_reference: bool = False

    def begin(self, policy: Policy) -> None:
        """Do nothing: SFT has no reference."""

    def batch(self, items: Sequence[int], *, validation: bool) -> TrainBatch:
        source = self.data.validation if validation else self.data.train
        return collate_examples([source[item] for item in items], pad_id=self.pad_id, multiple=self.width_multiple)

    def complete(self, policy: Policy, batch: TrainBatch, items: Sequence[int], *, validation: bool) -> TrainBatch:
        return batch

    def weight(self, batch: TrainBatch) -> float:
        return float(batch.loss_mask.sum())

    def data_metrics(self, batch: TrainBatch, training_s: float) -> dict[str, float]:
        num_tokens = float(batch.input_lengths.sum())
        return {
            "num_tokens": num_tokens,
            "num_counted_tokens": self.weight(batch),
            "overlong_row_rate": 1.0 - float(batch.sample_mask.mean()),
            "max_sequence_tokens": float(batch.input_lengths.max()),
            "training_tokens_per_s": num_tokens / training_s,
        }

    def validation_metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        # Above e^80 a perplexity means nothing, and above e^709 it overflows.
        perplexity = math.exp(min(means["loss"], 80.0))
        return {"loss": means["loss"], "perplexity": perplexity, "token_accuracy": means["token_accuracy"]}

    def figures(self, metrics: Mapping[str, float]) -> dict[str, str]:
        return {"loss": f"{metrics['loss']:.4f}", "token accuracy": f"{metrics['token_accuracy']:.1%}"}

    def sample_lines(self, num_samples: int) -> Iterator[str]:
        for example in (self.data.validation or self.data.train)[:num_samples]:
            yield f"  learns what is in [[ ]]: {example_text(example, self.decode)!r}"
