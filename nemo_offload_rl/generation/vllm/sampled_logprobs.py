"""Logprobs of sampled tokens over the whole vocabulary, at the sampling temperature.

vLLM 0.25.1 reports logprobs before the temperature (`raw_logprobs`), or after top-p and top-k, over the tokens that
these leave (`processed_logprobs`). The policy's are after the temperature and before top-p and top-k. With vLLM's a
`top_p` of 0.7 could not be told from an engine that is another model: both change every probability.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def report_unfiltered(sampler: Any) -> None:
    """Have a sampler of vLLM with `processed_logprobs` report logprobs before top-p and top-k; what it draws stays.

    Args:
        sampler: Of a model runner, of the first kind (a module) or the second.
    """
    if isinstance(sampler, nn.Module):
        sampler.topk_topp_sampler = _Unfiltered(sampler.topk_topp_sampler)
    else:
        sampler.sample = partial(_sample, sampler, sampler.sample)


class _Unfiltered(nn.Module):
    """In the place of vLLM's `TopKTopPSampler`, which it asks."""

    def __init__(self, sampler: Any) -> None:
        super().__init__()
        self._sampler = sampler

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [B], and logprobs [B, V] of the logits as they come; the sampler may overwrite those."""
        if k is None and p is None:
            return self._sampler(logits, generators, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        token_ids, _ = self._sampler(logits, generators, k, p)
        return token_ids, logprobs


def _sample(sampler: Any, sample: Any, logits: Tensor, *where: Any, return_logprobs: bool = False) -> tuple[Any, Any]:
    """In the place of `Sampler.sample` of the second model runner: token ids, and the logits of the logprobs."""
    token_ids, processed = sample(logits, *where, return_logprobs=return_logprobs)
    top_k, top_p = sampler.sampling_states.get_top_k_top_p(*where[:2])
    if return_logprobs and (top_k is not None or top_p is not None):
        processed = sampler.apply_sampling_params(logits, *where, skip_top_k_top_p=True)
    return token_ids, processed
