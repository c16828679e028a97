"""Layers that carry a state along a row (gated delta nets, Mamba, short convolutions), with packed rows.

A packed row has several sequences end to end; no state may cross from one to the next. Attention learns of their
bounds from positions or masks, but these modules read neither, so each sequence goes through them on its own. Where
kernels that take bounds are installed, one call computes all sequences.

To join, a family's record names its modules: `ModelFamily.state_mixer` is the end of their classes' names. They are
called with hidden states [1, L, H] (as first argument, or `hidden_states`), without a cache or mask, and return
[1, L, H]. If transformers hands `seq_idx` and `cu_seq_lens_q` to kernels of such a class, add its name to
`_PASS_BOUNDS`. The packages of its kernels go to `_PACKAGES`.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.delta_kernels import gradients_problem
from nemo_offload_rl.models.families import state_mixer

LENGTHS = "sequence_lengths"
"""Argument of decoder layers: the tokens of each sequence of a packed row, as integers on the host."""

_BOUNDS = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_TOLD = "nemo_offload_rl_sequence_lengths"  # attribute of mixers
_TAKES_BOUNDS = "nemo_offload_rl_takes_bounds"  # attribute of models
# Classes to which transformers 5.12.1 passes bounds, and which give them to kernels.
_PASS_BOUNDS = (
    "GraniteMoeHybridMambaLayer",
    "Lfm2MoeShortConv",
    "Lfm2ShortConv",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
)
# By record.
_PACKAGES = {
    "GatedDeltaNet": "flash-linear-attention and causal-conv1d",
    "Mamba2Mixer": "mamba-ssm and causal-conv1d",
    "FalconH1Mixer": "mamba-ssm and causal-conv1d",
    "MambaLayer": "mamba-ssm and causal-conv1d",
    "ShortConv": "causal-conv1d",
}


def norms_in_torch(config: Any) -> None:
    """Let transformers build norms and short convolutions from torch's operations, also with flash-linear-attention.

    Norms of that package are made on the current GPU, whatever device the model is built on; building a model without
    memory, to check or to plan a run, would take a context of a GPU that this process does not own.
    """
    source = importlib.import_module(AutoModelForCausalLM._model_mapping[type(config)].__module__)
    for name in ("FusedRMSNormGated", "ShortConvolution"):
        if hasattr(source, name):
            setattr(source, name, None)


def without_kernels(causal_lm: Any) -> None:
    """Let gated delta nets compute with torch's operations, which run on any device, also without memory."""
    for mixer in causal_lm.modules():
        source = importlib.import_module(type(mixer).__module__)
        if hasattr(mixer, "chunk_gated_delta_rule") and hasattr(source, "torch_chunk_gated_delta_rule"):
            mixer.chunk_gated_delta_rule = source.torch_chunk_gated_delta_rule
            mixer.causal_conv1d_fn = None
    if has_states(causal_lm):
        setattr(causal_lm, _TAKES_BOUNDS, False)


def keep_sequences_apart(causal_lm: Any, layers: Iterable[nn.Module]) -> None:
    """Prepare a model for packed rows: each sequence begins with an empty state. Other families stay unchanged.

    Args:
        causal_lm: The model, as transformers built it.
        layers: Its decoder layers.
    """
    kind = state_mixer(causal_lm.config.to_dict())
    if kind is None:
        return
    mixers: list[list[Any]] = [
        [part for part in layer.modules() if type(part).__name__.endswith(kind)] for layer in layers
    ]
    takes_bounds = all(
        type(mixer).__name__ in _PASS_BOUNDS and _has_kernels(mixer) for several in mixers for mixer in several
    )
    setattr(causal_lm, _TAKES_BOUNDS, takes_bounds)
    for layer, several in zip(layers, mixers, strict=True):
        for mixer in several:
            setattr(mixer, _TOLD, None)
            mixer.forward = partial(_by_sequence, mixer, mixer.forward)
            if hasattr(mixer, "A_log"):
                mixer.train = partial(_not_trained_fused, mixer)
        layer.forward = partial(_tell, several, layer.forward)  # no hook: layers one by one run without theirs


def has_states(causal_lm: nn.Module) -> bool:
    """Tell whether a model that `keep_sequences_apart` has seen has layers with states."""
    return hasattr(causal_lm, _TAKES_BOUNDS)


def sequence_arguments(causal_lm: Any, lengths: Sequence[int], bounds: Tensor | None) -> dict[str, Any]:
    """Return the arguments of a forward pass that keep the sequences of its packed row apart; none for other models.

    Args:
        causal_lm: The model.
        lengths: Tokens of each sequence.
        bounds: [sequences + 1] int32 on the model's device: the start of each sequence, and L; None without packing.
    """
    if bounds is None or not has_states(causal_lm):
        return {}
    if not getattr(causal_lm, _TAKES_BOUNDS) or bounds.device.type == "cpu":
        return {LENGTHS: tuple(lengths)}
    places_L = torch.arange(sum(lengths), dtype=torch.int32, device=bounds.device)
    seq_idx = torch.bucketize(places_L, bounds[1:], right=True, out_int32=True).unsqueeze(0)
    return {"cu_seq_lens_q": bounds, "seq_idx": seq_idx}


def choose_kernels(causal_lm: Any) -> str | None:
    """Leave the kernels of a model's layers with states that are wrong on this GPU; call it on a GPU only.

    Returns:
        Why these layers compute with torch's operations, and which packages would make them faster; None for kernels.
    """
    kind = state_mixer(causal_lm.config.to_dict())
    mixers = [] if kind is None else [it for it in causal_lm.modules() if type(it).__name__.endswith(kind)]
    if kind is None or kind not in _PACKAGES:
        return None
    reason = gradients_problem() if any(hasattr(mixer, "chunk_gated_delta_rule") for mixer in mixers) else None
    if reason is not None:
        without_kernels(causal_lm)
    elif all(map(_has_kernels, mixers)):
        return None
    return (
        f"Layers with states ({type(mixers[0]).__name__}) compute with torch's own operations, sequence by sequence, "
        f"which is slow: {reason or f'install {_PACKAGES[kind]} for kernels'}"
    )


def _has_kernels(mixer: nn.Module) -> bool:
    """Tell whether transformers has found all kernels of a class."""
    return bool(getattr(importlib.import_module(type(mixer).__module__), "is_fast_path_available", False))


def _not_trained_fused(mixer: nn.Module, _mode: bool = True) -> nn.Module:
    """Keep a Mamba layer in eval mode: the fused kernel of training reads weights past adapters and differs in bits."""
    mixer.training = False
    return mixer


def _tell(mixers: Sequence[nn.Module], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take the lengths out of a layer's arguments and leave them with its mixers, also when it is computed again."""
    lengths = kwargs.pop(LENGTHS, None)
    for mixer in mixers:
        setattr(mixer, _TOLD, lengths)
    return forward(*args, **kwargs)


def _by_sequence(mixer: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Compute each sequence of a packed row on its own; other rows at once."""
    lengths = getattr(mixer, _TOLD)
    if lengths is None:
        return forward(*args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in _BOUNDS}
    if "hidden_states" in kwargs:
        hidden_1LH = kwargs.pop("hidden_states")
    else:
        hidden_1LH, args = args[0], args[1:]
    parts = [forward(part, *args, **kwargs) for part in hidden_1LH.split(lengths, dim=1) if part.shape[1]]
    return torch.cat(parts, dim=1)
