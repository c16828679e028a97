"""Random routing for batches, and Hugging Face's own forward with that routing forced on its routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import TokenBatch


def random_routing(batch: TokenBatch, num_layers: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    """[B, S, layers, K] uint8: distinct experts of real tokens; zeros for the last token of a row and for padding."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = batch.input_ids.shape
    scores = torch.rand(num_rows, width, num_layers, num_experts, generator=generator)
    is_known_BS = torch.arange(width) < batch.input_lengths.unsqueeze(1) - 1
    return scores.topk(top_k).indices.to(torch.uint8) * is_known_BS[:, :, None, None].to(torch.uint8)


def with_random_routing[Batch: TokenBatch](batch: Batch, config: Any, seed: int = 0) -> Batch:
    """The batch with `random_routing` for a model with this config."""
    sizes = (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
    return replace(batch, routed_experts=random_routing(batch, *sizes, seed))


@contextmanager
def forced(batch: TokenBatch, layers: Sequence[int], num_experts: int) -> Iterator[None]:
    """Within the context, choices of experts give the batch's, in forward passes over all rows or over each in turn.

    Args:
        batch: At least two rows with routing.
        layers: Layers with experts, in the order in which they run.
        num_experts: Experts of a layer.
    """
    experts_BSDK = batch.routed_experts
    assert experts_BSDK is not None
    topk, method, num_calls = torch.topk, Tensor.topk, 0
    (num_rows, width), top_k = batch.input_ids.shape, experts_BSDK.shape[-1]

    def chosen(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        values, indices = topk(scores, *args, **kwargs)
        if scores.dim() == 2 and scores.shape[1] == num_experts and indices.shape[1] == top_k:
            number, place = divmod(num_calls, len(layers))
            num_calls += 1
            rows = slice(None) if len(scores) == num_rows * width else slice(number, number + 1)
            given = experts_BSDK[rows, :, layers[place]].flatten(0, 1).long()
            is_known = (given.sort(-1).values.diff() != 0).all(-1, keepdim=True)
            indices = torch.where(is_known, given, indices)
            values = scores.gather(1, indices)
        return torch.return_types.topk((values, indices))

    torch.topk, Tensor.topk = chosen, chosen
    try:
        yield
    finally:
        torch.topk, Tensor.topk = topk, method
    assert num_calls and num_calls % len(layers) == 0, f"{num_calls} choices in layers {layers}"
