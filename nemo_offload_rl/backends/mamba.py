"""Mamba-2 layers (arXiv 2405.21060) by torch's matrix products, where the kernels of mamba-ssm are missing.

transformers 5.12.1 has such a path too, but that of Nemotron-H is wrong for rows of more than one chunk: it sums states
over the chunks that they go to, instead of those that they come from, so tokens see later ones; and it bounds time
steps below by `time_step_min`, which is for drawing the first weights. In every family it needs memory in chunk size x
heads x state size for each token, which is here chunk size x heads.

Shape suffixes: B rows of L tokens, C chunks of S tokens (T as sources), G groups of R heads of size P, states of N.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compute_mamba_by_chunks(causal_lm: nn.Module) -> None:
    """Let a model's Mamba-2 layers compute with this module where they have no kernels, in place."""
    for module in causal_lm.modules():
        if hasattr(module, "A_log") and hasattr(module, "ssm_state_size"):
            module.forward = partial(_forward, module, module.forward)


def _forward(mixer: Any, own: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a layer's output [B, L, hidden size]; `own` is the module's method, for kernels."""
    source = importlib.import_module(type(mixer).__module__)
    has_factors = hasattr(mixer, "mup_vector")  # Falcon-H1, whose own method multiplies by float32 numbers
    has_kernels = hidden_states.is_cuda and source.is_fast_path_available
    if has_kernels and not has_factors:
        return own(hidden_states, *args, **kwargs)
    num_tokens, size = hidden_states.shape[1], mixer.n_groups * mixer.ssm_state_size
    if has_factors:
        projected = mixer.in_proj(hidden_states * mixer.ssm_in_multiplier) * mixer.mup_vector.to(hidden_states.dtype)
    else:
        projected = mixer.in_proj(hidden_states)
    gate, mixed, steps = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    mixed = mixer.act(mixer.conv1d(mixed.transpose(1, 2))[..., :num_tokens].transpose(1, 2))
    values, keys, queries = mixed.split([mixer.intermediate_size, size, size], dim=-1)
    steps_BLH = F.softplus(steps.float() + mixer.dt_bias.float())
    if mixer.time_step_limit is not None:
        steps_BLH = steps_BLH.clamp(*mixer.time_step_limit)
    values_BLHP = values.unflatten(-1, (mixer.num_heads, mixer.head_dim))
    keys_BLGN, queries_BLGN = (it.unflatten(-1, (mixer.n_groups, -1)) for it in (keys, queries))
    rates_H = -mixer.A_log.float().exp()
    scan = source.mamba_chunk_scan_combined if has_kernels else scanned
    made_BLHP = scan(values_BLHP, steps_BLH, rates_H, keys_BLGN, queries_BLGN, mixer.chunk_size)
    made = (made_BLHP.float() + mixer.D.float().unsqueeze(-1) * values_BLHP.float()).flatten(-2)
    made = mixer.norm(made, gate).reshape(made.shape) if hasattr(mixer, "norm") else made * F.silu(gate.float())
    return mixer.out_proj(made.to(hidden_states.dtype))


def scanned(
    values_BLHP: Tensor, steps_BLH: Tensor, rates_H: Tensor, keys_BLGN: Tensor, queries_BLGN: Tensor, chunk_size: int
) -> Tensor:
    """Compute y_t = q_t h_t with the states h_t = exp(step_t rate) h_{t-1} + step_t k_t v_t, in float32.

    mamba-ssm's kernel has the same arguments.

    Args:
        values_BLHP: v, of heads in order of their groups.
        steps_BLH: Time steps, positive.
        rates_H: Rates of decay, negative.
        keys_BLGN: k, the same for all heads of a group.
        queries_BLGN: q, likewise.
        chunk_size: Tokens that are computed at once.

    Returns:
        [B, L, H, P]
    """
    values_BLHP, keys_BLGN, queries_BLGN = (it.float() for it in (values_BLHP, keys_BLGN, queries_BLGN))
    length, num_groups = values_BLHP.shape[1], keys_BLGN.shape[2]
    added = -length % chunk_size  # steps of 0, which leave states as they are

    def in_chunks(tensor: Tensor) -> Tensor:
        return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, added)).unflatten(1, (-1, chunk_size))

    steps = in_chunks(steps_BLH)
    values_BCSGRP = (in_chunks(values_BLHP) * steps.unsqueeze(-1)).unflatten(3, (num_groups, -1))
    keys_BCSGN, queries_BCSGN = in_chunks(keys_BLGN), in_chunks(queries_BLGN)
    # Logarithms of what is left of a chunk's first state after each token.
    left_BCGRS = (steps * rates_H).cumsum(2).movedim(2, 3).unflatten(2, (num_groups, -1))
    is_later_ST = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=steps.device).tril()
    between_BCGRST = (left_BCGRS.unsqueeze(-1) - left_BCGRS.unsqueeze(-2)).masked_fill(~is_later_ST, -torch.inf).exp()
    scores_BCGST = torch.einsum("bcsgn,bctgn->bcgst", queries_BCSGN, keys_BCSGN)
    inside = torch.einsum("bcgrst,bctgrp->bcsgrp", scores_BCGST.unsqueeze(3) * between_BCGRST, values_BCSGRP)

    until_end = (left_BCGRS[..., -1:] - left_BCGRS).exp()
    given_BCGRPN = torch.einsum("bcgrs,bcsgrp,bcsgn->bcgrpn", until_end, values_BCSGRP, keys_BCSGN)
    kept_BCGR = left_BCGRS[..., -1].exp()
    state, before = torch.zeros_like(given_BCGRPN[:, 0]), []
    for given_BGRPN, kept_BGR in zip(given_BCGRPN.unbind(1), kept_BCGR.unbind(1), strict=True):
        before.append(state)
        state = state * kept_BGR[..., None, None] + given_BGRPN
    carried = torch.einsum("bcsgn,bcgrpn,bcgrs->bcsgrp", queries_BCSGN, torch.stack(before, dim=1), left_BCGRS.exp())
    return (inside + carried).flatten(1, 2).flatten(2, 3)[:, :length]
