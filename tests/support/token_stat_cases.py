"""What `TokenStat` measures, by Hugging Face's logits and plain code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import TrainBatch
from nemo_offload_rl.protocols.loss import TokenStat


@torch.no_grad()
def with_predicted_tokens(model: Any, batch: TrainBatch) -> TrainBatch:
    """The batch with about half of its tokens, also in prompts, replaced by what the model would choose there."""
    ids_BS = batch.input_ids.clone()
    is_replaced_BS = torch.rand(ids_BS.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    for place in range(1, ids_BS.shape[1]):
        chosen_B = model(input_ids=ids_BS[:, :place]).logits[:, -1].argmax(-1)
        ids_BS[:, place] = torch.where(is_replaced_BS[:, place], chosen_B, ids_BS[:, place])
    return replace(batch, input_ids=ids_BS)


@torch.no_grad()
def hf_token_stats(model: Any, batch: TrainBatch, temperature: float = 1.0) -> dict[TokenStat, float]:
    """Means over the counted tokens."""
    logits: list[Tensor] = []
    targets: list[Tensor] = []
    for ids_S, mask_S in zip(batch.input_ids, batch.loss_mask, strict=True):
        counted_N = mask_S.nonzero()[:, 0]
        logits.append(model(input_ids=ids_S[None]).logits[0, counted_N - 1].double())
        targets.append(ids_S[counted_N])
    logits_NV, targets_N = torch.cat(logits), torch.cat(targets)
    accuracy = float((logits_NV.argmax(-1) == targets_N).double().mean())
    assert 0 < accuracy < 1, "a batch that cannot tell"
    entropy = torch.distributions.Categorical(logits=logits_NV / temperature).entropy()
    return {TokenStat.ACCURACY: accuracy, TokenStat.ENTROPY: float(entropy.mean())}
