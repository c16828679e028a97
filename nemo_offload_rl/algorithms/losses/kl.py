"""Estimators of the KL divergence from samples, one value per token.

Sources: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html, for the values; "On a few
pitfalls in KL divergence gradient estimation for RL" (arXiv 2506.09477) for the gradients. docs/reference/metrics.md
lists which quantity each estimator's value and gradient estimate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_offload_rl.algorithms.losses.reduce import MAX_LOG_RATIO, bounded


def estimate_kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    estimator: str,
    input_clamp: float | None,
    output_clamp: float | None,
    sampler_logprobs: Tensor | None = None,
) -> Tensor:
    """KL(policy || reference) per token, of the shape of the inputs, with gradient through `logprobs`.

    With r = p_reference / p_policy at a sampled token the value is -log r (k1), (log r)^2 / 2 (k2) or r - 1 - log r
    (k3). A trailing "+" keeps that value and takes the gradient of k2, which is the gradient of the divergence.

    Args:
        logprobs: Of the policy.
        reference_logprobs: Of the reference, for the same tokens.
        estimator: "k1", "k2", "k3", "k1+" or "k3+".
        input_clamp: Bound on |log r|, without gradient beyond; None for `MAX_LOG_RATIO`.
        output_clamp: Bound on the absolute value; None for none. Without a "+" there is no gradient beyond it either.
        sampler_logprobs: Of what sampled the tokens, if that was not the policy: estimates are weighted by p_policy /
            p_sampler. Weights of k1 and k3 have their gradient, which those two need and k2 must not have.

    Raises:
        ValueError: The estimator is unknown.
    """
    difference = reference_logprobs - logprobs
    log_r = bounded(difference, MAX_LOG_RATIO if input_clamp is None else input_clamp)
    weight = torch.ones_like(log_r) if sampler_logprobs is None else bounded(logprobs - sampler_logprobs).exp()
    k2 = weight.detach() * log_r.square() / 2
    # Beyond the clamp nothing has a gradient, the weight included.
    weight = torch.where(log_r == difference, weight, weight.detach())
    match estimator:
        case "k1" | "k1+":
            kl = -weight * log_r
        case "k2":
            kl = k2
        case "k3" | "k3+":
            kl = weight * (log_r.exp() - 1 - log_r)
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}: known are k1, k2, k3, k1+ and k3+")
    if output_clamp is not None:
        kl = kl.clamp(-output_clamp, output_clamp)
    return kl.detach() + (k2 - k2.detach()) if estimator.endswith("+") else kl
