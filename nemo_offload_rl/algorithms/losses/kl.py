"""Estimators of the KL divergence from samples, one value per token.

Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. With r = p_reference /
p_policy at a token that the policy sampled: k1 = -log r (unbiased, high variance), k2 = (log r)^2 / 2 (biased, low
variance), k3 = r - 1 - log r (unbiased, never negative).
"""

from __future__ import annotations

from torch import Tensor


def estimate_kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    estimator: str,
    input_clamp: float | None,
    output_clamp: float | None,
) -> Tensor:
    """KL(policy || reference) per token, of the shape of the inputs, with gradient through `logprobs`.

    Args:
        logprobs: Of the policy.
        reference_logprobs: Of the reference, for the same tokens.
        estimator: "k1", "k2" or "k3".
        input_clamp: Bound on the absolute logprob difference; None for none.
        output_clamp: Bound on the absolute estimate; None for none.

    Raises:
        ValueError: The estimator is unknown.
    """
    log_r = reference_logprobs - logprobs
    if input_clamp is not None:
        log_r = log_r.clamp(-input_clamp, input_clamp)
    match estimator:
        case "k1":
            kl = -log_r
        case "k2":
            kl = log_r.square() / 2
        case "k3":
            kl = log_r.exp() - 1 - log_r
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}: known are k1, k2 and k3")
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)
